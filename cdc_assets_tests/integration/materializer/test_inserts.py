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
create table o (id int primary key, v text) partition by range (id);
create table o1 partition of o for values from (0) to (100);
insert into o values (1, 'copied');
create table f (id int primary key, v text);
alter table f replica identity full;
insert into f values (1, 'old'), (2, 'copied');
"""
T, P, ONE, F = (TableId("public", name) for name in "tpof")
# Without its key for a moment: two rows have key 1 at once.
TWICE = """
alter table {0} drop constraint {0}_pkey;
insert into {0} values (1, 'new'); delete from {0} where v = 'old';
update {0} set v = 'newer' where id = 1;
alter table {0} add primary key (id);
"""


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "t", "p", "o", "f") as opened:
        opened.execute("update t set v = 'changed'; update p set v = 'changed' where id = 1")
        opened.execute("update o set v = 'changed'; update f set v = 'changed' where id = 2")
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

    assert [others(table) for table in (T, F, P, ONE)] == [False, False, True, True]
    source.session.sql("insert into lake.src.t values (9, 'foreign')")
    assert others(T)


def test_where_the_stream_does_not_tell_the_key_inserts_replace_rows(source: Lake) -> None:
    source.execute(f"begin; {TWICE.format('f')} commit")
    source.catch_up(F)
    assert source.equal(F)
    source.execute("update t set v = 'old' where id = 1")
    source.catch_up(T)
    source.execute(
        f"begin; alter table t replica identity full; {TWICE.format('t')}"
        " alter table t replica identity default; commit"
    )
    source.catch_up(T)
    assert source.equal(T)
