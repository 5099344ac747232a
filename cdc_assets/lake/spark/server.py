"""The local Spark Connect server: started once, shared by every process with the same settings.

The server is a supervised child of ours, ``python -m cdc_assets.lake.spark.server``, that runs
Spark's JVM with the Connect plugin on 127.0.0.1. Invariants: at most one server runs for the same
settings and home (a file lock; a second one waits and takes over), and it ends with the process
that asked for it: the child when its stdin ends, the JVM when the child's pipe to it does.

Others find it through ``spark-<hash of the settings>.json`` in the home: written in one step when
the server takes sessions, removed when it stops, and believed only while its process lives and its
port answers. Settings reach child and JVM by a pipe and a private file, never by a command line.

Whoever has a session runs code as this user, and every local user reaches a port of loopback. So
the server takes sessions only with its token, which is new at each start and stands in that state
file (mode 0600) alone; Spark's other ports take nobody without a secret of its own making.
What a client session sets, catalogs above all, does not belong here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from cdc_assets.errors import EnvironmentProblem, SparkProblem
from cdc_assets.lake.spark.class_archive import remove_archive, sharing_options
from cdc_assets.lake.spark.jars import provided
from cdc_assets.lake.spark.jvm import mend
from cdc_assets.lake.spark.properties import (
    SparkServerSettings,
    java_told,
    properties_text,
    spark_properties,
    temporary,
)
from cdc_assets.process import children as process
from cdc_assets.process import lifeline
from cdc_assets.process.home import private_folder, write_private
from cdc_assets.process.machine import check_java
from cdc_assets.process.traces import trace

# Options of somebody's own that name an archive, or another way of having one: Java takes one.
_SHARES = re.compile("SharedArchiveFile|ArchiveClassesAtExit|AOT(Cache|Mode|Configuration)|-Xshare")
# Of a JVM that meets a damaged page of an archive, or of its own doing.
_CRASHES = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)
_log = logging.getLogger(__name__)

# 8-14 s on two cores; the first start downloads Spark's jars.
START_SECONDS = 300.0
_POLL_SECONDS = 0.1
_JVM_SECONDS = 10.0  # its shutdown hooks remove block files; then it is killed
_CONNECT_SECONDS = 2.0


class SparkServer:
    """The server for some settings in a home, started by any process."""

    def __init__(self, settings: SparkServerSettings, home: Path) -> None:
        self.settings = settings
        self.home = Path(home).absolute()

    @property
    def state_path(self) -> Path:
        return self.home / f"spark-{self.settings.key}.json"

    @property
    def log_path(self) -> Path:
        return self.home / f"spark-{self.settings.key}.log"

    @property
    def _name(self) -> str:
        return f"spark:{self.state_path}"

    def url(self) -> str | None:
        """``sc://localhost:port/;token=…`` of the running server, a secret; or None."""
        try:
            state = json.loads(self.state_path.read_text())
        except FileNotFoundError:
            return None
        # An earlier version's server needs no token: any process may answer there.
        if "token" not in state or not psutil.pid_exists(state["pid"]):
            return None
        port: int = state["port"]
        return f"sc://localhost:{port}/;token={state['token']}" if _answers(port) else None

    def start(self) -> process.Status:
        """Start a server of our own if there is none, and return at once; for ticks.

        Raises EnvironmentProblem if there is no Java.
        """
        if process.child_of(self._name) is None:
            check_java()
        return process.supervise(self._name, self._spec())

    def wait(self, timeout_seconds: float = START_SECONDS) -> str:
        """The address once the server takes sessions; raises SparkProblem if it never does."""
        deadline = time.monotonic() + timeout_seconds
        while (url := self.url()) is None:
            child = process.child_of(self._name)
            if child is not None and not child.alive:
                raise SparkProblem(
                    f"the local Spark server ended with {child.returncode} before it was up.",
                    f"Its log says why: {self.log_path}.",
                )
            if time.monotonic() > deadline and (pid := self._earlier()) is not None:
                raise SparkProblem(
                    f"a Spark server of an earlier version still runs for these settings (process"
                    f" {pid}).",
                    "End what started it, an earlier dagster dev or cdc-assets; or that process.",
                )
            if time.monotonic() > deadline:
                raise SparkProblem(
                    f"the local Spark server is not up after {timeout_seconds:.0f} s.",
                    f"See its log: {self.log_path}.",
                )
            time.sleep(_POLL_SECONDS)
        return url

    def ensure(self, timeout_seconds: float = START_SECONDS) -> str:
        """The address of a server that runs, or of one started now.

        Raises EnvironmentProblem (no Java) or SparkProblem.
        """
        url = self.url()
        if url is not None:
            return url
        self.start()
        return self.wait(timeout_seconds)

    def _earlier(self) -> int | None:
        """The process of a server that knows no token; while it lives, no other one starts."""
        with suppress(OSError):
            state = json.loads(self.state_path.read_text())
            if "token" not in state and psutil.pid_exists(state["pid"]):
                return int(state["pid"])
        return None

    def stop(self) -> None:
        """Stop the server if this process started it."""
        process.stop(self._name)

    def _spec(self) -> process.ChildSpec:
        return process.ChildSpec(
            __name__,
            ("--home", str(self.home)),
            self.log_path,
            self.settings.to_json(),
        )


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


# -- the child's side


# Variables that may point to another Spark.
_OTHERS = (
    "SPARK_REMOTE",
    "SPARK_CONNECT_MODE_ENABLED",
    "SPARK_CONNECT_AUTHENTICATE_TOKEN",
    "SPARK_HOME",
    "SPARK_CONF_DIR",
)


def start_spark(properties: Mapping[str, str], scratch: Path, class_path: str) -> Any:
    """A classic Spark session in a new JVM that serves Connect, too.

    What Spark itself has goes before the ``class_path``.
    """
    file = private_folder(scratch) / "spark.properties"
    temporary(scratch).mkdir()
    write_private(file, properties_text(properties))
    try:
        os.environ["PYSPARK_SUBMIT_ARGS"] = f'--properties-file "{file}" pyspark-shell'
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        os.environ["SPARK_LOCAL_DIRS"] = str(scratch / "local")
        os.environ["TMPDIR"] = str(temporary(scratch))  # of Python workers
        last = [os.environ.get("SPARK_DIST_CLASSPATH", ""), class_path]
        os.environ["SPARK_DIST_CLASSPATH"] = os.pathsep.join(filter(None, last))
        for name in _OTHERS:
            os.environ.pop(name, None)
        own, sharing = os.environ.get("SPARK_SUBMIT_OPTS", ""), sharing_options(class_path)
        if sharing and not _SHARES.search(" ".join(java_told(properties))):
            os.environ["SPARK_SUBMIT_OPTS"] = f"{sharing} {own}".strip()
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession

        try:
            return SparkSession.builder.getOrCreate()
        except PySparkRuntimeError as error:
            if not sharing or error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            _log.warning("Java ended as it started; it is tried without the archive of classes")
            os.environ["SPARK_SUBMIT_OPTS"] = own
            session = SparkSession.builder.getOrCreate()
            remove_archive(class_path)  # it was the archive
            return session
    finally:
        file.unlink()


def connect_port(spark: Any) -> int:
    package = spark.sparkContext._jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")  # a Scala object
    return int(service.localPort())


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stdin ends; the settings are its first line."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__)
    parser.add_argument("--home", type=Path, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    settings = SparkServerSettings.from_json(lifeline.read_settings() or "{}")
    stopping = lifeline.die_with_parent()
    server = SparkServer(settings, private_folder(options.home))
    scratch = server.home / f"spark-{settings.key}"
    with server.state_path.with_suffix(".lock").open("w") as lock:
        if (pid := server._earlier()) is not None:
            _log.warning(
                "waiting for the end of process %d, an earlier version's Spark server", pid
            )
        if not lifeline.acquire(lock, stopping):
            return 0
        server.state_path.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)  # of a server that was killed
        try:
            check_java()
        except EnvironmentProblem as problem:
            sys.stderr.write(f"{problem}\n")
            return 1
        code = 1
        try:
            code = _serve(server, scratch, stopping)
        except EnvironmentProblem as problem:
            sys.stderr.write(f"{problem}\n")
        except Exception as error:  # noqa: BLE001 - the parent names this log, whatever it was
            _log.error("the Spark server failed:\n%s", trace(error))
        finally:
            server.state_path.unlink(missing_ok=True)
            shutil.rmtree(scratch, ignore_errors=True)
        sys.stderr.flush()
        # Not sys.exit: py4j's threads and exit hooks would talk to a JVM that is gone.
        os._exit(code)


def _serve(server: SparkServer, scratch: Path, stopping: threading.Event) -> int:
    began = time.monotonic()
    jars = provided(server.settings.conf, _log.info)
    properties = spark_properties(
        server.settings, scratch, token := secrets.token_urlsafe(32), jars.settings
    )
    spark = start_spark(properties, scratch, jars.class_path)
    jvm = spark.sparkContext._gateway.proc
    try:
        mend(spark)
        state = {"port": connect_port(spark), "token": token, "pid": os.getpid()}
        write_private(server.state_path, json.dumps(state))
        _log.info("serving after %.1f s", time.monotonic() - began)
        while not stopping.wait(0.5):
            if jvm.poll() is not None:
                _log.error("the Spark JVM ended with %s", jvm.returncode)
                if jvm.returncode in _CRASHES:
                    remove_archive(jars.class_path)  # it may be damaged
                return 1
        return 0
    finally:
        jvm.stdin.close()  # the JVM's request to end; without it, it would end with this process
        try:
            jvm.wait(_JVM_SECONDS)
        except subprocess.TimeoutExpired:
            jvm.kill()


if __name__ == "__main__":
    sys.exit(main())
