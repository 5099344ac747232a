"""A Spark standalone cluster, Postgres and the platform, each on machines of their own.

The master, the Connect server and each worker have a file system, a network and an environment
that nobody shares, and run as nobody; they are told what ``docs/operate/cluster.md``
says. Of this system's files they see, to be read, the operating system's, Java, Spark's
distribution and Python without packages. Nobody of the cluster knows the platform's name.

The platform is a process of ours in a network of its own: :meth:`Cluster.run` calls functions
there. Postgres has two lines, one to the platform and one to the cluster, which can be cut.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cdc_assets.lake.spark.jars import cache_folder, provide
from cdc_assets.lake.spark.python_archive import make_archive
from cdc_assets.process.machine import java_command
from cdc_assets_tests.support.jvm import QUICK_JVM
from cdc_assets_tests.support.machines import NOBODY, Machine, connect, machine
from cdc_assets_tests.support.on_machines import (
    Inside,
    Result,
    await_postgres,
    inside,
    start_postgres,
)
from cdc_assets_tests.support.waiting import wait_for

_ROOT = Path(__file__).parents[2]
PLATFORM, DATABASE, _NODES = "10.77.1.1", "10.77.0.1", "10.77.1.0/24"
_NAMES = ("master", "connect", "one", "two", "three", "four")
NODES = {name: f"10.77.1.{number}" for number, name in enumerate(_NAMES, start=2)}
WORKERS = ("one", "two")
_START_SECONDS = 400  # six JVMs, on a shared machine
_PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@dataclass
class Cluster:
    """Addresses and machines; ``folder`` has a log of each, and is the platform's alone."""

    folder: Path
    machines: Mapping[str, Machine]
    jvm: Mapping[str, str]
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    password: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def remote(self) -> str:
        return f"sc://{NODES['connect']}:15002/;authorization=Bearer%20{self.token}"

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres:{self.password}@{DATABASE}:5432/postgres"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start_master(self) -> None:
        self._start("master", "bin/spark-class", "org.apache.spark.deploy.master.Master")

    def start_worker(self, name: str) -> None:
        limits = ("--cores", "1", "--memory", "1g", "--work-dir", "/home/spark/work")
        worker = ("org.apache.spark.deploy.worker.Worker", *limits, "spark://master:7077")
        self._start(name, "bin/spark-class", *worker)

    def start_connect(self) -> None:
        server = ("--class", "org.apache.spark.sql.connect.service.SparkConnectServer")
        self._start("connect", "bin/spark-submit", *server, "spark-internal")

    def await_worker(self, name: str) -> None:
        """Wait until it is registered, and the server's application has an executor there."""
        self._await(name, "Asked to launch executor")

    def await_connect(self) -> None:
        self._await("connect", "Spark Connect server started")

    def restart_worker(self, name: str) -> None:
        self.start_worker(name)
        self.await_worker(name)

    def _await(self, name: str, said: str) -> None:
        def look() -> bool:
            assert self.machines[name].processes(), self.log(name)[-3000:]
            return said in self.log(name)

        wait_for(look, _START_SECONDS)

    def _start(self, name: str, command: str, *arguments: str) -> None:
        environment = {
            "PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin",
            "HOME": "/home/spark",
            "JAVA_HOME": str(_java()),
            "SPARK_HOME": "/opt/dist",
            "SPARK_CONF_DIR": "/opt/conf",
            "SPARK_LOCAL_HOSTNAME": name,
            **self.jvm,
        }
        if name == "connect":
            environment["SPARK_CONNECT_AUTHENTICATE_TOKEN"] = self.token
        else:
            environment["SPARK_DAEMON_MEMORY"] = "256m"  # it would be the server's heap, too
        log = self.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        command = f"/opt/dist/{command}"
        self.machines[name].start((command, *arguments), environment, log, NOBODY)
        wait_for(self.machines[name].processes)

    def cut(self) -> None:
        """Cut the line between the cluster and Postgres: no packet arrives, and none comes back."""
        self.machines["database"].do("ip", "link", "set", "cluster", "down")

    def mend(self) -> None:
        self.machines["database"].do("ip", "link", "set", "cluster", "up")
        self.machines["database"].do("ip", "route", "add", _NODES, "dev", "cluster")


@dataclass
class Running:
    """A cluster, and the process of the platform."""

    cluster: Cluster
    platform: Inside

    def run(self, do: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function of a module with the cluster, on the platform's machine."""
        return self.platform.run(do, self.cluster, *arguments)


@contextmanager
def running_cluster(
    folder: Path,
    workers: Sequence[str] = WORKERS,
    jvm: Mapping[str, str] = QUICK_JVM,
    settings: str = "",
) -> Iterator[Running]:
    """The cluster, running; ``folder`` is empty, and anybody may look into it.

    ``workers``: their names, of NODES. ``jvm``: of the environment of its JVMs. ``settings``: lines
    of the Connect server's ``spark-defaults.conf``.
    """
    with ExitStack() as cleanup:
        machines = _machines(cleanup, folder, ("master", "connect", *workers), settings)
        _wire(machines)
        cluster = Cluster(folder, machines, jvm)
        platform = cleanup.enter_context(platform_process(cluster))
        start_postgres(machines["database"], folder, cluster.password, "10.77.0.0/16")
        cluster.start_master()
        for name in workers:  # they look for their master until it is there
            cluster.start_worker(name)
        cluster.start_connect()
        platform.run(await_postgres, cluster.dsn)
        cluster.await_connect()
        for name in workers:
            cluster.await_worker(name)
        yield Running(cluster, platform)


def platform_process(cluster: Cluster) -> AbstractContextManager[Inside]:
    """A process of ours on the platform's machine."""
    home = {"CDC_ASSETS_HOME": str(cluster.folder / "home")}
    return inside(cluster.machines["platform"], home)


def _machines(
    cleanup: ExitStack, folder: Path, names: Sequence[str], more: str
) -> dict[str, Machine]:
    server, nodes, empty = folder / "server", folder / "nodes", folder / "empty"
    for made in (server / "jars", server / "conf", nodes, empty):
        made.mkdir(parents=True)
    _fill(server)
    secret = f"spark.authenticate true\nspark.authenticate.secret {secrets.token_hex(16)}\n"
    (nodes / "spark-defaults.conf").write_text(secret)
    parts = ("docker/spark.properties", "spark/cluster.properties")
    settings = "".join((_ROOT / "infra" / part).read_text() for part in parts)
    (server / "conf" / "spark-defaults.conf").write_text(settings + secret + more)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.submodule_search_locations is not None
    shown = {"/usr": "/usr", spark.submodule_search_locations[0]: "/opt/dist"}
    elsewhere = (
        path for path in (_java(), Path(sys.base_prefix)) if path.parts[:2] != ("/", "usr")
    )
    shown |= {str(path): str(path) for path in elsewhere}
    shown[str(empty)] = f"{sys.base_prefix}/lib/{_PYTHON}/site-packages"
    named = "\n".join(f"{address} {name}" for name, address in NODES.items())
    machines = {name: cleanup.enter_context(machine(name)) for name in ("platform", "database")}
    for name in names:
        its = {str(nodes): "/opt/conf"}
        if name == "connect":
            its = {str(server): "/opt/spark", str(server / "conf"): "/opt/conf"}
        hosts = f"127.0.0.1 localhost\n{named}"
        machines[name] = cleanup.enter_context(machine(name, shown | its, hosts))
    return machines


def _fill(server: Path) -> None:
    """What the Connect server has that no other machine of the cluster has: it hands it out."""
    make_archive(server / "python.tar.gz")
    for jar in provide(cache_folder(), {}, print):
        shutil.copy(jar, server / "jars")
    shutil.copy(_ROOT / "cdc_assets" / "lake" / "spark" / "fairscheduler.xml", server)


def _java() -> Path:
    return Path(java_command(os.environ) or "java").resolve().parent.parent


def _wire(machines: Mapping[str, Machine]) -> None:
    """The platform has the cluster's switch; Postgres has one address, and lines to both."""
    platform, database = machines["platform"], machines["database"]
    platform.do("ip", "link", "add", "switch", "type", "bridge")
    platform.do("ip", "addr", "add", f"{PLATFORM}/24", "dev", "switch")
    platform.do("ip", "link", "set", "switch", "up")
    for name in machines.keys() & NODES.keys():
        connect(platform, f"to-{name}", machines[name], "net")
        platform.do("ip", "link", "set", f"to-{name}", "master", "switch")
        machines[name].do("ip", "addr", "add", f"{NODES[name]}/24", "dev", "net")
        machines[name].do("ip", "route", "add", DATABASE, "dev", "net")
    connect(platform, "to-database", database, "cluster")
    platform.do("ip", "link", "set", "to-database", "master", "switch")
    connect(platform, "database", database, "platform")
    platform.do("ip", "route", "add", DATABASE, "dev", "database", "src", PLATFORM)
    database.do("ip", "addr", "add", f"{DATABASE}/32", "dev", "lo")
    database.do("ip", "route", "add", PLATFORM, "dev", "platform")
    database.do("ip", "route", "add", _NODES, "dev", "cluster")
