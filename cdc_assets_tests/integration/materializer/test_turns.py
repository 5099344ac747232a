"""Bounded merges, many tables at once, and a hot table that doesn't starve the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession

from cdc_assets.config.tables import FreshnessConfig
from cdc_assets.lake.spark.session import open_session
from cdc_assets.log.batch import take
from cdc_assets.log.locks import flusher_lock, write_lock
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.store import LogEntry
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.schema import ahead
from cdc_assets.materializer.schema.ahead import _CATCH_UP_SECONDS, Altered
from cdc_assets.materializer.workers import turns
from cdc_assets.materializer.workers.follower import Listener
from cdc_assets.materializer.workers.turns import Turns
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.operations.merging import follow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

HOT, A, B = TableId("public", "hot"), TableId("public", "a"), TableId("public", "b")
SETUP = "".join(f"create table {t} (id int primary key, v int);" for t in ("hot", "a", "b"))


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    settings: dict[str, Any] = {"lake": {"max_parallel_tables": 1, "merge_bytes": "1B"}}
    with copied_lake(SETUP, "hot", "a", "b", **settings) as opened:
        yield opened


def configure(source: Lake, **settings: Any) -> None:
    lake_config = source.config.lake.model_copy(update=settings)
    source.config = source.config.model_copy(update={"lake": lake_config})
    source.pipeline.config = source.config


def backlog(source: Lake, files: int) -> None:
    """A log of so many files, each with one change of ``hot``."""
    for i in range(files):
        source.execute(f"insert into hot values ({i}, {i})")
        source.flush()


@contextmanager
def following(source: Lake) -> Iterator[list[str]]:
    """A follower of the source's tables, and what it says."""
    stop, said = threading.Event(), list[str]()

    @contextmanager
    def sessions() -> Iterator[SparkSession]:
        session = open_session(source.config)
        try:
            yield session
        finally:
            session.stop()

    listener = Listener(said.append)
    work = threading.Thread(
        target=follow, args=(source.config, source.tables, stop, listener, sessions)
    )
    work.start()
    try:
        yield said
    finally:
        stop.set()
        work.join(60)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 150))
def test_a_merge_takes_at_most_so_many_bytes_or_one_file(sizes: list[int], limit: int) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [StagedRows(HOT, str(i), 1, size) for i, size in enumerate(sizes)]
    entries = [LogEntry(i, each, Lsn.ZERO, at) for i, each in enumerate(rows)]
    taken = take(entries, limit)
    assert taken == entries[: len(taken)]
    size = sum(entry.rows.byte_size for entry in taken)
    assert len(taken) == 1 or (len(taken) > 1 and size <= limit)
    assert len(taken) == len(entries) or size + entries[len(taken)].rows.byte_size > limit


def test_a_backlog_drains_in_merges_of_merge_bytes(source: Lake) -> None:
    backlog(source, 4)
    assert source.drain(HOT).merges == 4
    sizes = [entry.rows.byte_size for entry in source.pipeline.store.entries(HOT, 0)]
    source.execute("insert into hot select i, i from generate_series(100, 103) i")
    backlog_from = source.pipeline.store.log_end(HOT)
    for i in range(4):
        source.execute(f"update hot set v = v + 1 where id = {i}")
        source.flush()
    assert backlog_from < source.pipeline.store.log_end(HOT)
    configure(source, merge_bytes=3 * max(sizes))
    assert 1 < source.drain(HOT).merges < 5
    assert source.rows(HOT) == sorted(source.execute("select * from hot"), key=repr)


def test_a_hot_table_doesnt_starve_the_others(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hand, and a long backlog that is older than what the others get."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 0.0)  # a merge a turn
    backlog(source, 6)
    source.execute("insert into a values (1, 1); insert into b values (1, 1)")
    source.flush()
    order: list[TableId] = []
    tables = set(source.tables)
    with (
        Worker(source.pipeline, tables) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
    ):
        while pending := going.pending(tables):
            assert going.start(pending[0])
            assert not going.start(pending[-1]) or len(pending) == 1  # the one hand is busy
            while going.busy:
                for turn in going.wait(1):
                    assert turn.error is None
                    order.append(turn.table)
    assert order[:3] == [HOT, A, B]  # and not when the backlog is drained
    assert order[3:] == [HOT] * (len(order) - 3)
    assert len(order) >= 6
    assert [c.equal for c in source.verify()] == [True] * 3


def test_a_turn_says_whether_anything_moved(source: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    source.execute("insert into a values (1, 1)")
    source.flush()

    def away(*_: object) -> None:
        raise psycopg.OperationalError("the source is away")

    with (
        Worker(source.pipeline, {A}) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
    ):
        moved = list[bool]()
        for number in range(2):
            if number:  # a table without anything to be applied needs no source
                monkeypatch.setattr(Pipeline, "connect_source", away)
            assert going.pending({A}, also={A}) == [A]
            assert going.start(A)
            while not (over := going.wait(1)):
                pass
            assert over[0].drained is not None
            moved.append(over[0].drained.moved)
    assert moved == [True, False]


def test_a_schema_change_is_tried_once_the_log_is_there_up_to_it(source: Lake) -> None:
    """Else the hands would wait for a flusher that is behind, and the other tables with them."""
    altered = Altered(source.pipeline, source.tables)
    source.execute("alter table a add column w int")
    assert altered.tables() == set()
    source.flush()
    assert altered.tables() == {A}
    with (
        Worker(source.pipeline, {A}) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
    ):
        assert going.pending({A}, also={A}) == [A]
        assert going.start(A, altered.look(A))
        while not (over := going.wait(1)):
            pass
    assert over[0].error is None
    altered.tried(A)
    assert altered.tables() == set()
    loaded = source.lake_table(A).loaded()
    assert loaded.schema().column_names == ["id", "v", "w"]


def test_a_turn_at_rows_waits_for_no_schema_change(source: Lake) -> None:
    """A flusher is at work, and behind: the table's other rows come when they come."""
    source.execute("insert into a values (1, 1)")
    source.flush()
    source.execute("alter table a add column w int")
    altered = Altered(source.pipeline, source.tables)
    with (
        Pipeline.open(source.config) as other,
        other.store.locked(flusher_lock(other.store.source)),
        Worker(source.pipeline, {A}) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
    ):
        assert altered.tables() == set()
        assert source.pipeline.store.awaited_lsn() > Lsn.ZERO  # the flusher is told to hurry
        wait_for(lambda: going.pending({A}) == [A])
        assert altered.look(A) is None
        assert going.start(A, altered.look(A))
        altered.tried(A)
        while not (over := going.wait(1)):
            pass
    assert over[0].drained is not None
    assert over[0].drained.seconds < _CATCH_UP_SECONDS
    source.flush()
    assert altered.tables() == {A}  # by the look that was before the turn


def test_a_table_that_is_dropped_after_a_look_is_no_problem_of_its_log(source: Lake) -> None:
    altered = Altered(source.pipeline, source.tables)
    source.execute("insert into a values (1, 1); alter table a add column w int")
    assert altered.tables() == set()
    source.flush()
    assert altered.tables() == {A}
    source.execute("drop table a")
    end = source.pipeline.store.log_end(A)
    done = drain(source.pipeline, source.session, A, until_offset=end, look=altered.look(A))
    assert done is not None
    assert done.changes == 1


def test_a_look_for_schema_changes_writes_nothing(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an idle source were none, and one in recovery, which can't be written, ended merges."""

    def writes(_: object) -> Lsn:
        raise AssertionError

    monkeypatch.setattr(ahead, "current_lsn", writes)
    assert Altered(source.pipeline, source.tables).tables() == set()


def test_many_tables_are_merged_at_once(source: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(source, max_parallel_tables=3)
    source.execute("; ".join(f"insert into {t} values (1, 1)" for t in ("hot", "a", "b")))
    source.flush()
    together = threading.Barrier(3)

    def all_at_once(*given: Any, **named: Any) -> Any:
        together.wait(60)
        done = drain(*given, **named)
        together.wait(60)
        return done

    monkeypatch.setattr(turns, "drain", all_at_once)
    tables, done = set(source.tables), set[TableId]()
    with (
        Worker(source.pipeline, tables) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
    ):
        for table in going.pending(tables):
            assert going.start(table)
        assert going.pending(tables) == []  # what is at work isn't pending
        while going.busy:
            for turn in going.wait(1):
                assert turn.error is None
                assert turn.drained is not None
                assert turn.drained.changes == 1
                done.add(turn.table)
    assert done == tables
    assert [c.equal for c in source.verify()] == [True] * 3
    assert source.execute("select * from _pg2iceberg.consumer") == []


def test_a_table_that_another_writer_has_is_soon_tried_again(source: Lake) -> None:
    """One that has it for long is asked for ever more rarely."""
    configure(source, max_parallel_tables=1)
    source.execute("insert into a values (1, 1)")
    source.flush()
    with (
        Worker(source.pipeline, {A}) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
        Pipeline.open(source.config) as other,
    ):

        def refused() -> float:
            """How long it takes until it is asked for once more."""
            assert going.start(A)
            assert [turn.drained for turn in going.wait(60)] == [None]
            since = time.monotonic()
            wait_for(lambda: going.pending({A}) == [A], 10)
            return time.monotonic() - since

        with other.store.locked(write_lock(A)):
            first, *_, later = (refused() for _ in range(3))
        assert first < later < turns._BUSY.cap_seconds
        assert going.start(A)
        assert [turn.drained is not None for turn in going.wait(60)] == [True]


def test_a_wait_ends_when_the_next_table_is_due(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(source, merge_bytes=10**9)
    tables = set(source.tables)
    with (
        Worker(source.pipeline, tables) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
    ):
        source.execute("insert into a values (1, 1)")
        just_now = source.pipeline.store.server_now()
        source.flush()
        with monkeypatch.context() as patch:  # however long the flush took
            patch.setattr(source.pipeline.store, "server_now", lambda: just_now)
            assert (going.pending(tables), going.waits) == ([], True)
        began = time.monotonic()
        assert going.wait(60) == []
        assert time.monotonic() - began <= source.config.table(A).freshness.target.total_seconds()
        assert going.pending(tables) == [A]


def test_a_table_is_pending_when_its_target_is_near(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``freshness.target`` is how often it is merged; the others have the default."""
    configure(source, merge_bytes=10**9)
    freshness = FreshnessConfig.model_validate({"target": "15m", "warn": "20m", "fail": "30m"})
    tables = [
        table.model_copy(update={"freshness": freshness} if table.id == A else {})
        for table in source.config.tables
    ]
    source.config = source.config.model_copy(update={"tables": tuple(tables)})
    source.pipeline.config = source.config
    wanted = set(source.tables)
    with (
        Worker(source.pipeline, wanted) as worker,
        Turns(source.pipeline, source.session, worker, print) as going,
    ):
        source.execute("insert into a values (1, 1); insert into b values (1, 1)")
        source.flush()
        now = source.pipeline.store.server_now()

        def pending(**later: float) -> set[TableId]:
            at = now + timedelta(**later)
            monkeypatch.setattr(type(source.pipeline.store), "server_now", lambda _: at)
            return set(going.pending(wanted))

        assert pending(minutes=14) == {B}
        assert pending(minutes=15) == {A, B}


def test_a_catalog_that_is_away_is_no_tables_own_problem(
    copied_lake: NewLake, postgres_dsn: NewDatabase
) -> None:
    """Else each table would wait longer after each try, and for minutes once it is back."""
    catalog = postgres_dsn()
    name = conninfo_to_dict(catalog)["dbname"]
    lake = {"catalog": {"type": "sql", "uri": catalog}}
    told = "select table_name from _pg2iceberg.claims where problem is not null"
    with copied_lake(SETUP, "hot", "a", "b", lake=lake) as source, following(source) as said:
        source.execute("insert into a values (1, 1)")
        source.flush()
        wait_for(lambda: any("public.a" in line for line in said))
        source.execute(f"alter database {name} allow_connections false")
        source.execute(
            f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"
        )
        source.execute("insert into a values (2, 2); insert into b values (1, 1)")
        source.flush()
        time.sleep(8)
        assert not source.execute(told)
        assert not any("public.b" in line for line in said)
        source.execute(f"alter database {name} allow_connections true")
        wait_for(lambda: any("public.b" in line for line in said))
        assert not source.execute(told)
        assert all(compared.equal for compared in source.verify())
