"""A primary dies and its standby is promoted: the flusher goes on, or says why it can't."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.binaries import own, server_user, usable_data
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import SourceMismatch
from cdc_assets.readiness.source.roles import role_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import Bench, bench, flushing
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

FAST = {"fsync": "off", "full_page_writes": "off"}


@dataclass(slots=True)
class Pair:
    """A primary and its standby; ``dsn`` leads to whichever takes writes."""

    primary: EmbeddedPostgres
    standby: EmbeddedPostgres
    standby_dsn: str
    dsn: str

    def kill_primary(self) -> None:
        """As a power cut would: nothing is sent any more."""
        os.kill(_postmaster(self.primary), signal.SIGKILL)
        wait_for(lambda: self.primary.dsn() is None)

    @contextmanager
    def hanging_standby(self) -> Iterator[Callable[[], None]]:
        """What it yields stops the standby's processes, until the end."""
        hanging = list[psutil.Process]()

        def hang() -> None:
            server = psutil.Process(_postmaster(self.standby))
            hanging.extend([server, *server.children(recursive=True)])
            for process in hanging:
                process.suspend()

        try:
            yield hang
        finally:
            for process in hanging:
                process.resume()

    def promote(self) -> None:
        with psycopg.connect(self.standby_dsn, autocommit=True) as connection:
            connection.execute("select pg_promote(true, 60)")

    def await_replay(self) -> None:
        """Until the standby has replayed all that the primary has written by now."""
        with psycopg.connect(self.primary.start(), autocommit=True) as connection:
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        reads = f"select 1 where pg_last_wal_replay_lsn() >= '{row[0]}'"
        wait_for(lambda: self.ask_standby(reads))

    def ask_standby(self, statement: str) -> list[tuple[object, ...]]:
        with psycopg.connect(self.standby_dsn, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


def _data(server: EmbeddedPostgres) -> Path:
    return usable_data(server.directory, server_user())


def _postmaster(server: EmbeddedPostgres) -> int:
    return int((_data(server) / "postmaster.pid").read_text().split()[0])


def _standby_of(primary: EmbeddedPostgres, folder: Path, **settings: str) -> EmbeddedPostgres:
    """A copy of the running primary that follows it through the physical slot ``standby``."""
    dsn = primary.start()
    folder.mkdir(mode=0o755)
    password = str(conninfo_to_dict(dsn)["password"])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # another one is taken if this isn't free any more
    state = {"port": port, "password": password, "pid": None}
    (folder / "server.json").write_text(json.dumps(state))
    made = EmbeddedPostgres(
        folder,
        primary.version,
        settings={
            **FAST,
            "primary_conninfo": dsn,
            "primary_slot_name": "standby",
            "hot_standby_feedback": "on",
            **({"sync_replication_slots": "on"} if primary.version >= 17 else {}),
            "wal_retrieve_retry_interval": "200ms",
            **settings,
        },
    )
    data = _data(made)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pg_create_physical_replication_slot('standby', true)")
    subprocess.run(
        [
            primary.program("pg_basebackup"),
            *("--dbname", dsn, "--pgdata", data, "--slot", "standby", "--checkpoint", "fast"),
            "--no-sync",
        ],
        check=True,
        timeout=120,
    )
    (data / "standby.signal").touch()
    for path in [data, *data.rglob("*")]:
        own(path, server_user())
    return made


@contextmanager
def standby_pair(
    home: Path, standby: dict[str, str], primary: dict[str, str], version: int = 18
) -> Iterator[Pair]:
    first = EmbeddedPostgres(home / "primary", version, settings={**FAST, **primary})
    second: EmbeddedPostgres | None = None
    try:
        first.start()
        second = _standby_of(first, home / "standby", **standby)
        dsns = [conninfo_to_dict(first.start()), conninfo_to_dict(second.start())]
        both = make_conninfo(
            first.start(),
            host=",".join(str(dsn["host"]) for dsn in dsns),
            port=",".join(str(dsn["port"]) for dsn in dsns),
            target_session_attrs="read-write",
        )
        yield Pair(first, second, second.start(), both)
    finally:
        for server in filter(None, (second, first)):
            server.remove()


@contextmanager
def _writing(dsn: str) -> Iterator[list[int]]:
    """A client that inserts rising numbers, and goes on after a failover."""
    number = [0]

    def work(stop: threading.Event) -> None:
        while not stop.is_set():
            with suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as connection:
                while not stop.wait(0.005):
                    number[0] += 1  # one whose fate isn't known isn't tried again
                    connection.execute("insert into t values (%s)", (number[0],))
            stop.wait(0.1)

    with beside(work):
        yield number


def _logged(source: Bench) -> list[int]:
    return [int(row.data["id"] or 0) for row in source.log("public.t")]


def _fail_over(source: Bench, pair: Pair) -> None:
    """The primary dies, its standby is promoted, and the client comes back."""
    pair.kill_primary()
    pair.standby_dsn = pair.standby.start()
    pair.promote()
    source.connection.close()
    source.connection = psycopg.connect(source.dsn, autocommit=True)


@contextmanager
def _replicated(
    home: Path,
    folder: Path,
    log_dsn: str | None,
    *,
    standby: dict[str, str] | None = None,
    primary: dict[str, str] | None = None,
) -> Iterator[tuple[Pair, Bench, SourceConfig]]:
    """A pair, of which table t is followed."""
    with (
        standby_pair(home, standby or {}, primary or {}) as pair,
        bench(pair.dsn, "failing", folder, log_dsn) as source,
    ):
        source.execute("create table t (id int primary key)")
        config = source.config("public.t", flush_interval="50ms")
        source.flush(config)
        yield pair, source, config
        source.connection.close()


def _refused_until_resync(source: Bench, config: SourceConfig, code: str) -> None:
    with pytest.raises(SourceMismatch) as caught:
        source.flush(config)
    assert caught.value.codes == (code,)
    source.resync(config)
    source.execute("insert into t values (0)")
    source.flush(config)
    assert source.ids() == ["0"]


def _synced(source: Bench, pair: Pair, config: SourceConfig) -> None:
    """Until the standby has the slot for good."""

    def look() -> list[tuple[object, ...]]:
        source.execute("select pg_log_standby_snapshot()")
        source.flush(config)
        return pair.ask_standby("select 1 from pg_replication_slots where synced and not temporary")

    wait_for(look, 120)


@pytest.mark.parametrize("log", ["inside", pytest.param("beside", marks=pytest.mark.soak)])
def test_a_promoted_standby_goes_on_without_loss(
    tmp_home: Path, tmp_path: Path, postgres_dsn: NewDatabase, log: str
) -> None:
    # The log inside the source has to be on the standby as soon as it is committed.
    primary = {"synchronized_standby_slots": "standby"}
    if log == "inside":
        primary["synchronous_standby_names"] = "*"
    log_dsn = postgres_dsn() if log == "beside" else None
    promoted = {"synchronous_standby_names": "", "synchronized_standby_slots": ""}
    with _replicated(tmp_home, tmp_path, log_dsn, standby=promoted, primary=primary) as (
        pair,
        source,
        config,
    ):
        with flushing(config):
            with _writing(source.dsn) as number:
                wait_for(lambda: len(_logged(source)) > 50)
                synced = (
                    "select 1 from pg_replication_slots where slot_name = 'cdc_failing'"
                    " and synced and not temporary and invalidation_reason is null"
                )
                wait_for(lambda: pair.ask_standby(synced), 120)
                before = len(_logged(source))
                wait_for(lambda: len(_logged(source)) > before + 50)
                _fail_over(source, pair)
                at_promotion = number[0]
                wait_for(lambda: number[0] > at_promotion + 50)
            (last,) = source.execute("select max(id) from t")[0]
            wait_for(lambda: last in _logged(source), 120)
        found = _logged(source)
        assert found == [n for (n,) in source.execute("select id from t order by id")]
        assert found[-1] > at_promotion


@pytest.mark.soak  # what it meets is a slot that is gone, which has a test of its own
def test_a_standby_without_the_slot_is_named(
    tmp_home: Path, tmp_path: Path, postgres_dsn: NewDatabase
) -> None:
    alone = {"sync_replication_slots": "off"}
    with _replicated(tmp_home, tmp_path, postgres_dsn(), standby=alone) as (pair, source, config):
        source.execute("insert into t values (1)")
        source.flush(config)
        pair.await_replay()
        _fail_over(source, pair)
        _refused_until_resync(source, config, "slot_gone")


@pytest.mark.soak
def test_a_slot_that_a_conflict_on_the_standby_ended_is_named(
    tmp_home: Path, tmp_path: Path, postgres_dsn: NewDatabase
) -> None:
    """Without feedback the primary removes catalog rows that the standby's slot still needs."""
    with _replicated(tmp_home, tmp_path, postgres_dsn()) as (pair, source, config):
        _synced(source, pair, config)
        for setting in ("hot_standby_feedback", "sync_replication_slots"):
            pair.ask_standby(f"alter system set {setting} = off")
        pair.ask_standby("select pg_reload_conf()")

        def is_ended() -> list[tuple[object, ...]]:
            source.execute("create table gone (id int)")
            source.execute("drop table gone")  # in the same transaction nobody would have seen it
            source.execute("select pg_log_standby_snapshot()")
            source.flush(config)
            source.execute("vacuum pg_class")
            source.execute("vacuum pg_attribute")
            return pair.ask_standby(
                "select 1 from pg_replication_slots where invalidation_reason = 'rows_removed'"
            )

        wait_for(is_ended, 120)
        _fail_over(source, pair)
        with pytest.raises(SourceMismatch, match="rows_removed"):
            source.flush(config)
        _refused_until_resync(source, config, "slot_invalidated")


def _place_of_slots(source: Bench, server: str) -> set[str]:
    """What ``check`` says if ``postgres.replication_dsn`` leads to that server."""
    streams = make_conninfo(server, dbname=conninfo_to_dict(source.dsn)["dbname"])
    settings = {**source.settings("t"), "postgres": {"dsn": source.dsn, "replication_dsn": streams}}
    found = role_findings(source.connection, parse_config(settings, "test"))
    return {finding.code for finding in found if finding.severity == "error"}


def test_a_standby_that_lacks_what_the_log_has_is_named(
    tmp_home: Path, tmp_path: Path, postgres_dsn: NewDatabase
) -> None:
    """The slot is there and would stream; but the log is of a future that didn't happen."""
    with _replicated(tmp_home, tmp_path, postgres_dsn()) as (pair, source, config):
        _synced(source, pair, config)
        assert _place_of_slots(source, pair.primary.start()) == set()
        assert _place_of_slots(source, pair.standby_dsn) == {"replication_elsewhere"}
        pair.standby.stop()
        source.execute("insert into t select generate_series(1, 20000)")
        source.flush(config)
        assert len(_logged(source)) == 20000
        _fail_over(source, pair)
        with pytest.raises(SourceMismatch) as caught:
            source.flush(config)
        assert caught.value.codes == ("source_behind_log", "timeline_diverged")
        source.execute("insert into t select generate_series(1, 50000)")  # past the old end
        _refused_until_resync(source, config, "timeline_diverged")
