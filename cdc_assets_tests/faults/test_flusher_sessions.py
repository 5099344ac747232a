"""Sessions that are lost where nothing streams: the pins', and those that look before a stream."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from cdc_assets.cli.main import cli
from cdc_assets.config.source import parse_config
from cdc_assets.embedded.binaries import server_user, usable_data
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher import pin_keeper
from cdc_assets.log.locks import PINS_LOCK
from cdc_assets.log.sessions import heartbeat as heart
from cdc_assets.log.sessions.heartbeat import Heart
from cdc_assets.log.store import LogStore
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.timelines import History
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import Bench, bench, flushing
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture
def source(
    postgres: EmbeddedPostgres, postgres_dsn: NewDatabase, tmp_path: Path
) -> Iterator[Bench]:
    dsn = postgres.dsn()
    assert dsn is not None
    with bench(dsn, "f_sessions", tmp_path, postgres_dsn()) as made:
        made.execute("create table t (id int primary key)")
        yield made


@pytest.fixture
def promoted(public_directory: Path) -> Iterator[str]:
    """The address of a server that was a standby once: it is on timeline 2."""
    server = EmbeddedPostgres(public_directory / "promoted")
    server.start()
    server.stop()
    (usable_data(server.directory, server_user()) / "standby.signal").touch()
    dsn = server.start()
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("select pg_promote()")
    yield dsn
    server.remove()


def cut(session: psycopg.Connection[object]) -> int:
    """Our end is gone, and the server's doesn't hear of it; what has to be closed afterwards."""
    kept = os.dup(session.fileno())
    ours, theirs = socket.socketpair()
    theirs.close()
    os.dup2(ours.detach(), session.fileno())
    return kept


def test_tables_are_pinned_again_after_the_pins_session_is_lost(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heart, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    adopted = list[LogStore]()
    adopt: Callable[..., int] = Heart.adopt

    def recorded(self: Heart, store: LogStore) -> int:
        adopted.append(store)
        return adopt(self, store)

    monkeypatch.setattr(Heart, "adopt", recorded)
    config = source.config("public.t")
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        pins = adopted[1]
        pins.lock(PINS_LOCK)
        kept = cut(pins.connection)
        with psycopg.connect(source.log_dsn or "", autocommit=True) as log:
            log.execute(
                "update _pg2iceberg.tables set state = 'waiting', snapshot_lsn = null,"
                " epoch = epoch + 1"
            )
            state = "select state from _pg2iceberg.tables"
            wait_for(lambda: log.execute(state).fetchall() == [("streaming",)])
        assert progress.sessions == 1
        os.close(kept)


def test_a_look_at_the_timelines_that_fails_is_an_outage(promoted: str, tmp_path: Path) -> None:
    """The flusher waits, as for any connection, when a standby that was promoted turns it away."""
    with bench(promoted, "f_promoted", tmp_path) as source:
        source.execute("create table t (id int primary key)")
        _turned_away(source)


def test_a_first_start_needs_no_history_of_the_servers_timeline(
    promoted: str, public_directory: Path, tmp_path: Path
) -> None:
    """There is nothing to compare it with, and its file may be gone."""
    data = usable_data(public_directory / "promoted", server_user())
    (data / "pg_wal" / "00000002.history").unlink()
    with bench(promoted, "f_promoted", tmp_path) as source:
        source.execute("create table t (id int primary key)")
        config = source.config("public.t")
        source.flush(config)
        source.execute("insert into t values (1)")
        source.flush(config)
        assert source.log("public.t")


def test_who_may_not_replicate_sees_what_a_first_start_lacks(promoted: str, tmp_path: Path) -> None:
    """On timeline 2 as on any: `check` doesn't take the server for one that is out of reach."""
    with bench(promoted, "f_promoted", tmp_path) as source:
        source.execute("create table t (id int primary key)")
        source.flush(source.config("public.t"))
        with _as_role(source, "createrole"):
            source.execute(f"grant all on schema _pg2iceberg to {source.name}")
            source.execute(f"grant all on all tables in schema _pg2iceberg to {source.name}")
            settings = source.settings("public.t") | {"name": "another"}
            found = source_findings(parse_config(settings, "test"))
            codes = {finding.code for finding in found if finding.severity == "error"}
            assert codes == {"replication_privilege"}


def test_who_copies_beside_a_stream_needs_no_sender(promoted: str, tmp_path: Path) -> None:
    with bench(promoted, "f_promoted", tmp_path) as source:
        source.execute("create table t (id int primary key)")
        with _as_role(source, "replication"):
            config = source.config("public.t")
            with flushing(config) as progress:
                wait_for(lambda: progress.state == "streaming")
                source.execute(f"alter role {source.name} noreplication")
                with Pipeline.open(config) as pipeline, closing(Pins(pipeline)) as pins:
                    pins.prepare()
                    pins.tick()
                    assert pipeline.store.meta("timeline_history") == str(History.read(promoted))


@contextmanager
def _as_role(source: Bench, right: str) -> Iterator[None]:
    """The source's address is that of a role of its own, which owns the table t."""
    database, admin = source.name, source.dsn
    source.execute(
        f"create role {database} login {right} password 'p';"
        f" alter table t owner to {database}; grant create on database {database} to {database}"
    )
    try:
        source.dsn = make_conninfo(source.dsn, user=database, password="p")
        yield
    finally:
        source.dsn = admin
        source.execute(f"drop owned by {database} cascade; drop role {database}")


def _turned_away(source: Bench) -> None:
    timeline = (
        "update _pg2iceberg.pipeline_meta set value = %s where key = 'timeline' returning value"
    )
    database = source.name
    with _as_role(source, "replication"):
        config = source.config("public.t")
        with flushing(config) as progress:
            wait_for(lambda: progress.state == "streaming")
            source.ask_log(timeline, "1")
            source.execute(f"alter role {database} noreplication")
            source.terminate("flusher")
            wait_for(lambda: progress.state == "reconnecting")
            wait_for(lambda: "replication connection" in (progress.last_error or ""))
            source.ask_log(timeline, "2")
            source.execute(f"alter role {database} replication")
            wait_for(lambda: progress.sessions == 2)


def test_a_flush_up_to_now_refuses_another_cluster(
    source: Bench, postgres_servers: Callable[[int], EmbeddedPostgres], tmp_path: Path
) -> None:
    config = source.config("public.t")
    source.flush(config)
    with bench(postgres_servers(16).start(), source.name, tmp_path, source.log_dsn) as other:
        other.execute("create table t (id int primary key)")
        other.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", config.slot)
        assert Lsn.parse(other.execute("select pg_current_wal_lsn()::text")[0][0]) > Lsn.ZERO
        with psycopg.connect(source.log_dsn or "", autocommit=True) as log:
            log.execute("update _pg2iceberg.flushed_lsn set lsn = 'F/0'")  # the other is younger
        path = other.config_file("public.t")
        done = CliRunner().invoke(cli, ["--config", str(path), "flush", "--until", "current"])
        assert done.exit_code == 1
        assert "other_cluster" in done.output
        with Pipeline.open(config) as pipeline:
            assert pipeline.store.flushed_lsn() == Lsn.parse("F/0")
