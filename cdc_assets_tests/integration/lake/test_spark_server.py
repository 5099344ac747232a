"""The local Spark Connect server: shared, found by others, gone with its starter."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from cdc_assets.errors import EnvironmentProblem, SparkProblem
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

STARTER = """
import sys, time
from pathlib import Path
from cdc_assets.lake.spark.server import SparkServer, SparkServerSettings
settings = SparkServerSettings(1, "512m", {"spark.cdc.test.secret": "s3cret"})
print(SparkServer(settings, Path(sys.argv[1])).ensure(), flush=True)
time.sleep(600)
"""


def test_sessions_work_and_python_tasks_run_in_this_python(spark_server: SparkServer) -> None:
    url = spark_server.ensure()
    assert url is not None
    assert url.startswith("sc://localhost:")
    session = SparkSession.builder.remote(url).create()
    try:
        seen = session.range(1).mapInArrow(_interpreter, "executable string").collect()
        assert seen[0].executable == sys.executable
        assert session.conf.get("spark.sql.session.timeZone") == "UTC"
        extensions = session.conf.get("spark.sql.extensions")
        assert extensions is not None
        assert "iceberg" in extensions
    finally:
        session.stop()


def test_a_short_job_does_not_wait_for_a_long_one(spark_server: SparkServer) -> None:
    url = spark_server.ensure()
    assert url is not None
    seconds = {}

    def run(name: str, tasks: int) -> None:
        session = SparkSession.builder.remote(url).create()
        began = time.monotonic()
        try:
            session.range(0, tasks, 1, tasks).mapInArrow(_slow, "id bigint").collect()
        finally:
            seconds[name] = time.monotonic() - began
            session.stop()

    run("first", 1)  # Python workers start
    long = threading.Thread(target=run, args=("long", 40))
    long.start()
    time.sleep(2.0)
    run("short", 2)
    long.join()
    # In the order of their coming the short one would end with the long one's last tasks.
    assert seconds["short"] < seconds["long"] / 2


def _slow(batches):  # type: ignore[no-untyped-def]
    import time

    time.sleep(0.5)
    yield from batches


def _interpreter(batches):  # type: ignore[no-untyped-def]
    import sys

    import pyarrow as pa

    for _ in batches:
        yield pa.record_batch({"executable": [sys.executable]})


def test_another_process_finds_it(spark_server: SparkServer) -> None:
    again = SparkServer(spark_server.settings, spark_server.home)
    assert again.ensure(timeout_seconds=0.0) == spark_server.ensure()
    assert spark_server.state_path.exists()


def test_it_listens_on_loopback_only(spark_server: SparkServer) -> None:
    pid = json.loads(spark_server.state_path.read_text())["pid"]
    listening = [
        connection.laddr.ip
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}


def test_two_starters_share_one_server_that_dies_with_them(tmp_path: Path) -> None:
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    urls = set()
    for starter in starters:
        assert starter.stdout is not None
        urls.add(starter.stdout.readline().strip())
    assert len(urls) == 1
    family = [child for starter in starters for child in psutil.Process(starter.pid).children(True)]
    assert sum(child.name() == "java" for child in family) == 1
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # what the shell script forked ends soon
            assert "s3cret" not in " ".join(child.cmdline())
    for starter in starters:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
        assert starter.stdout is not None
        starter.stdout.close()
    wait_for(lambda: not any(child.is_running() for child in family))
    left = {path.suffix for path in tmp_path.iterdir()}
    assert left == {".lock", ".log"}, "neither a state file nor a scratch folder"


def test_a_server_that_cannot_start_names_its_log(tmp_path: Path) -> None:
    settings = SparkServerSettings(conf={"spark.driver.memory": "a lot"})
    server = SparkServer(settings, tmp_path)
    try:
        with pytest.raises(SparkProblem, match=rf"ended with 1.*{server.log_path.name}"):
            server.ensure()
    finally:
        server.stop()


def test_no_java_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="needs Java and there is none at JAVA_HOME"):
        SparkServer(SparkServerSettings(), tmp_path / "home").ensure()
    assert not (tmp_path / "home").exists()


def test_a_state_file_of_a_dead_server_is_not_believed(tmp_path: Path) -> None:
    server = SparkServer(SparkServerSettings(), tmp_path)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (gone.pid, os.getpid()):  # a number that is free, and one that belongs to another
        state = {"port": 1, "token": "t0ken", "pid": pid}
        server.state_path.write_text(json.dumps(state))
        assert server.url() is None


def test_a_server_of_an_earlier_version_which_takes_anybody_is_not_used(tmp_path: Path) -> None:
    server = SparkServer(SparkServerSettings(), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"sc://127.0.0.1:{listener.getsockname()[1]}"
        state = {"url": url, "pid": os.getpid(), "started_at": 0.0}
        server.state_path.write_text(json.dumps(state))
        assert server.url() is None
        with server.state_path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                with pytest.raises(SparkProblem, match=rf"earlier version.*process {os.getpid()}"):
                    server.ensure(timeout_seconds=0.0)
                waiting = f"waiting for the end of process {os.getpid()}"
                wait_for(lambda: waiting in server.log_path.read_text())
            finally:
                server.stop()
