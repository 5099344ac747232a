"""Small tables are compared together; one that can't go with the others is compared alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.errors import PySparkException

from cdc_assets.flusher.reach import reach
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.locks import flusher_lock, write_lock
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import create_slot
from cdc_assets.verify import compare, point, together
from cdc_assets.verify.rows import as_of, comparable
from cdc_assets.verify.source import count_sources, read_source, read_together
from cdc_assets.verify.together import _fingerprints as fingerprints
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, NewLake, copied
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text, n numeric(8,2));
insert into t select i, 'v' || i, i from generate_series(1, 50) i;
create table h (a int, b text);
insert into h select i % 3, 'x' from generate_series(1, 9) i;
create table u (id int primary key, v text);
insert into u select i, 'u' from generate_series(1, 7) i;
"""
T, H, U = (TableId("public", name) for name in "thu")


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path) -> Iterator[Lake]:
    modes = ("t", {"name": "h", "mode": "append"}, {"name": "u", "mode": "soft_delete"})
    with copied(postgres_dsn(), spark_url, SETUP, *modes) as opened:
        yield opened


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that were read alone, as they come."""
    found: list[str] = []

    def read(pipeline: Any, session: Any, beside: Any, *more: Any) -> object:
        found.append(beside.lake.row.table.name)
        return read_source(pipeline, session, beside, *more)

    monkeypatch.setattr(compare, "read_source", read)
    return found


def test_all_modes_and_empty_tables_at_one_lsn_with_one_wait(
    source: Lake, alone: list[str]
) -> None:
    source.execute("update t set v = 'changed' where id < 10; delete from t where id = 11")
    source.execute("insert into h values (7, null); delete from u where id = 1")
    waited: list[None] = []
    found = source.verify(lambda: waited.append(None))
    assert [(c.outcome, c.problem, c.source_rows, c.lake_rows) for c in found] == [
        ("equal", None, 49, 49),
        ("equal", None, 10, 10),
        ("equal", None, 6, 6),
    ]
    assert len({c.lsn for c in found}) == 1
    assert (len(waited), alone) == (2, [])
    source.execute("truncate t, h, u")
    assert [(c.outcome, c.source_rows) for c in source.verify()] == [("equal", 0)] * 3


def test_a_difference_is_found_in_its_table_alone(source: Lake, alone: list[str]) -> None:
    source.session.sql("update lake.src.t set v = 'wrong' where id in (3, 4)")
    source.session.sql("insert into lake.src.h select * from lake.src.h limit 1")
    t, h, u = source.verify()
    assert (t.differing, h.differing, u.differing) == (2, 1, 0)
    assert (t.columns, h.source_rows, h.lake_rows, alone) == (("v",), 9, 10, ["t", "h"])
    assert source.verify()[2].equal


def test_a_difference_is_told_even_if_its_rows_cannot_be_looked_for(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.session.sql("delete from lake.src.t where id in (3, 4)")

    def fail(*_: Any) -> object:
        raise OSError("no space")

    monkeypatch.setattr(compare, "read_source", fail)
    found = source.verify()[0]
    assert (found.outcome, found.source_rows, found.lake_rows) == ("different", 50, 48)
    assert found.differing == 2
    [said] = found.remarks
    assert said.startswith("Which rows differ isn't known: ")
    seen = source.execute("select differed_at is not null from _pg2iceberg.verified_samples")
    assert (True,) in seen


def test_nobody_else_merges_the_tables_until_each_is_level_and_then_they_may(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, adding = source.pipeline.store, list[set[str]]()

    def locked() -> set[str]:
        return {table.name for table in (T, H, U) if store.is_locked(write_lock(table))}

    def add(*arguments: Any) -> object:
        adding.append(locked())
        return fingerprints(*arguments)

    def flush() -> None:
        waits.append(None)
        if len(waits) == 2:  # for the point; the first one is for what is older
            wait_for(lambda: locked() == {"t", "h", "u"})

    monkeypatch.setattr(together, "_fingerprints", add)
    waits: list[None] = []
    assert all(c.equal for c in source.verify(flush))
    assert (len(waits), adding) == (2, [set()])


def test_a_table_that_gets_a_column_by_its_merge_is_compared_together_once_more(
    source: Lake, alone: list[str]
) -> None:
    source.execute("alter table t add w int default 5; insert into t values (77, 'seven', 7, 7)")
    found = source.verify()
    assert [(c.outcome, c.source_rows) for c in found] == [
        ("equal", 51),
        ("equal", 9),
        ("equal", 7),
    ]
    assert (found[0].lsn != found[1].lsn, alone) == (True, [])


def test_what_others_merge_meanwhile_is_compared_alone(
    source: Lake, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table whose lock isn't to be had, one with what is after the point, one that is parked."""
    made: list[object] = []

    def merged_past(*arguments: Any, **options: Any) -> object:
        made.append(create_slot(*arguments, **options))
        if len(made) == 1:
            source.execute("insert into t values (99, 'late', 0)")
            source.catch_up(T)
        return made[-1]

    monkeypatch.setattr(point, "create_slot", merged_past)
    monkeypatch.setattr(together, "_LOCK_SECONDS", 0.1)
    source.pipeline.store.park(U, "a reason")
    with Pipeline.open(source.config) as other:
        other.store.lock(write_lock(H))

        def let_go(*arguments: Any) -> object:
            other.store.unlock(write_lock(H))
            return comparing(*arguments)

        comparing = compare._Comparing.compare
        monkeypatch.setattr(compare._Comparing, "compare", let_go)
        t, h, u = source.verify()
    assert (t.outcome, t.source_rows, h.outcome) == ("equal", 51, "equal")
    assert ("a reason" in str(u.problem), alone) == (True, ["h"])


def test_a_table_that_is_altered_or_truncated_meanwhile_is_compared_again(
    source: Lake, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*arguments: Any) -> object:
        found = read_together(*arguments)
        source.execute("truncate h; insert into h values (5, 'new')")
        source.execute("alter table t add if not exists w int")
        return found

    monkeypatch.setattr(together, "read_together", read)
    found = source.verify()
    assert [(c.outcome, c.source_rows, c.problem) for c in found] == [
        ("equal", 50, None),
        ("equal", 1, None),
        ("equal", 7, None),
    ]
    assert alone == ["t", "h"]


@pytest.mark.parametrize(
    "error",
    [PySparkException("gone"), psycopg.errors.InsufficientPrivilege("denied"), OSError("no file")],
)
def test_when_they_cannot_be_read_together_each_is_compared_alone(
    source: Lake, alone: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def read(*_: Any) -> object:
        raise error

    monkeypatch.setattr(together, "read_together", read)
    assert [c.outcome for c in source.verify()] == ["equal"] * 3
    assert alone == ["t", "h", "u"]
    assert not any(source.pipeline.store.is_locked(write_lock(table)) for table in (T, H, U))


def test_a_table_that_is_altered_after_its_merge_is_compared_again(
    source: Lake, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker merges it while the merges of others are waited for."""
    altered: list[None] = []

    def look(session: Any, lake: Any, snapshot_id: int | None) -> object:
        if snapshot_id is not None and lake.row.table == T and not altered:
            altered.append(None)
            source.execute("alter table t add w int; insert into t values (99, 'x', 0, 1)")
            source.catch_up(T)
        return as_of(session, lake, snapshot_id)

    monkeypatch.setattr(together, "as_of", look)
    found = source.verify()
    assert altered
    assert [(c.outcome, c.source_rows, c.others) for c in found] == [
        ("equal", 51, ()),
        ("equal", 9, ()),
        ("equal", 7, ()),
    ]
    assert alone == []


def test_one_tables_merge_that_fails_keeps_no_other_locked(
    source: Lake, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def merge(pipeline: Pipeline, session: Any, table: TableId, **more: Any) -> object:
        if table == H:  # the first one of its hand
            raise psycopg.errors.LockNotAvailable("another's")
        return drain(pipeline, session, table, **more)

    def add(*arguments: Any) -> object:
        locked = [source.pipeline.store.is_locked(write_lock(table)) for table in (T, H, U)]
        assert not any(locked)
        return fingerprints(*arguments)

    monkeypatch.setattr(together, "drain", merge)
    monkeypatch.setattr(together, "_fingerprints", add)
    assert [c.outcome for c in source.verify()] == ["equal"] * 3
    assert alone == ["h"]


def test_when_the_merges_cannot_begin_each_is_compared_alone(
    source: Lake, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(ThreadPoolExecutor):
        begun = 0

        def submit(self, *arguments: Any, **options: Any) -> Any:
            self.begun += 1
            if self.begun == 2:
                raise RuntimeError("can't start new thread")
            return super().submit(*arguments, **options)

    monkeypatch.setattr(together, "ThreadPoolExecutor", Full)
    assert [c.outcome for c in source.verify()] == ["equal"] * 3
    assert alone == ["t", "h", "u"]


def test_a_log_that_stands_still_keeps_no_table_locked(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another flusher has the turn, and stages nothing."""
    for module in (compare, together):
        monkeypatch.setattr(module, "LOCKED_SECONDS", 0.5)

    locked_while_waiting = list[bool]()

    def flush_to(lsn: Lsn, *, seconds: float | None = None) -> None:
        if seconds is not None:  # tables are locked
            reach(source.pipeline, lsn, seconds=seconds)
        else:  # for however long it takes
            locks = map(write_lock, (T, H, U))
            locked_while_waiting.append(any(map(source.pipeline.store.is_locked, locks)))

    with Pipeline.open(source.config) as other:
        other.store.lock(flusher_lock(source.config.name))
        found = compare.verify(source.pipeline, source.session, source.tables, flush_to)
    assert {c.outcome for c in found} == {"not compared"}
    assert all("the log hasn't come to" in str(c.problem) for c in found)
    # At the beginning, and before each table that follows one that was locked in vain.
    assert locked_while_waiting == [False] * 4
    assert not any(source.pipeline.store.is_locked(write_lock(table)) for table in (T, H, U))


def test_a_table_that_cannot_be_looked_at_keeps_no_other_from_being_compared(
    source: Lake, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(pipeline: Pipeline, table: TableId) -> Any:
        if table == H:
            raise OSError("the store is away")
        return comparable(pipeline, table)

    monkeypatch.setattr(together, "comparable", look)
    assert [c.outcome for c in source.verify()] == ["equal"] * 3
    assert alone == ["h"]


def test_rows_that_get_lost_on_the_way_are_no_difference_but_a_problem(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def miscounted(*arguments: Any) -> dict[TableId, int]:
        return {table: n + (table == T) for table, n in counting(*arguments).items()}

    counting = count_sources
    monkeypatch.setattr(together, "count_sources", miscounted)
    t, h, u = source.verify()
    assert "50 rows of the source were read, and it counts 51" in str(t.problem)
    assert (t.since is not None, h.outcome, u.outcome) == (True, "equal", "equal")


def test_large_and_wide_tables_and_those_far_behind_are_compared_alone(
    postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge_bytes = {"lake": {"merge_bytes": 100}}
    modes = ("t", {"name": "h", "mode": "append"}, "u")
    with copied(postgres_dsn(), spark_url, SETUP, *modes, **merge_bytes) as opened:
        assert list(together.groups(opened.pipeline, [T, H, U])) == [[T, H, U]]
        with monkeypatch.context() as narrow:
            narrow.setattr(together, "_COLUMNS", 2)
            assert list(together.groups(opened.pipeline, [T, H, U])) == [[H, U]]
        monkeypatch.setattr(together, "SMALL_ROWS", 20)
        assert list(together.groups(opened.pipeline, [T, H, U])) == [[H, U]]
        opened.execute("update u set v = md5(id::text)")
        opened.flush()
        assert list(together.groups(opened.pipeline, [T, H, U])) == [[H]]
        assert all(c.equal for c in opened.verify())


def test_columns_that_are_called_as_ours_are_compared(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, and each alone."""
    setup = """
    create table a (id int primary key, lake text, "source" text, digest text);
    insert into a values (1, 'x', 'y', 'z');
    create table r (r int primary key, v text, key text, cells int);
    insert into r values (1, 'x', 'y', 2), (2, 'x', 'y', 3);
    """
    modes = ("a", {"name": "r", "mode": "append"})
    with copied_lake(setup, *modes) as lake:
        lake.execute("update a set lake = 'changed'; delete from r where r = 1")
        lake.execute("update r set v = 'changed'")
        for rows in (together.SMALL_ROWS, -1):
            monkeypatch.setattr(together, "SMALL_ROWS", rows)
            found = lake.verify()
            assert [(c.outcome, c.source_rows, c.problem) for c in found] == [
                ("equal", 1, None),
                ("equal", 1, None),
            ]
