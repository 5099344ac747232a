"""Copies of partitions and of children, into partitions and in one chunk."""

from __future__ import annotations

import pytest

from cdc_assets_tests.integration.snapshot.sources import LONG_PAIR, T
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark


def test_a_copy_into_partitions_is_clustered_and_appears_at_once(copied_lake: NewLake) -> None:
    setup = """
    create table t (id int primary key, day date not null, v text);
    insert into t select i, date '2024-01-01' + i % 10, 'v' || i from generate_series(1, 20000) i;
    """
    with copied_lake(
        setup,
        {"name": "t", "chunk_pages": 4, "partition_by": ["day(day)"]},
    ) as source:
        loaded = source.lake_table(T).load()
        assert loaded is not None
        assert loaded.metadata.format_version == 3
        files = loaded.scan().plan_files()
        assert len(list(files)) == 10, "one file a day, not one a chunk and day"
        source.execute("update t set day = date '2024-02-01' where id = 1")
        source.execute("delete from t where id = 2")
        source.catch_up()
        assert source.equal(T)


def test_partitions_of_the_source_are_one_table_in_the_lake(new_lake: NewLake) -> None:
    setup = """
    create table t (id int, region text, v text, primary key (id, region))
      partition by list (region);
    create table t_north partition of t for values in ('n');
    create table t_south (v text, region text not null, id int not null);
    alter table t attach partition t_south for values in ('s');
    create table t_other partition of t default partition by range (id);
    create table t_other_low partition of t_other for values from (0) to (1000);
    create table t_other_high partition of t_other for values from (1000) to (100000);
    create table t_empty partition of t for values in ('e');
    insert into t select i, (array['n', 's', 'x'])[1 + i % 3], 'v' || i
      from generate_series(1, 9000) i;
    """
    with new_lake(setup, {"name": "t", "chunk_pages": 4}) as source:
        source.pin()
        source.execute("update t set v = 'moved', region = 's' where id <= 300 and region = 'n'")
        source.copy()
        source.execute("create table t_west partition of t for values in ('w')")
        source.execute("insert into t values (20001, 'w', 'new partition')")
        source.catch_up()
        assert source.equal(T)
        assert source.verify()[0].equal


def test_inheritance_children_are_not_copied_with_their_parent(copied_lake: NewLake) -> None:
    setup = """
    create table t (id int primary key, v text); create table child () inherits (t);
    insert into t values (1, 'parent'); insert into child values (2, 'child');
    """
    table = {"name": "t", "only": True}
    with copied_lake(setup, table) as source:
        assert source.rows(T) == [(1, "parent")]


def test_a_partitioned_table_without_partitions_is_an_empty_table(copied_lake: NewLake) -> None:
    setup = "create table t (id int primary key) partition by range (id);"
    with copied_lake(setup, "t") as source:
        source.execute("create table t_low partition of t for values from (0) to (100)")
        source.execute("insert into t values (1)")
        source.catch_up()
        assert source.rows(T) == [(1,)]


def test_before_version_14_a_table_is_one_chunk(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.pins.taking.TID_RANGE_SCANS", 10**9)
    with new_lake(LONG_PAIR, {"name": "t", "chunk_pages": 1}) as source:
        source.pin()
        assert len(source.execute("select chunk from _pg2iceberg.snapshot_progress")) == 1
        source.copy()
        assert source.equal(T)
