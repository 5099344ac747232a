"""Where the logs of a standby's tables begin, and why no slot's snapshot is copied there."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

from cdc_assets.config.addresses import source_dsn
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.errors import PreflightError, SlotBusy
from cdc_assets.log.states import TableState
from cdc_assets.pins import on_standby
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres import slots
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import LOG_RUNNING, create_slot
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.faults.test_failover import Pair
from cdc_assets_tests.support.standby import of_standby, published
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

SETUP = """
create table t (id int primary key, v text);
insert into t select i, 'old' from generate_series(1, 1000) i;
create table u (id int primary key, v text);
"""
T, U = TableId("public", "t"), TableId("public", "u")
SENDER = "select pid from pg_stat_activity where application_name like '%pin s%'"


@contextmanager
def pins(config: SourceConfig) -> Iterator[Pins]:
    with Pipeline.open(config) as pipeline, closing(Pins(pipeline)) as made:
        yield made


def copying(made: Pins, table: TableId = T) -> bool:
    made.tick()
    row = made.store.table(table)
    return row is not None and row.state == TableState.COPYING


def reason(made: Pins, table: TableId) -> str:
    row = made.store.table(table)
    assert row is not None
    return row.reason or ""


@pytest.mark.parametrize("version", [16, 18])
def test_a_slots_snapshot_on_a_standby_may_lack_rows_without_a_word(
    tmp_home: Path, version: int
) -> None:
    """Why such a snapshot isn't copied: VACUUM's removals are replayed before anybody holds it."""
    unheard = {"hot_standby_feedback": "off"}
    with published(tmp_home, SETUP, "t", standby=unheard, version=version) as (both, client):
        with suppress(ProcessLookupError):
            made = list[slots.NewSlot]()

            def make(_: threading.Event) -> None:
                made.append(create_slot(both.standby_dsn, "s", temporary=True))

            with beside(make):
                sender = wait_for(lambda: both.ask_standby(SENDER))[0][0]
                time.sleep(0.5)  # it has begun to wait
                os.kill(int(str(sender)), signal.SIGSTOP)
                try:
                    client.execute(LOG_RUNNING)
                    client.execute("delete from t where id <= 500")
                    client.execute("vacuum t")
                    both.await_replay()
                finally:
                    os.kill(int(str(sender)), signal.SIGCONT)
        with (
            closing(made[0].connection),
            psycopg.connect(both.standby_dsn, autocommit=True) as reader,
        ):
            reader.execute("begin isolation level repeatable read read only")
            reader.execute(f"set transaction snapshot '{made[0].snapshot_name}'".encode())
            assert reader.execute("select count(*) from t").fetchone() == (500,), "1000 at its LSN"


def test_an_idle_primary_is_asked_for_what_a_slot_waits_for(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with published(tmp_home, SETUP, "t") as (both, _):
        config = of_standby(both, postgres_dsn(), tmp_path, "public.t")
        with pins(config) as made:
            began = time.monotonic()
            made.prepare()
            assert time.monotonic() - began < 10
            wait_for(lambda: copying(made))


def test_a_promoted_standby_asks_its_former_primary_for_nothing(
    postgres_dsn: NewDatabase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which may be gone: a primary's slot is made at once."""
    given = {
        "name": "src",
        "postgres": {
            "dsn": postgres_dsn(),
            "standby": True,
            "primary_dsn": "postgresql://127.0.0.1:1/gone",
        },
        "state": {"postgres_url": "postgresql://127.0.0.1:1/unused"},
        "staging": {"uri": tmp_path.as_uri()},
        "tables": [{"name": "public.t"}],
    }
    config = parse_config(given, "test")
    with caplog.at_level(logging.WARNING), on_standby.hurried(config):
        create_slot(source_dsn(config), "s", temporary=True).connection.close()
    assert caplog.text == ""


def test_who_has_to_ask_an_idle_primary_is_told(
    tmp_home: Path,
    postgres_dsn: NewDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(on_standby, "_HINT_SECONDS", 0.5)
    with published(tmp_home, SETUP, "t") as (both, client):
        config = of_standby(both, postgres_dsn(), tmp_path, "public.t", hurry=False)
        with pins(config) as made:
            client.execute("checkpoint")  # nothing is logged from here on
            with monkeypatch.context() as patch:
                patch.setattr(slots, "SLOT_PATIENCE_SECONDS", 2)
                with caplog.at_level(logging.WARNING), pytest.raises(SlotBusy) as told:
                    made.prepare()
            assert "pg_log_standby_snapshot" in caplog.text
            assert "pg_log_standby_snapshot" in told.value.remedy
            assert both.ask_standby("select slot_name from pg_replication_slots") == []

            def ask(stop: threading.Event) -> None:
                with psycopg.connect(both.primary.start(), autocommit=True) as primary:
                    while not stop.wait(0.5):
                        primary.execute(LOG_RUNNING)

            with beside(ask):
                made.prepare()
                wait_for(lambda: copying(made))


def test_what_is_not_published_is_told_with_the_sql_for_the_primary(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with published(tmp_home, SETUP, "") as (both, client):
        client.execute("drop publication cdc_src")
        both.await_replay()
        config = of_standby(both, postgres_dsn(), tmp_path, "public.t", "public.u")
        with pins(config) as made:
            (found,) = [f for f in review(config) if f.code == "publication_privilege"]
            with pytest.raises(PreflightError) as told:
                made.prepare()
            assert "on the primary: " in told.value.remedy
            statements = told.value.remedy.split("on the primary: ")[1]
            assert found.remedy.startswith(statements)
            assert '"public"."t", only "public"."u"' in statements
            client.execute(statements.encode())
            both.await_replay()
            client.execute('alter publication cdc_src drop table only "public"."u"')
            both.await_replay()
            made.prepare()
            wait_for(lambda: copying(made))
            assert "can't be added to the publication cdc_src" in reason(made, U)
            (found,) = [f for f in review(config) if f.code == "table_owner"]
            statement = reason(made, U).split("on the primary: ")[1]
            assert found.remedy.startswith(statement)
            client.execute(statement.encode())
            both.await_replay()
            wait_for(lambda: copying(made, U))


def test_a_table_waits_for_who_had_written_to_it_before_it_was_published(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    """Such a change isn't streamed, though it be committed later: the copy has to have it."""
    with published(tmp_home, SETUP, "t") as (both, client):
        config = of_standby(both, postgres_dsn(), tmp_path, "public.t", "public.u")
        with pins(config) as made:
            made.prepare()
            wait_for(lambda: copying(made))
            with psycopg.connect(both.primary.start()) as writer:
                writer.execute("insert into u values (1, 'unpublished')")
                client.execute('alter publication cdc_src add table only "public"."u"')
                both.await_replay()
                begun = threading.Event()

                def begin(_: threading.Event) -> None:
                    made.tick()
                    begun.set()

                with beside(begin):
                    assert not begun.wait(5), "the slot that proves it waits for the writer"
                    row = client.execute("select pg_current_wal_insert_lsn()::text").fetchone()
                    writer.commit()
                    assert row is not None
            wait_for(lambda: copying(made, U))
            found = made.store.table(U)
            assert found is not None
            assert found.snapshot_lsn is not None
            assert found.snapshot_lsn > Lsn.parse(row[0])


def test_a_stop_of_the_replay_that_another_source_ends_is_made_again(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = list[Lsn]()
    with published(tmp_home, SETUP, "t") as (both, client):

        def export(dsn: str) -> slots.NewSlot:
            if not points:
                both.ask_standby("select pg_wal_replay_resume()")
                client.execute("insert into t values (0, 'meanwhile')")
                both.await_replay()
            made = slots.export_snapshot(dsn)
            points.append(made.consistent_point)
            return made

        monkeypatch.setattr(on_standby, "export_snapshot", export)
        config = of_standby(both, postgres_dsn(), tmp_path, "public.t")
        with Pipeline.open(config) as pipeline:
            made = on_standby.stopped_snapshot(pipeline)
            made.connection.close()
        assert len(points) == 2
        assert made.consistent_point == points[1]
        assert both.ask_standby("select pg_get_wal_replay_pause_state()") == [("not paused",)]


def test_a_primary_whose_wal_lacks_what_decoding_needs_is_told(tmp_home: Path) -> None:
    """No setting of the standby's, which is all that ``check`` sees, tells it."""
    with (
        published(tmp_home, SETUP, "t", primary={"wal_level": "replica"}) as (both, _),
        pytest.raises(PreflightError) as told,
    ):
        create_slot(both.standby_dsn, "s", temporary=True)
    assert "On the primary: alter system set wal_level = logical" in told.value.remedy


def test_a_standby_that_is_not_meant_is_refused(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with published(tmp_home, SETUP, "t") as (both, _):
        config = of_standby(both, postgres_dsn(), tmp_path, "public.t", hurry=False)
        address = config.postgres.model_copy(update={"standby": False})
        config = config.model_copy(update={"postgres": address})
        assert "in_recovery" in {finding.code for finding in review(config)}
        with (
            Pipeline.open(config) as pipeline,
            pipeline.connect_source("test") as source,
            pytest.raises(psycopg.Error),
        ):
            slots.current_lsn(source)


def findings(both: Pair, log: str, folder: Path) -> set[str]:
    return {finding.code for finding in review(of_standby(both, log, folder, "public.t"))}


def test_settings_of_a_standby_that_endanger_the_slot_are_told(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with published(tmp_home, SETUP, "t") as (both, _):
        log = postgres_dsn()
        ours = {"standby_feedback", "replica_conflicts", "standby_lags", "replica_not_paused"}
        assert findings(both, log, tmp_path) & ours == set()
        both.ask_standby("alter system set hot_standby_feedback = off")
        both.ask_standby("alter system set recovery_min_apply_delay = '1s'")
        both.ask_standby("select pg_reload_conf()")
        wait_for(lambda: {"standby_feedback", "standby_lags"} <= findings(both, log, tmp_path))
        assert "replica_conflicts" in findings(both, log, tmp_path)
