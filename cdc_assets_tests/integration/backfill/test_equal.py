"""Rows that the lake has as they were read aren't written; all others are, however they differ."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.backfill import carry_out
from cdc_assets.backfill import equal as equality
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.backfills import T, after_reading, backfilled, damage
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

ODD = """
create table t (
    id int primary key, f double precision, fs real[], n numeric(12, 3), free numeric, b bytea,
    at timestamptz, local timestamp, d date, time_of time, yes boolean, j jsonb, u uuid,
    words text[], v text, c char(5), i interval, ip inet);
insert into t values
    (1, '-0', '{-0,NaN}', 1, 1.50, '\\x00ff', '2024-01-01 00:00:00.123456+02', '0044-03-15 BC',
     '2024-02-29', '23:59:59.999999', true, '{"a": [1, null]}',
     '6b2ad3c7-3f0c-4f0f-9a54-b8d2b4e4a001', '{a,NULL,"NULL",""}', '', 'ab', '1 mon', '::1/64'),
    (2, 'NaN', '{}', -0.001, 'NaN', '', 'infinity', null, null, null, false, 'null', null, null,
     E'tab\\t and "quotes"', null, null, null),
    (3, 0, null, null, 1e30, null, null, null, null, null, null, null, null, '{}', null, null,
     null, null);
"""


def test_of_rows_that_are_equal_nothing_is_written(new_lake: NewLake) -> None:
    with new_lake(ODD, {"name": "t", "columns": {"unrepresentable": "null"}}) as source:
        source.pin()
        source.copy()
        source.flush()
        source.drain(T)
        before = source.lake_table(T).state().snapshot_id
        done = backfilled(source)
        assert (done.state, done.applied, done.differed) == ("done", 3, 0)
        assert source.lake_table(T).state().snapshot_id == before


@pytest.mark.parametrize(
    "damaged",
    [
        "update lake.src.t set f = 0.0D where id = 1",
        "update lake.src.t set fs = array(0.0F, float('NaN')) where id = 1",
        "update lake.src.t set words = array('a', 'NULL', 'NULL', '') where id = 1",
        "update lake.src.t set v = null where id = 1",
        "update lake.src.t set v = '' where id = 3",
        "update lake.src.t set yes = not yes where id = 2",
        "delete from lake.src.t where id = 2",
        "insert into lake.src.t select * from lake.src.t where id = 2",
        "insert into lake.src.t (id) select 2",
    ],
)
def test_a_row_that_differs_in_anything_is_written(new_lake: NewLake, damaged: str) -> None:
    with new_lake(ODD, {"name": "t", "columns": {"unrepresentable": "null"}}) as source:
        source.pin()
        source.copy()
        source.flush()
        source.drain(T)
        damage(source, damaged)
        done = backfilled(source)
        assert (done.state, done.applied, done.differed) == ("done", 3, 1)
        assert [found.differing for found in source.verify()] == [0]


def test_a_row_that_is_marked_deleted_is_one_again(new_lake: NewLake) -> None:
    setup = "create table t (id int primary key, v text); insert into t values (1, 'a'), (2, 'b')"
    with new_lake(setup, {"name": "t", "mode": "soft_delete"}) as source:
        source.pin()
        source.copy()
        source.flush()
        source.drain(T)
        damage(source, "update lake.src.t set _deleted_at = now() where id = 2")
        assert backfilled(source).differed == 1
        assert source.rows(TableId("public", "t")) == [(1, "a", None), (2, "b", None)]


def between(monkeypatch: pytest.MonkeyPatch, do: Any) -> None:
    """Once, after rows were compared and before the others are applied."""
    compared, todo = equality.equal, [do]

    def equal(*about: Any) -> Any:
        found = compared(*about)
        while todo:
            todo.pop()()
        return found

    monkeypatch.setattr("cdc_assets.backfill.apply.equal", equal)


def test_what_changes_after_it_was_compared_is_left_to_the_stream(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        source.execute("update t set v = 'there' where id = 1; delete from t where id = 2")
        source.execute("update t set v = 'and back' where id = 3")
        source.execute("update t set v = 'v3' where id = 3")
        source.execute("delete from t where id = 4; update t set id = 4 where id = 5")

    between(monkeypatch, change)
    done = backfilled(source)
    assert (done.state, done.differed) == ("done", 0)
    source.catch_up(T)
    assert source.equal(T)


def test_a_lake_table_that_is_rolled_back_after_it_was_compared_is_written(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(source, "update lake.src.t set v = 'wrong' where id < 10")
    wrong = source.lake_table(T).state().snapshot_id
    assert backfilled(source).differed == 9

    def roll_back() -> None:
        source.session.sql(f"call lake.system.rollback_to_snapshot('src.t', {wrong})")

    between(monkeypatch, roll_back)
    assert backfilled(source).differed >= 9
    source.catch_up(T)
    assert source.equal(T)


@pytest.mark.parametrize("changes", [True, False])
def test_merges_of_a_table_that_changes_have_their_turn(
    source: Lake, monkeypatch: pytest.MonkeyPatch, *, changes: bool
) -> None:
    rests = list[float]()
    monkeypatch.setattr(carry_out, "_GROUP_BYTES", 1)
    monkeypatch.setattr(carry_out._Backfilling, "_rest", lambda _, seconds: rests.append(seconds))
    if changes:

        def change() -> None:
            source.execute("update t set v = 'x' where id = 1")
            source.catch_up(T)

        after_reading(monkeypatch, change)
    assert backfilled(source).state == "done"
    assert (rests != []) == changes


@pytest.mark.parametrize(("key", "written"), [("text", 1), ("bigint", 0)])
def test_a_table_that_would_be_read_whole_for_few_rows_is_not_compared(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch, key: str, written: int
) -> None:
    monkeypatch.setattr(equality, "_READ_AT_MOST", 0)
    with new_lake(f"create table t (id {key} primary key); insert into t values (1)", "t") as lake:
        lake.pin()
        lake.copy()
        lake.catch_up()
        done = backfilled(lake)
        assert (done.state, done.applied, done.differed) == ("done", 1, written)
