"""Maintenance on a real lake: rows stay, files go, whoever else works and wherever it dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.maintenance.run import Maintained, maintain
from cdc_assets.postgres.names import TableId
from cdc_assets.spark.server import SparkServer
from cdc_assets.spark.tables import OFFSET
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.lake_support import Lake, lake

pytestmark = pytest.mark.spark

M, P = TableId("public", "m"), TableId("public", "p")
SETUP = """
create table m (id int primary key, v text);
insert into m select i, 'v' || i from generate_series(1, 400) i;
create table p (id int primary key, part int not null, v text);
insert into p select i, i % 3, 'v' || i from generate_series(1, 300) i;
"""
TABLES = ("m", {"name": "p", "partition_by": ["part"]})


def opened(
    dsn: str, server: SparkServer, tables: tuple[Any, ...] = TABLES, **maintenance: Any
) -> Any:
    settings = {"maintenance": maintenance} if maintenance else {}
    return lake(dsn, server.ensure(), SETUP, *tables, **settings)


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> Iterator[Lake]:
    with opened(postgres_dsn(), spark_server) as found:
        found.pin()
        found.copy()
        yield found


def cycles(source: Lake, number: int, first: int = 0) -> None:
    """So many merges of inserts, updates and deletes."""
    for i in range(first, first + number):
        source.execute(f"insert into m values ({1000 + i}, 'new')")
        source.execute(f"update m set v = 'c{i}' where id % 7 = {i % 7}")
        source.execute(f"delete from m where id % 41 = {i % 41}")
        source.execute(f"update p set part = (part + 1) % 3, v = 'c{i}' where id % 11 = {i % 11}")
        source.flush()
        source.drain_all()


def maintained(source: Lake, *tables: TableId, **options: Any) -> dict[TableId, Maintained]:
    done = maintain(source.pipeline, lambda: source.session, tables or source.tables, **options)
    return {found.table: found for found in done}


def equals_the_source(source: Lake) -> None:
    for table in source.tables:
        assert source.rows(table) == sorted(source.execute(f"select * from {table}"), key=repr)


def newest_summary(source: Lake, table: TableId) -> dict[str, str]:
    loaded = source.lake_table(table).load()
    assert loaded is not None
    current = loaded.current_snapshot()
    assert current is not None and current.summary is not None
    return dict(current.summary.additional_properties)


def test_invariants_7_and_9_compaction_keeps_rows_keys_and_the_cursor(source: Lake) -> None:
    cycles(source, 6)
    before = {table: source.lake_table(table).state().cursor for table in source.tables}
    done = maintained(source)
    for table in (M, P):
        assert done[table].problem is None
        assert done[table].compacted.rewritten_files >= 6
        assert done[table].compacted.applied_deletes > 0
        assert done[table].deleted_rows == 0
        assert OFFSET in newest_summary(source, table)
        assert source.lake_table(table).state().cursor == before[table]
    assert done[M].data_files == 1
    assert done[P].data_files == 3  # one a partition
    equals_the_source(source)
    cycles(source, 1, first=6)
    equals_the_source(source)
