"""Spark and pyiceberg read the same rows, of both format versions, which are those of the source.

pyiceberg 0.12 reads manifests of version 3 as if they were of version 2, where a deletion vector
doesn't name its data file: a planned task lists the puffin files of its whole partition. Its read
is right all the same, because it takes each vector's data file from the puffin file itself, where
a vector that a newer one replaced is a part of the newer one. The test would notice an end of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyiceberg.table import Table

from cdc_assets.maintenance.files import live_files
from cdc_assets.operations.running import Spark
from cdc_assets.operations.whole import maintain
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

PLAIN, PARTS = TableId("public", "plain"), TableId("public", "parts")
SETUP = """
create table plain (id int primary key, v text);
create table parts (id int primary key, v text);
insert into plain select i, 'copied' from generate_series(1, 200) i;
insert into parts select i, 'copied' from generate_series(1, 200) i;
"""
TABLES: list[Any] = ["plain", {"name": "parts", "partition_by": ["bucket(3, id)"]}]


@pytest.fixture(params=[3, 2], ids="format-v{}".format)
def source(request: pytest.FixtureRequest, copied_lake: NewLake) -> Iterator[Lake]:
    settings: dict[str, Any] = {
        "lake": {"format_version": request.param},
        "maintenance": {"min_input_files": 2},
    }
    with copied_lake(SETUP, *TABLES, **settings) as opened:
        yield opened


def _both(source: Lake, statement: str) -> None:
    """Do it to both tables in one batch each, and merge it."""
    for table in (PLAIN, PARTS):
        source.execute(statement.format(table))
    source.catch_up()


def _loaded(source: Lake, table: TableId) -> Table:
    found = source.lake_table(table).load()
    assert found is not None
    return found


def _same(source: Lake, table: TableId) -> None:
    """The whole table, parts of it, its count, and its snapshot before the last."""
    loaded, name = _loaded(source, table), source.lake_table(table).sql_name
    expected = sorted(source.execute(f"select id, v from {table}"))
    assert _rows(loaded.scan()) == sorted(source.rows(table)) == expected
    assert loaded.scan().count() == len(expected)
    assert _rows(loaded.scan("id < 40")) == [row for row in expected if row[0] < 40]
    assert _rows(loaded.scan("v = 'again'")) == [row for row in expected if row[1] == "again"]
    version = loaded.metadata.snapshots[-2].snapshot_id
    then = source.session.sql(f"select id, v from {name} version as of {version}").collect()
    assert _rows(loaded.scan(snapshot_id=version)) == sorted(map(tuple, then))


def _rows(scan: Any) -> list[tuple[Any, ...]]:
    return sorted((row["id"], row["v"]) for row in scan.to_arrow().to_pylist())


def test_spark_and_pyiceberg_read_the_same_rows(
    source: Lake, request: pytest.FixtureRequest
) -> None:
    for start in (1000, 2000):  # data files of different ages
        _both(
            source,
            f"insert into {{}} select i, 'new' from generate_series({start}, {start + 60}) i",
        )
    # Of every file some rows: several vectors in a puffin file. Then others of some of them, so
    # that a puffin file has vectors that are replaced beside such that aren't.
    _both(source, "update {} set v = 'changed' where id % 5 = 0")
    _both(source, "delete from {} where id % 7 = 0 and id < 2000")
    _both(source, "update {} set v = 'again' where id % 11 = 0 and id > 1000")
    for table in (PLAIN, PARTS):
        loaded = _loaded(source, table)
        snapshot = loaded.current_snapshot()
        assert snapshot is not None
        hidden = [file for file in live_files(loaded, snapshot) if file.deleted]
        planned = list(loaded.scan().plan_files())
        puffins = {file.file_path for task in planned for file in task.delete_files}
        if source.config.lake.format_version == 3:
            assert 1 < len(puffins) < len(hidden), "no puffin file has several vectors"
            listed = sum(len(task.delete_files) for task in planned)
            assert listed > len(hidden), "pyiceberg knows now whose vectors are whose"
        else:
            assert not hidden
            assert not puffins
        _same(source, table)
    with Spark(source.config) as spark:
        maintain(source.pipeline, spark, [PLAIN, PARTS], lambda _: None)
    _both(source, "delete from {} where id % 13 = 0")
    for table in (PLAIN, PARTS):
        _same(source, table)
