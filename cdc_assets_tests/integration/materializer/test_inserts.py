"""A batch of inserts alone deletes nothing, where surely none of its keys has a row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_assets.lake.standing import may_hold_others
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, v text);
insert into t values (1, 'copied');
create table p (id int primary key, v text) partition by range (id);
create table p1 partition of p for values from (0) to (100);
create table p2 partition of p for values from (100) to (200);
insert into p values (1, 'copied'), (101, 'copied');
"""
T, P = TableId("public", "t"), TableId("public", "p")


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "t", "p") as opened:
        opened.execute("update t set v = 'changed'; update p set v = 'changed' where id = 1")
        opened.catch_up()  # the first merge upgrades the table
        yield opened


def commits(source: Lake, table: TableId, statement: str) -> int:
    """How many commits the merge of a statement's changes takes."""
    source.execute(statement)
    before = source.snapshots(table)
    source.catch_up(table)
    assert source.equal(table)
    return source.snapshots(table) - before


def test_inserts_delete_nothing_but_where_rows_may_be_that_the_log_knows_nothing_of(
    source: Lake,
) -> None:
    assert commits(source, T, "insert into t values (2, 'new'), (3, 'new')") == 1
    assert commits(source, T, "insert into t values (4, 'a'); delete from t where id = 4") == 1
    mixed = "insert into t values (5, 'a'); update t set v = v || '!' where id in (2, 5)"
    assert commits(source, T, f"{mixed}; update t set id = 6 where id = 5") == 2
    assert commits(source, T, "delete from t where id = 6; insert into t values (6, 'b')") == 2
    # A partition may be emptied without a word in the log, and its keys inserted again.
    assert commits(source, P, "insert into p values (2, 'new')") == 2


def test_where_somebody_else_wrote_rows_inserts_replace_them(source: Lake) -> None:
    def others(table: TableId) -> bool:
        lake = source.lake_table(table)
        return may_hold_others(source.pipeline.store, lake, lake.state(), lake.loaded())

    assert (others(T), others(P)) == (False, True)
    source.session.sql("insert into lake.src.t values (9, 'foreign')")
    assert others(T)
