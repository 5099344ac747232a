"""A table that is merged often is put in order between two maintenance runs, by its worker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from pyspark.errors import PySparkException

from cdc_assets.config.sections import MaintenanceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.session import open_session
from cdc_assets.log.asked.wishes import pause, resume
from cdc_assets.log.locks import ALONE_LOCK, write_lock
from cdc_assets.maintenance import crowds, plan
from cdc_assets.maintenance.lost_care import surviving
from cdc_assets.materializer.workers import turns as module
from cdc_assets.materializer.workers.turns import Turns
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.integration.maintenance.care import settings
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

T = TableId("public", "t")
SETUP = """
create table t (id int primary key, v text);
insert into t select i, 'v' from generate_series(1, 50) i;
"""
CROWD = 4


@pytest.fixture(autouse=True)
def _small_crowds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "CROWD", CROWD)
    monkeypatch.setattr(crowds, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(crowds, "_PAUSES", 0.0)
    monkeypatch.setattr(crowds, "_RESTS", 0.0)
    monkeypatch.setattr(plan, "_THINNED", MaintenanceConfig(min_input_files=2))


U, V = TableId("public", "u"), TableId("public", "v")


@contextmanager
def _at_work(copied_lake: NewLake, *others: TableId) -> Iterator[tuple[Lake, Turns]]:
    """A worker's turns at ``t`` and others, which are empty."""
    more = "".join(f"create table {table.name} (id int primary key);" for table in others)
    with (
        copied_lake(SETUP + more, "t", *(table.name for table in others)) as source,
        settings(source) as pipeline,
        Worker(pipeline, source.tables) as worker,
        Turns(pipeline, source.session, worker, lambda _: None) as turns,
    ):
        yield source, turns


@dataclass
class Held:
    """A table's tiny files are put together for as long as the test wants."""

    begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __call__(self, *_: object) -> None:
        self.begun.set()
        assert self.go_on.wait(60)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()
    monkeypatch.setattr(crowds.Crowds, "is_crowd", lambda *_: True)
    monkeypatch.setattr(crowds.Crowds, "thin_out", lambda *_: held())
    return held


def _files(source: Lake) -> int:
    return source.lake_table(T).state().data_files


def _turn(source: Lake, turns: Turns) -> None:
    """What was changed, merged in one turn, and what follows it."""
    _merge(source, turns)
    while turns.busy:  # its files are put together
        assert turns.wait(0.1) == []


def _merge(source: Lake, turns: Turns) -> None:
    source.flush()
    assert turns.pending([T], also=[T]) == [T]
    assert turns.start(T)
    [turn] = wait_for(lambda: turns.wait(0.1))
    assert turn.error is None
    assert turn.drained is not None
    assert turn.drained.merges == 1


def _merged(source: Lake, pipeline: Pipeline, times: int) -> list[int]:
    """The table's files after each of so many merges by a worker."""
    found = []
    with (
        Worker(pipeline, [T]) as worker,
        Turns(pipeline, source.session, worker, lambda _: None) as turns,
    ):
        for i in range(times):
            source.execute(
                f"insert into t values ({100 + i}, 'n'); update t set v = '{i}' where id = 1"
            )
            _turn(source, turns)
            found.append(_files(source))
    return found


def test_tiny_files_are_put_together_before_they_are_many(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "t") as source, settings(source) as pipeline:
        first = _files(source)
        found = _merged(source, pipeline, 9)
        assert max(found) <= first + CROWD
        assert min(found[CROWD:]) < CROWD
        assert source.equal(T)


def test_a_compaction_that_fails_fails_no_merge(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(crowds, "rewritten", broken)
    with copied_lake(SETUP, "t") as source, settings(source) as pipeline:
        with caplog.at_level(logging.WARNING):
            found = _merged(source, pipeline, 6)
        assert found == sorted(found)
        assert "its small files stay: RuntimeError" in caplog.text
        assert source.equal(T)


def test_no_other_table_waits_for_it(
    copied_lake: NewLake, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowds.Crowds, "is_crowd", lambda _self, table, *_: table == T)
    others = [U, V]
    with _at_work(copied_lake, *others) as (source, turns):
        source.execute("insert into t values (100, 'n'); insert into u values (1)")
        source.execute("insert into v values (1)")
        source.flush()
        assert set(turns.pending(source.tables, also=source.tables)) == set(source.tables)
        assert turns.start(T)
        [turn] = wait_for(lambda: turns.wait(0.1))
        assert turn.table == T
        assert held.begun.wait(60)
        source.execute("delete from t where id = 100")
        source.flush()
        assert set(turns.pending(source.tables, also=source.tables)) == {*others}
        assert [turns.start(table) for table in others] == [True, True]  # as many as configured
        done = list(wait_for(lambda: turns.wait(0.1)))
        while len(done) < len(others):
            done += turns.wait(0.1)
        assert turns.busy
        held.go_on.set()
        while turns.busy:
            assert turns.wait(0.1) == []
        assert turns.pending(source.tables, also=[T]) == [T]


def test_one_table_at_a_time_is_put_together(copied_lake: NewLake, held: Held) -> None:
    """Tables whose changes commit together are crowds together: they'd take all hands, and wait."""
    with _at_work(copied_lake, U, V) as (source, turns):
        source.execute("insert into t values (100, 'n'); insert into u values (1)")
        source.flush()
        turns.pending(source.tables, also=source.tables)
        assert [turns.start(table) for table in (T, U)] == [True, True]
        wait_for(lambda: all(future.done() for _, future in turns._at_work.values()))
        assert len(turns.wait(0.1)) == 2
        free = set(source.tables) - set(turns._at_work)
        assert len(free) == 2
        turns.pending(source.tables, also=source.tables)
        assert [turns.start(table) for table in free] == [True, True]
        held.go_on.set()
        while turns.busy:
            turns.wait(0.1)


def test_a_worker_that_ends_begins_nothing_and_waits_quietly(
    copied_lake: NewLake, held: Held
) -> None:
    with _at_work(copied_lake, U) as (source, turns):
        source.execute("update t set v = 'new' where id = 1")
        source.flush()
        turns.pending(source.tables, also=source.tables)
        assert turns.start(T)
        wait_for(lambda: turns.wait(0.1))
        assert held.begun.wait(60)
        source.execute("insert into u values (1)")
        source.flush()
        turns.pending(source.tables)
        assert turns.waits
        turns.end()
        wait_for(lambda: time.monotonic() > turns._next_due, seconds=20)
        looks = [_seconds(turns) for _ in range(3)]
        assert looks[0] < 0.1
        assert min(looks[1:]) > 0.25
        assert turns.start(U)  # what was begun just before
        wait_for(lambda: turns.wait(0.1))
        held.go_on.set()
        while turns.busy:
            assert turns.wait(0.1) == []


def _seconds(turns: Turns) -> float:
    began = time.monotonic()
    assert turns.wait(0.3) == []
    return time.monotonic() - began


def test_a_server_that_is_lost_is_left_at_once(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to it is repeated for 17 seconds, and each session had one."""
    monkeypatch.setattr(module, "lost_server", lambda error: str(error) == "gone")
    with copied_lake(SETUP, "t") as source, settings(source) as pipeline:
        for said in ("gone", "another error"):
            session = open_session(source.config)
            turns = Turns(pipeline, session, Worker(pipeline, [T]), lambda _: None)
            sessions = [hand.session for hand in turns._free]
            turns.__exit__(PySparkException, PySparkException(said), None)
            session.stop()
            asked = [vars(each)["release_session_on_close"] for each in sessions[1:]]
            assert asked == [said != "gone"] * 2


def test_a_server_lost_beside_a_merge_is_no_problem_of_its_table(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise PySparkException("the server is gone")

    monkeypatch.setattr(crowds.Crowds, "is_crowd", lambda *_: True)
    monkeypatch.setattr(crowds.Crowds, "thin_out", lost)
    with _at_work(copied_lake) as (source, turns):
        source.execute("update t set v = 'new' where id = 1")
        _merge(source, turns)  # which is told, whatever came after it
        for raises in (lambda: turns.wait(20), lambda: turns.start(T), lambda: turns.wait(0.1)):
            with pytest.raises(PySparkException, match="the server is gone"):
                raises()


def test_without_maintenance_files_stay_as_they_are(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "t") as source, settings(source, every=None) as pipeline:
        found = _merged(source, pipeline, 6)
        assert found == sorted(found)


def test_it_waits_for_nobody_and_leaves_tables_at_rest_alone(
    copied_lake: NewLake, caplog: pytest.LogCaptureFixture
) -> None:
    with copied_lake(SETUP, "t") as source, settings(source) as pipeline:
        _merged(source, pipeline, CROWD - 2)
        before, store = _files(source), source.pipeline.store

        def thinned() -> bool:
            """Of a table that is said to have many files."""
            began, caplog_before = time.monotonic(), len(caplog.records)
            found = crowds.Crowds()
            assert not found.is_crowd(T, CROWD, 1)  # what a merge adds isn't known yet
            assert found.is_crowd(T, CROWD, 1)
            found.thin_out(pipeline, source.session, T)
            if _files(source) < before:
                return True
            assert time.monotonic() - began < 10.0
            assert "its small files stay" in caplog.records[caplog_before].getMessage()
            return False

        with caplog.at_level(logging.INFO):
            for lock in (write_lock(T), ALONE_LOCK):
                with store.locked(lock):
                    assert not thinned()
            pause(store, T)
            assert not thinned()
            resume(store, T)
            store.park(T, "somebody else wrote it", source.row(T).epoch)
            assert not thinned()
            source.execute("update _pg2iceberg.tables set state = 'streaming', reason = null")
            assert thinned()
        assert source.equal(T)


def test_it_forgives_no_compaction_that_ended_servers(copied_lake: NewLake) -> None:
    """A maintenance run's is far larger than one of tiny files."""
    with copied_lake(SETUP, "t") as source, settings(source) as pipeline:
        source.execute(
            "insert into _pg2iceberg.lost_care (source, table_name, what, times, ended_at)"
            f" values ('{source.config.name}', 'public.t', 'its compaction', 2, now())"
        )
        assert max(_merged(source, pipeline, 2 * CROWD)) <= 2 * CROWD  # thinned out all the same
        with pytest.raises(TableProblem), surviving(pipeline.store, T, "its compaction"):
            pass
