"""First copies that are read from a physical copy of the source: exact, and no load for it."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc_assets.errors import EnvironmentProblem, SnapshotLost, TablesFailed
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.states import TableState
from cdc_assets.operations.copying import mark_for_copy, snapshot
from cdc_assets.operations.running import Spark
from cdc_assets.pins import taking
from cdc_assets.pins.pins import Pins
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.readiness.copy_server import CopyServer
from cdc_assets.readiness.surroundings import review
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.elsewhere import (
    HELD,
    PARTS,
    READ,
    TABLES,
    A,
    begin,
    begun,
    check_exact,
    copy_by,
    lead_to,
    opened,
    reached,
    waits_for,
    writing,
)
from cdc_assets_tests.integration.snapshot.sources import T, chunk_keys
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("looked_at_each_tick")]


@pytest.mark.parametrize("seed", [1, 2])
def test_invariant_4_a_promoted_copy_and_the_log_are_the_table(
    tmp_home: Path, spark_server: SparkServer, seed: int
) -> None:
    with opened(tmp_home, spark_server) as (source, both):
        source.pins.prepare()
        with writing(source) as done, flushing(source.config):
            wait_for(lambda: begun(source))
            time.sleep(random.Random(seed).random())
            both.promote()
            before = done[0]
            wait_for(lambda: done[0] > before + 300)  # the copy is far behind by then
            wait_for(lambda: reached(source, TableState.COPYING))
            source.copy()
        point = source.row(T).snapshot_lsn
        ((end,),) = source.execute("select pg_current_wal_lsn()::text")
        assert point is not None
        assert Lsn.parse(end) - point > 100_000
        assert not source.equal(T), "the test needs changes since the copy"
        source.catch_up()
        check_exact(source)
        assert [found.equal for found in source.verify()] == [True] * 3


def test_invariant_4_a_standby_whose_replay_is_paused_is_a_copy(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server) as (source, both):
        source.pins.prepare()
        with writing(source) as done:
            wait_for(lambda: begun(source))
            wait_for(lambda: waits_for(source) == "clone_not_paused")
            both.ask_standby("select pg_wal_replay_pause()")
            before = done[0]
            wait_for(lambda: done[0] > before + 100)
            wait_for(lambda: reached(source, TableState.COPYING))
            first, *_ = chunk_keys(source)
            copy_table(source.pipeline, source.session, T, only=[first])
            # All sessions that had the snapshot are gone; the copy shows the same to another one.
            source.pins.close()
            source.pins = Pins(source.pipeline)
            wait_for(lambda: reached(source, TableState.COPYING))
            source.copy()
        source.catch_up()
        check_exact(source)
        assert [source.row(table).epoch for table in source.tables] == [1] * 3


def test_copying_from_a_clone_is_no_load_for_the_source(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server) as (source, both):
        begin(source)
        both.promote()
        source.execute("select pg_stat_force_next_flush()")
        before = source.execute(READ)
        wait_for(lambda: reached(source, TableState.COPYING))
        assert source.execute(HELD) == [(0, 0)], "no snapshot is held at the source"
        source.copy()
        assert source.execute(HELD) == [(0, 0)]
        time.sleep(1.5)  # sessions report at most every second
        assert source.execute(READ) == before, "no row was read at the source"
        assert both.ask_standby(READ) != before
        assert source.equal(T)


def test_no_transaction_is_open_at_the_source_while_the_copy_is_asked(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang: then slots couldn't be made at the source, nor VACUUM remove a row."""
    opens = "select query from pg_stat_activity where backend_xid is not null"
    found, asked = list[object](), taking.as_registered

    def asks(*given: Any) -> Any:
        found.append(source.execute(opens))
        return asked(*given)

    monkeypatch.setattr(taking, "as_registered", asks)
    with opened(tmp_home, spark_server) as (source, both):
        begin(source)
        both.promote()
        found.clear()
        wait_for(lambda: reached(source, TableState.COPYING))
        assert found
        assert not any(found)


def test_while_the_copy_is_away_the_log_of_another_table_begins(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server) as (source, both):
        begin(source)
        both.promote()
        wait_for(lambda: reached(source, TableState.COPYING))
        mark_for_copy(source.pipeline, [A])
        both.standby.remove()

        def told() -> bool:
            with pytest.raises(EnvironmentProblem, match="server of snapshot"):
                source.pins.tick()
            return str(source.row(A).reason).startswith("clone_unreachable")

        wait_for(told)
        assert source.row(A).log_from is not None
        assert source.row(T).state == TableState.COPYING, "it goes on once the copy is back"


def test_a_standby_that_parts_from_the_source_while_it_is_pinned_is_judged_anew(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its replay stands still, so its point is the same."""
    with opened(tmp_home, spark_server) as (source, both):
        begin(source)
        source.execute("select pg_switch_wal()")
        wait_for(lambda: waits_for(source) == "clone_not_paused")
        both.ask_standby("select pg_wal_replay_pause()")
        looks, look = list[CopyServer](), CopyServer.look

        def parts(*given: Any) -> CopyServer:
            looks.append(look(*given))
            return replace(looks[-1], parted=Lsn(1)) if len(looks) == 3 else looks[-1]

        monkeypatch.setattr(CopyServer, "look", parts)
        assert not reached(source, TableState.COPYING)
        assert len(looks) == 3
        wait_for(lambda: reached(source, TableState.COPYING))


def test_a_copy_that_ended_before_the_logs_began_is_refused(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server) as (source, both):
        both.promote()
        begin(source)
        assert waits_for(source) == "clone_behind_log"
        codes = {finding.code for finding in review(source.config)}
        assert "clone_writable" in codes
        assert "postgresql" not in str(source.row(T).reason), "no address is told"


def test_a_table_that_was_begun_in_short_transactions_is_not_read_at_an_older_copy(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    """They show the source as of now: of the copy's past there is no log."""
    with opened(tmp_home, spark_server, tables=TABLES[:1]) as (source, both):
        elsewhere = source.config.snapshot
        both.promote()
        source.execute("insert into t select 50000 + i, 'late' from generate_series(1, 1000) i")
        short = {"from_": None, "strategy": "incremental"}
        copy_by(source, elsewhere.model_copy(update=short))
        source.pins.prepare()
        wait_for(lambda: reached(source, TableState.COPYING))
        copy_by(source, elsewhere)
        with pytest.raises(SnapshotLost, match="read at the source"):
            source.copy()
        assert waits_for(source) == "clone_behind_log"
        copy_by(source, elsewhere.model_copy(update=short))
        wait_for(lambda: reached(source, TableState.COPYING))
        source.copy()
        source.catch_up()
        assert source.equal(T)


def test_a_table_that_is_published_anew_needs_a_later_copy(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    """Between the begin of its log and the copy there was a gap in the log."""
    with opened(tmp_home, spark_server) as (source, both):
        begin(source)
        source.execute("alter publication cdc_src drop table t")
        source.execute("update t set v = 'unseen' where id = 5000")
        source.execute("alter publication cdc_src add table t")
        both.await_replay()
        both.promote()
        source.pins.tick()
        assert str(source.row(T).reason).startswith("clone_other_table")
        wait_for(lambda: begun(source))
        assert waits_for(source) == "clone_behind_log"
        assert source.row(A).state == TableState.COPYING


def test_a_table_that_was_altered_since_the_copy_is_refused(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server) as (source, both):
        begin(source)
        both.promote()
        source.execute("alter table t add w int default 7")
        assert waits_for(source) == "clone_other_table"


def test_a_server_that_is_no_copy_of_the_source_is_refused(
    tmp_home: Path, spark_server: SparkServer, postgres_dsn: NewDatabase
) -> None:
    with opened(tmp_home, spark_server, dsn=postgres_dsn()) as (source, both):
        begin(source)
        assert waits_for(source) == "clone_other_cluster"

        def leads_to(dsn: str) -> str:
            lead_to(source, dsn)
            return waits_for(source)

        assert leads_to(both.primary.start()) == "clone_other_timeline"
        assert leads_to(both.standby_dsn) == "clone_not_paused"
        source.execute("create database other")
        other = make_conninfo(both.primary.start(), dbname="other")
        assert leads_to(other) == "clone_other_cluster"
        assert leads_to(make_conninfo(both.standby_dsn, password="hunter2")) == "clone_unreachable"
        told = [str(source.row(T).reason), *(found.message for found in review(source.config))]
        assert not any("hunter2" in text for text in told)


def test_a_transaction_of_before_the_table_was_published_is_waited_for(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    """Its changes aren't streamed, though it commits later: only a copy of after that has them."""
    with opened(tmp_home, spark_server) as (source, both):
        source.pins.prepare()
        source.execute("alter publication cdc_src drop table t")
        with psycopg.connect(source.pipeline.source_dsn) as early:
            early.execute("update t set v = 'early' where id = 5000")
            source.pins.tick()
            source.pins.tick()
            assert source.row(T).log_from is None
            both.promote()
        wait_for(lambda: begun(source))
        assert waits_for(source) == "clone_behind_log"


@pytest.mark.parametrize("kept", [True, False], ids=["rewritten", "truncated"])
def test_a_partition_that_was_truncated_since_the_copy_is_noticed(
    tmp_home: Path, spark_server: SparkServer, kept: bool
) -> None:
    """The TRUNCATE of a partition isn't streamed: the files are held against those of the copy."""
    with opened(tmp_home, spark_server, setup=PARTS, tables=["p"]) as (source, both):
        begin(source)
        source.execute("update p set v = 'new' where id = 1500")
        both.await_replay()
        both.promote()
        source.execute("vacuum full p1" if kept else "truncate p1")
        source.execute("update p set v = 'newer' where id = 1600")
        wait_for(lambda: reached(source, TableState.COPYING))
        source.copy()
        for _ in range(2):
            source.flush()
            source.pins.prepare()  # looks at the heaps
        p = source.tables[0]
        if kept:
            source.catch_up()
            assert source.equal(p)
        else:
            assert source.row(p).state == TableState.PARKED
            assert "rows_replaced" in str(source.row(p).reason)


def test_the_command_says_at_once_why_it_can_not_copy(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server) as (source, both), Spark(source.config) as spark:
        both.promote()
        source.pins.close()
        began = time.monotonic()
        with pytest.raises(TablesFailed, match=r"public\.t.*clone_behind_log.*has what committed"):
            snapshot(source.pipeline, spark, [T], lambda _: None)
        assert time.monotonic() - began < 60, "no pin is waited for that never comes"
        source.pins = Pins(source.pipeline)
