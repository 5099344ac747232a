"""Other users of this machine get neither code nor data: everything is tried as ``nobody``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any, TypeVar

import psutil
import psycopg
import pytest
from pyspark.sql import SparkSession

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import server
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import with_database
from cdc_assets_tests.security.intruder import spark_connect
from cdc_assets_tests.support.flusher import start_flusher
from cdc_assets_tests.support.lake import lake
from cdc_assets_tests.support.metrics import free_port, got
from cdc_assets_tests.support.waiting import wait_for

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try things as another user")
T = TableId("public", "t")
# A password of a source's role, which is in the settings of flusher and Spark sessions.
PASSWORD = "pLanTed-password"
# Whom the metrics are for.
METRICS_TOKEN = "pLanTed-token"
Told = TypeVar("Told")


@dataclass
class Platform:
    """What runs, with rows copied and merged."""

    home: Path
    spark: SparkServer
    metrics_port: int
    token: str

    @property
    def family(self) -> list[psutil.Process]:
        """Without the Spark server of other tests, which may be running beside this one's."""
        commands = dict(still(psutil.Process().children(recursive=True), psutil.Process.cmdline))
        others = set[psutil.Process]()
        for child, command in commands.items():
            if "cdc_assets.lake.spark.server" in command and str(self.home) not in command:
                others |= {child}
                for _, heirs in still([child], lambda of: of.children(recursive=True)):
                    others |= {*heirs}
        return [child for child in commands if child not in others]

    def ports(self) -> dict[int, str]:
        """Every port that a process of ours listens on, and whose it is."""
        return {
            connection.laddr.port: " ".join(command[:4])
            for process, command in still(self.family, psutil.Process.cmdline)
            for _, connections in still([process], lambda of: of.net_connections("inet"))
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        }


def still(
    processes: Iterable[psutil.Process], ask: Callable[[psutil.Process], Told]
) -> list[tuple[psutil.Process, Told]]:
    """What is told of each, without those that have ended by the time they are asked."""
    told = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            told.append((process, ask(process)))
    return told


def intrude(**wanted: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "cdc_assets_tests.security.intruder"],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def platform(postgres: EmbeddedPostgres, public_directory: Path) -> Iterator[Platform]:
    """In a home that, as its parent, anybody gets to, made under the umask that most have."""
    folder = public_directory / "open to all"
    before = os.umask(0o022)
    patch = pytest.MonkeyPatch()
    patch.setenv("CDC_ASSETS_HOME", str(folder))
    admin = postgres.start()
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("create database intruded")
        connection.execute(f"create role intruded superuser login password '{PASSWORD}'".encode())
    dsn = with_database(admin, "intruded").replace("postgres:", "intruded:", 1)
    dsn = dsn.replace(dsn.split(":")[2].split("@")[0], PASSWORD)
    port = free_port()
    setup = "create table t (id int primary key, v text);"
    setup += "insert into t select n, 'row ' || n from generate_series(1, 1000) n"
    metrics = {"port": port, "token": METRICS_TOKEN, "tables": True}
    settings = {"spark": {"memory": "1g"}, "metrics": metrics}
    try:
        with lake(dsn, "", setup, "t", **settings) as source:
            spark = server(source.config)
            source.pin()
            source.copy()
            source.execute("update t set v = 'changed' where id < 10")
            source.flush()
            source.drain(T)
            assert len(source.rows(T)) == 1000
            configured = folder / "source.json"
            configured.write_text(source.config.dump())
            flusher = start_flusher(configured)
            wait_for(lambda: _is_ready(port))
            token = json.loads(spark.state_path.read_text())["token"]
            yield Platform(folder, spark, port, token)
            assert flusher.stdin is not None
            flusher.stdin.close()
            flusher.wait(60)
            spark.stop()
    finally:
        patch.undo()
        os.umask(before)
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = 'intruded'"
            )
            connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                " where database = 'intruded'"
            )
            connection.execute("drop database intruded with (force)")
            connection.execute("drop role intruded")


def _is_ready(port: int) -> bool:
    try:
        return got(port, "/ready")[0] == 200
    except OSError:
        return False


@as_root
@pytest.mark.spark
def test_no_port_of_ours_gives_anything_without_a_secret(platform: Platform) -> None:
    ports = platform.ports()
    found = {int(port): said for port, said in intrude(ports=list(ports))["ports"].items()}
    assert found.keys() == ports.keys()
    # Who watches the flusher has no secret, and gets a word: no figure, and no name.
    watched = found.pop(platform.metrics_port)
    assert [attack for attack, said in watched.items() if said.startswith("granted")] == ["http"]
    word = '{"status": "ok"}'
    assert json.loads(watched["http"].removeprefix("granted: ")) == {
        "/": "",
        "/metrics": "",
        "/live": word,
        "/ready": word,
    }
    got = {(port, ports[port]): said for port, said in found.items() if "granted" in str(said)}
    assert not got, pformat(got)
    # Each speaks a protocol that is known here, and refuses in its words; but for the accumulators
    # of PySpark's own process, which hang up.
    unknown = {
        (port, ports[port]): said
        for port, said in found.items()
        if not said.keys() - {"accumulators"}
        and not (said and "cdc_assets.lake.spark.server" in ports[port])
    }
    assert not unknown, pformat(unknown)
    refusing = {attack for said in found.values() for attack in said}
    assert refusing >= {"postgres", "spark_connect", "spark_transport", "py4j", "python_worker"}


@as_root
@pytest.mark.spark
def test_spark_connect_answers_whoever_has_the_token(platform: Platform) -> None:
    """Or the refusals above would say nothing."""
    port = json.loads(platform.spark.state_path.read_text())["port"]
    said = spark_connect(port, platform.token)
    assert said is not None and "ReleaseSession answers" in said


@pytest.mark.spark
def test_a_token_goes_as_a_header_to_a_server_without_tls(platform: Platform) -> None:
    """As the containers' sources have it; by ``;token=`` PySpark would want TLS there."""
    port = json.loads(platform.spark.state_path.read_text())["port"]
    session = SparkSession.builder.remote(
        f"sc://127.0.0.1:{port}/;authorization=Bearer%20{platform.token}"
    ).create()
    try:
        assert session.range(3).count() == 3
    finally:
        session.stop()


@pytest.mark.spark
def test_the_metrics_have_figures_and_names_of_tables_only(platform: Platform) -> None:
    status, text = got(platform.metrics_port, "/metrics", METRICS_TOKEN)
    assert status == 200
    lines = text.splitlines()
    labels = {line.partition("{")[2].partition("}")[0] for line in lines if line[0] != "#"}
    keys = {pair.partition("=")[0] for label in labels for pair in label.split(",") if pair}
    states = {"cdc_assets_flusher_state", "cdc_assets_flusher_wal_status"}
    ours = {"source", "table", "operation", "le", "state", "level", "kind", "outcome"}
    assert keys <= ours | states
    assert not any(secret in text for secret in (PASSWORD, METRICS_TOKEN, "postgresql://"))


@as_root
@pytest.mark.spark
def test_nobody_looks_into_a_file_or_folder_of_the_home(platform: Platform) -> None:
    paths = [f"{platform.home}/.", *map(str, platform.home.rglob("*"))]
    # Rows as they were staged, the table, Spark's blocks and temporary files, its log and state.
    for kind in (
        *("src/staging/**/*.parquet", "src/warehouse/**/*.parquet", "src/warehouse/**/*.json"),
        *("spark-*/local/**/shuffle_*", "spark-*/tmp/*", "spark-*.log", "spark-*.json"),
    ):
        assert list(platform.home.glob(kind)), kind
    control = platform.home.parent / "for everybody"
    control.write_text("seen")
    control.chmod(0o644)
    assert intrude(paths=[*paths, str(control)])["paths"] == [str(control)]


@as_root
@pytest.mark.spark
def test_no_temporary_file_of_ours_is_for_others_to_read(platform: Platform) -> None:
    """Of what our processes have open; the tests' own servers are nobody's home."""
    opened = {
        file.path
        for _, files in still(platform.family, psutil.Process.open_files)
        for file in files
    }
    places = (tempfile.gettempdir(), "/tmp", "/var/tmp")
    installed = sys.prefix  # wherever it is, it is for everybody
    temporary = [
        path
        for path in opened
        if path.startswith(places)
        and not path.startswith(installed)
        and not re.search(r"/pg\d*/", path)
    ]
    assert any(path.startswith(f"{platform.home}/spark-") for path in temporary)
    assert intrude(paths=temporary)["paths"] == []


@as_root
@pytest.mark.spark
def test_what_is_public_of_a_process_has_no_secret(platform: Platform) -> None:
    secrets = (platform.token, PASSWORD, METRICS_TOKEN)
    family = platform.family
    for process, command in still(family, psutil.Process.cmdline):
        assert not [secret for secret in secrets if secret in " ".join(command)], process

    def environment(process: psutil.Process) -> bytes:
        path = Path(f"/proc/{process.pid}/environ")
        return path.read_bytes() if path.stat().st_uid == os.geteuid() else b""

    ours = [(process, told) for process, told in still(family, environment) if told]
    assert len(ours) > 3
    assert [p for p, told in ours if any(s.encode() in told for s in secrets)] == []


@as_root
@pytest.mark.spark
def test_nobody_reads_an_environment_of_ours(platform: Platform) -> None:
    code = (
        "import os, sys; os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(path, open(path, 'rb').read())\n"
        "    except OSError: pass"
    )
    paths = [f"/proc/{process.pid}/environ" for process in platform.family]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, check=True)
    assert done.stdout == b""


@pytest.mark.spark
def test_the_token_is_in_its_state_file_and_nowhere_else(platform: Platform) -> None:
    assert platform.spark.state_path.stat().st_mode & 0o777 == 0o600
    has = [
        path
        for path in platform.home.rglob("*")
        if path.is_file() and platform.token.encode() in path.read_bytes()
    ]
    assert has == [platform.spark.state_path]
    assert platform.token not in repr(platform.spark) + repr(platform.spark.settings)
