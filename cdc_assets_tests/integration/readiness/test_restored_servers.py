"""Servers that were restored, replaced, or that invalidated the slot: named, and healed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.binaries import server_user, usable_data
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import SourceMismatch
from cdc_assets.flusher import pin_keeper, reviewer
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import Bench, bench, flushing
from cdc_assets_tests.support.waiting import wait_for

SETTINGS = {"fsync": "off", "max_slot_wal_keep_size": "16MB", "max_prepared_transactions": "5"}


@pytest.fixture
def server(public_directory: Path, tmp_home: Path) -> Iterator[EmbeddedPostgres]:
    made = EmbeddedPostgres(public_directory / "restored", settings=SETTINGS)
    made.start()
    yield made
    made.remove()


@pytest.fixture
def source(server: EmbeddedPostgres, postgres_dsn: NewDatabase, tmp_path: Path) -> Iterator[Bench]:
    """A source on a server of its own; its log is on the session's."""
    with bench(server.start(), "own", tmp_path, postgres_dsn()) as made:
        made.execute("create table t (id int primary key, v text)")
        yield made
        made.connection.close()


def refused(source: Bench, config: SourceConfig, *expected: str) -> None:
    with pytest.raises(SourceMismatch, match="resync") as caught:
        source.flush(config)
    assert caught.value.codes == expected


def healed(source: Bench, config: SourceConfig) -> None:
    source.resync(config)
    source.execute("insert into t values (100, 'after')")
    source.flush(config)
    assert source.ids() == ["100"]
    source.execute("delete from t where id = 100")


def fill(source: Bench, megabytes: int) -> None:
    """WAL that concerns nothing: one record of a megabyte each."""
    for _ in range(megabytes):
        source.execute("select pg_logical_emit_message(false, 'fill', repeat('x', 1000000))")
    source.execute("checkpoint")


def test_an_older_state_of_the_server_is_restored(
    source: Bench, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviewer, "REVIEW_SECONDS", 0.2)
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    config = source.config("public.t", flush_interval="50ms")
    source.execute("insert into t values (1, 'in the backup')")
    source.flush(config)
    source.connection.close()
    server.stop()
    data = usable_data(server.directory, server_user())
    shutil.copytree(data, data.with_name("backup"))
    server.start()
    source.connection = psycopg.connect(source.dsn, autocommit=True)
    (began,) = source.execute("select restart_lsn::text from pg_replication_slots")[0]
    source.execute("insert into t values (2, 'not in the backup')")
    remembered = "select value from _pg2iceberg.pipeline_meta where key = 'slot_restart_lsn'"

    def moved_on() -> bool:
        fill(source, 1)
        time.sleep(0.3)  # looks are further apart than that fills what the slot may keep
        found = source.ask_log(remembered)
        return bool(found) and Lsn.parse(found[0][0].split()[0]) > Lsn.parse(began)

    with flushing(config):
        wait_for(moved_on)
        wait_for(lambda: "2" in source.ids())
    source.connection.close()
    server.stop()
    shutil.rmtree(data)
    shutil.copytree(data.with_name("backup"), data)
    for path in [data, *data.rglob("*")]:
        if (user := server_user()) is not None:
            shutil.chown(path, user.uid, user.gid)
    server.start()
    source.connection = psycopg.connect(source.dsn, autocommit=True)
    refused(source, config, "source_behind_log", "slot_behind")
    # Somebody goes on writing there: the positions look as if nothing had happened.
    source.execute("insert into t values (2, 'another one')")
    while Lsn.parse(source.execute("select pg_current_wal_lsn()::text")[0][0]) <= source.flushed():
        fill(source, 1)
    refused(source, config, "slot_behind")
    healed(source, config)


def test_another_cluster(
    source: Bench,
    postgres_servers: Callable[[int], EmbeddedPostgres],
    tmp_path: Path,
) -> None:
    source.flush(source.config("public.t"))
    with bench(postgres_servers(16).start(), "own", tmp_path, source.log_dsn) as other:
        other.execute("create table t (id int primary key, v text)")
        config = other.config("public.t")
        refused(other, config, "other_cluster")
        healed(other, config)


def test_a_slot_that_the_server_gave_up(source: Bench) -> None:
    config = source.config("public.t")
    source.flush(config)

    def state() -> str:
        return str(source.execute("select wal_status from pg_replication_slots")[0][0])

    def findings() -> dict[str, str]:
        return {f.code: f.severity for f in preflight(source.connection, config)}

    for _ in range(6):
        source.execute("insert into t values (1, 'x'); delete from t; select pg_switch_wal()")
    assert state() == "unreserved"
    assert findings()["slot_unreserved"] == "warning"
    source.flush(config)  # not lost yet, and so nothing is
    assert len(source.ids()) == 12
    for _ in range(6):
        source.execute("insert into t values (1, 'x'); delete from t; select pg_switch_wal()")
    source.execute("checkpoint")
    assert state() == "lost"
    assert findings()["slot_lost"] == "error"
    refused(source, config, "slot_lost")
    healed(source, config)

    source.execute("alter system set idle_replication_slot_timeout = '1s'")
    source.execute("select pg_reload_conf()")
    wait_for(lambda: source.execute("checkpoint") or state() == "lost")
    source.execute("alter system reset idle_replication_slot_timeout")
    source.execute("select pg_reload_conf()")
    assert findings()["slot_invalidated"] == "error"
    refused(source, config, "slot_invalidated")
    healed(source, config)


def test_a_two_phase_slot_is_refused_and_prepared_transactions_are_followed(
    source: Bench,
) -> None:
    config = source.config("public.t")
    made = "select pg_create_logical_replication_slot(%s, 'pgoutput', twophase => true)"
    source.execute(made, config.slot)
    with pytest.raises(SourceMismatch, match=r"slot_two_phase.*pg_drop_replication_slot"):
        source.flush(config)
    source.drop_slot()  # as it says
    source.flush(config)
    source.execute("begin; insert into t values (1, 'committed'); prepare transaction 'one'")
    source.execute("begin; insert into t values (2, 'gone'); prepare transaction 'two'")
    source.execute("insert into t values (3, 'meanwhile')")
    source.flush(config)
    assert source.ids() == ["3"]
    source.execute("commit prepared 'one'")
    source.execute("rollback prepared 'two'")
    source.flush(config)
    assert source.ids() == ["3", "1"]
    source.drop_slot()
    source.execute(made, config.slot)
    refused(source, config, "slot_two_phase", "slot_moved")
    healed(source, config)


def test_a_slot_of_an_earlier_version_becomes_a_failover_slot(source: Bench) -> None:
    config = source.config("public.t")
    source.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", config.slot)
    assert "slot_failover" in {f.code for f in preflight(source.connection, config)}
    source.flush(config)
    assert source.execute("select failover from pg_replication_slots") == [(True,)]
    assert "slot_failover" not in {f.code for f in preflight(source.connection, config)}
