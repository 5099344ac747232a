"""Secrets are planted in every place that has some, and looked for everywhere else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import psycopg
import pytest
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster_shared.serdes import serialize_value
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.sensors import sessions
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.process import children
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import start_flusher
from cdc_assets_tests.support.s3 import ObjectStore
from cdc_assets_tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

# Each is found by the same word, wherever it turns up.
WORD = "pLanTed"
SECRETS = {
    "SOURCE": f"{WORD}-source",
    "STATE": f"{WORD}-state",
    "CATALOG": f"{WORD}-catalog",
    "WEBHOOK": f"{WORD}-webhook",
    "MAIL": f"{WORD}-mail",
    "COPY": f"{WORD}-copy",
    "AWS_SECRET_ACCESS_KEY": f"{WORD}-s3",
    "TOKEN": f"{WORD}-token",
    "CONF": f"{WORD}-conf",
}


def settings(dsn: str, s3: dict[str, object], **more: object) -> dict[str, Any]:
    """As a person writes it: with references to the environment."""
    at = conninfo_to_dict(dsn)

    def of(role: str) -> str:
        where = f"{at['host']}:{at['port']}/{at['dbname']}"
        return f"postgresql://{role}:${{{role.upper()}}}@{where}"

    return {
        "name": "src",
        "postgres": {"dsn": of("source")},
        "state": {"postgres_url": of("state")},
        "tables": [{"name": "t"}, {"name": "gone"}],
        "staging": {"uri": "s3://bucket/staging"},
        "s3": s3,
        "lake": {"catalog": {"type": "sql", "uri": of("catalog"), "warehouse": "s3://bucket/lake"}},
        "spark": {"conf": {"spark.hadoop.some.password": "${CONF}"}},
        "alerts": {
            "sinks": [
                {"type": "log"},
                {"type": "webhook", "url": "http://127.0.0.1:1/${WEBHOOK}"},
                {
                    "type": "mail",
                    "host": "127.0.0.1",
                    "port": 1,
                    "username": "u",
                    "password": "${MAIL}",
                    "from": "a@b",
                    "to": ["c@d"],
                },
            ]
        },
        **more,
    }


@pytest.fixture
def dsn(postgres_dsn: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    made = postgres_dsn()
    with psycopg.connect(made, autocommit=True) as admin:
        for role in ("source", "state", "catalog", "copy"):
            admin.execute(
                f"create role {role} superuser login password '{SECRETS[role.upper()]}'".encode()
            )
        admin.execute("create table t (id int primary key, v text); insert into t values (1, 'x')")
        yield made
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where usename in ('source', 'state', 'catalog', 'copy')"
        )
        admin.execute("reassign owned by source, state, catalog, copy to postgres")
        admin.execute("drop role source, state, catalog, copy")


class Seen:
    """Everything that others could read, by where it was."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.words = [WORD]

    def add(self, where: str, text: str | bytes) -> None:
        self.texts[where] = text.encode() if isinstance(text, str) else text

    def files(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and path.name != "server.json":
                self.add(str(path.relative_to(folder)), path.read_bytes())

    def processes(self) -> None:
        for child in psutil.Process().children(recursive=True):
            try:
                self.add(f"process {child.pid}", " ".join(child.cmdline()))
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue

    @property
    def leaks(self) -> list[str]:
        words = [word.encode() for word in self.words]
        return [where for where, text in self.texts.items() if any(word in text for word in words)]


@pytest.mark.parametrize("spark_too", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_nobody_finds_a_secret(
    spark_too: bool,
    dsn: str,
    s3: ObjectStore,
    tmp_path: Path,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen()
    spark = SparkServer(
        SparkServerSettings(2, "3g", {"spark.hadoop.some.password": SECRETS["CONF"]}), tmp_home
    )
    file = tmp_path / "source.json"
    raw = settings(dsn, s3.settings)
    file.write_text(json.dumps(raw))
    config = parse_config(raw, "test")
    seen.add("repr", repr(config) + str(config))
    folder = tmp_path / "dagster"
    folder.mkdir()
    flusher = start_flusher(file)
    try:
        if spark_too:
            spark.ensure()
            seen.words.append(json.loads(spark.state_path.read_text())["token"])
        _works(config, file, seen, folder, spark_too)
        seen.processes()
        # Flusher and decoder, the server's processes; Spark's child and its JVM, the follower.
        assert sum("process" in where for where in seen.texts) > (6 if spark_too else 3)
        if spark_too:
            with psycopg.connect(dsn) as source:
                source.execute("insert into t values (2, 'for the follower')")
            log = tmp_home / "src" / "follower.log"
            wait_for(lambda: log.exists() and "public.t" in log.read_text())
    finally:
        children.stop("follower:src")
        sessions.close_all()
        assert flusher.stdin is not None
        flusher.stdin.close()
        flusher.wait(60)
        spark.stop()
    _fails(raw, seen, tmp_path, spark_too, monkeypatch)
    seen.add("flusher.log", (tmp_path / "flusher.log").read_bytes())
    seen.files(tmp_home)
    seen.files(folder)
    with psycopg.connect(dsn) as admin:
        for schema, table in admin.execute(
            "select schemaname, tablename from pg_tables"
            " where schemaname in ('_pg2iceberg', 'public')"
        ).fetchall():
            rows = admin.execute(f'select * from "{schema}"."{table}"'.encode()).fetchall()
            seen.add(f"table {schema}.{table}", repr(rows))
    assert seen.leaks == []
    assert len(seen.texts) > 25


def _works(config: SourceConfig, file: Path, seen: Seen, folder: Path, spark_too: bool) -> None:
    """Commands and jobs that end well, as far as they can without one table."""
    with_spark = [
        ["snapshot", "--table", "public.t"],
        ["-v", "materialize", "--table", "public.t"],
        ["status"],
    ]
    for command in (
        *(with_spark if spark_too else []),
        ["-v", "flush", "--until", "current"],
        ["status", "--json"],
        ["check", "--json"],
        ["alert-test"],
        ["--help"],
    ):
        _command(file, seen, *command)
    defs = build_defs(config)
    repository = defs.get_repository_def()
    seen.add("what the UI is told", serialize_value(RepositorySnap.from_def(repository)))
    with dg.DagsterInstance.local_temp(str(folder)) as instance:
        for job in repository.get_all_jobs():
            if spark_too and job.name.startswith(
                ("check", "maintain", "mater", "sample", "verify")
            ):
                job.execute_in_process(instance=instance, raise_on_error=False)
        for sensor in repository.sensor_defs:
            if sensor.name.startswith(("alerts", "health", "materializer", "snapshot")):
                with dg.build_sensor_context(
                    instance=instance, repository_def=repository
                ) as context:
                    seen.add(sensor.name, repr(sensor.evaluate_tick(context)))
        events = [instance.all_logs(run.run_id) for run in instance.get_runs()]
        seen.add("events", serialize_value([e for many in events for e in many]))


def _fails(
    raw: dict[str, Any],
    seen: Seen,
    folder: Path,
    spark_too: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same with each secret wrong, or nobody there to take it; all of it says why."""
    wrong = folder / "wrong.json"
    commands = {
        "SOURCE": ["check", "flush", "status"],
        "STATE": ["flush"],
        "CATALOG": ["materialize"] if spark_too else ["check"],
    }
    for name, tried in commands.items():
        monkeypatch.setenv(name, f"{WORD}-not-{name}")
        wrong.write_text(json.dumps(raw))
        for command in tried:
            _command(wrong, seen, command, name=f"wrong {name}")
        monkeypatch.setenv(name, SECRETS[name])
    there = raw["postgres"]["dsn"].replace("source:${SOURCE}", "copy:${COPY}")
    monkeypatch.setenv("COPY", f"{WORD}-not-COPY")
    for kind, more in (("dump", {"lsn": "0/1"}), ("clone", {"replication_dsn": there})):
        wrong.write_text(
            json.dumps({**raw, "snapshot": {"from": {"kind": kind, "dsn": there, **more}}})
        )
        for arguments in (["-v", "flush", "--until", "current"], ["check", "--json"]):
            _command(wrong, seen, *arguments, name=f"wrong {kind}")
        assert spark_too or b"clone_unreachable" in seen.texts[f"wrong {kind} check --json"]
    options = ("token=", "authorization=Bearer%20", "use_ssl=true;token=")
    remotes = [f"sc://127.0.0.1:1/;{option}${{TOKEN}}" for option in options]
    for number, remote in enumerate(remotes if spark_too else remotes[:2]):
        wrong.write_text(json.dumps({**raw, "spark": {"remote": remote}}))
        _command(wrong, seen, "check", name=f"remote {number}")
    rest = {"type": "rest", "uri": "http://u:${CATALOG}@127.0.0.1:1/x"}
    wrong.write_text(json.dumps({**raw, "lake": {"catalog": {**rest, "warehouse": "w"}}}))
    _command(wrong, seen, "check", name="rest")
    wrong.write_text(json.dumps({**raw, "postgres": {"dsn": "host=h password=${SOURCE} x"}}))
    _command(wrong, seen, "status", name="no DSN")


def _command(file: Path, seen: Seen, *arguments: str, name: str = "") -> None:
    where = f"{name} {' '.join(arguments)}"
    done = subprocess.run(
        [sys.executable, "-m", "cdc_assets", "--config", str(file), *arguments],
        capture_output=True,
        timeout=200,
        check=False,
    )
    seen.add(where, done.stdout + done.stderr)
    assert b"Traceback" not in done.stderr, (where, done.stderr.decode())
