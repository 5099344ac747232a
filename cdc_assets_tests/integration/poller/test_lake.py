"""Query mode from source to lake: copy, polls, merges, deletes."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.backfill.request import request
from cdc_assets.log.backfills import DELETES, backfills, request_deletes
from cdc_assets.log.states import TableState
from cdc_assets.operations.backfilling import backfill
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, T
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

FILLED = f"""{CLOCKED}
insert into t select i, 'old ' || i, now() - interval '1 day' from generate_series(1, 300) i;
"""
QUERY = {"every": "1s"}


def pinned(source: Lake) -> bool:
    source.pins.tick()
    return all(source.row(table).state != TableState.WAITING for table in source.tables)


def copied(source: Lake) -> None:
    source.pins.prepare()
    wait_for(lambda: pinned(source))
    source.copy()
    source.pins.tick()


def in_lake(source: Lake, table: TableId = T, *columns: str) -> list[tuple[Any, ...]]:
    there = source.session.table(source.lake_table(table).sql_name)
    return sorted(tuple(row) for row in there.select(*(columns or ("id", "v"))).collect())


def is_equal(source: Lake) -> bool:
    return in_lake(source) == source.execute("select id, v from t order by id")


def look_for_deletes(source: Lake, table: TableId = T) -> None:
    asked = request(source.pipeline, table, deletes=True)
    done = backfill(source.pipeline, source.session, asked.number, lambda _: None)
    assert done.state == "done", done.reason
    assert done.read == 0


def test_a_table_is_copied_followed_and_relieved_of_deleted_rows(new_lake: NewLake) -> None:
    with new_lake(FILLED, BY_CLOCK, query=QUERY) as source:
        copied(source)
        assert is_equal(source)
        source.execute("insert into t values (1000, 'new')")
        source.execute("update t set v = 'changed', updated_at = now() where id between 5 and 9")
        source.execute("delete from t where id > 290 and id < 1000")
        source.execute("update t set id = 2000, updated_at = now() where id = 20")
        source.catch_up()
        rows = dict(in_lake(source))
        assert (rows[1000], rows[5], rows[295], rows[2000]) == (
            "new",
            "changed",
            "old 295",
            "old 20",
        )
        assert 20 in rows, "its old key is removed with the deleted rows"

        source.execute("delete from t where id = 30")
        source.execute("insert into t values (30, 'again')")
        look_for_deletes(source)
        source.catch_up()
        assert is_equal(source)

        source.execute("alter table t add w int not null default 7")
        source.execute("update t set w = 8, updated_at = now() where id = 1")
        source.catch_up()
        assert in_lake(source, T, "id", "w") == source.execute("select id, w from t order by id")

        source.execute("truncate t")
        source.execute("insert into t values (1, 'after', now(), 9)")
        source.catch_up()
        look_for_deletes(source)
        assert is_equal(source)
        assert not source.execute(
            "select slot_name from pg_replication_slots where database = current_database()"
        )
        assert not source.execute("select pubname from pg_publication")


def test_deletes_are_found_while_a_transaction_lasts(new_lake: NewLake) -> None:
    """It has written, and hasn't ended: what was deleted since is gone all the same."""
    with new_lake(f"{FILLED} create table other (id int)", BY_CLOCK, query=QUERY) as source:
        copied(source)
        with source.pipeline.connect_source("client") as lasting:
            lasting.execute("begin; insert into public.other values (1)")
            source.execute("update t set v = 'changed', updated_at = now() where id < 10")
            source.catch_up()
            source.execute("delete from t where id < 5")
            source.execute("insert into t values (3, 'again')")
            look_for_deletes(source)
            source.catch_up()
            assert is_equal(source)


def test_what_commits_while_a_table_is_pinned_is_in_copy_or_log(new_lake: NewLake) -> None:
    """The pin waits for who began before its bound; a row of one that began later is polled."""
    with new_lake(FILLED, BY_CLOCK, query=QUERY) as source:
        before, after = (source.pipeline.connect_source("client") for _ in range(2))
        with before, after:
            before.execute("begin; insert into public.t values (1001, 'before the bound')")
            source.pins.prepare()
            source.pins.tick()
            assert source.row(T).state == TableState.WAITING
            after.execute("begin; insert into public.t values (1002, 'after the bound')")
            source.pins.tick()
            before.execute("commit")
            wait_for(lambda: pinned(source))
            source.copy()
            source.flush()
            after.execute("commit")
            source.catch_up()
        assert is_equal(source)
        mark_for_copy(source.pipeline, [T])
        source.execute("update t set v = 'again', updated_at = now()")
        copied(source)
        source.catch_up()
        assert is_equal(source)
        assert source.row(T).epoch == 2


def test_soft_delete_marks_what_is_gone_and_unmarks_what_comes_back(new_lake: NewLake) -> None:
    with new_lake(FILLED, BY_CLOCK | {"mode": "soft_delete"}, query=QUERY) as source:
        copied(source)
        source.execute("delete from t where id <= 3")
        source.catch_up()
        look_for_deletes(source)
        there = {i: (v, at) for i, v, at in in_lake(source, T, "id", "v", "_deleted_at")}
        assert [i for i, (_, at) in there.items() if at is not None] == [1, 2, 3]
        assert there[2][0] == "old 2"
        source.execute("insert into t values (2, 'back')")
        source.catch_up()
        there = {i: (v, at) for i, v, at in in_lake(source, T, "id", "v", "_deleted_at")}
        assert there[2] == ("back", None)


def test_deletes_are_due_once_in_a_while(new_lake: NewLake) -> None:
    with new_lake(FILLED, BY_CLOCK, query=QUERY) as source:
        copied(source)
        store = source.pipeline.store
        assert request_deletes(store, 3600) == 0, "it was copied just now"
        assert request_deletes(store, 0) == 1
        assert request_deletes(store, 0) == 0, "that one isn't over"
        [asked] = backfills(store, outstanding=True)
        assert asked.requested_by == DELETES
        source.execute("delete from t where id = 7")
        backfill(source.pipeline, source.session, asked.number, lambda _: None)
        assert is_equal(source)
        assert request_deletes(store, 3600) == 0
