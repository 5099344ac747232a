"""A lost reply to a commit of the lake table costs no row, and none is there twice.

Iceberg takes such a commit for a failed one, and may delete the files of a snapshot that landed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
from pyspark.errors import PySparkException

from cdc_assets.errors import EnvironmentProblem, Fenced
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.sql import listed
from cdc_assets.lake.tables import COPYING, RETRIES
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import T
from cdc_assets_tests.support.lake import Lake, lake
from cdc_assets_tests.support.lost_reply import LosingLine

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("tmp_home")]

SETUP = """
create table t (id int primary key, v text);
insert into t select i, 'v' from generate_series(1, 300) i;
"""


@contextmanager
def losing(
    postgres_dsn: NewDatabase, spark_server: SparkServer, **settings: Any
) -> Iterator[tuple[Lake, LosingLine]]:
    """A source whose catalog is reached by a line that can lose replies."""
    dsn, tables = postgres_dsn(), [{"name": "t", **settings.pop("table", {})}]
    with LosingLine(dsn) as line:
        settings |= {"lake": {"catalog": {"type": "sql", "uri": line.dsn}}}
        with lake(dsn, spark_server.ensure(), SETUP, *tables, **settings) as source:
            yield source, line


def goes_on(source: Lake) -> None:
    """The copy is there, and merges follow it."""
    assert source.row(T).state == "streaming"
    assert source.equal(T)
    source.execute("update t set v = 'n' where id % 5 = 0; delete from t where id = 7")
    source.catch_up()
    assert source.equal(T)


def written_again(source: Lake, line: LosingLine, write: Callable[[], object]) -> None:
    """A reply is lost while it is written; done once more, it is as if none had been."""
    with suppress(PySparkException, EnvironmentProblem):
        write()
    assert line.lost == 1
    write()
    goes_on(source)


def to_be_copied_again(source: Lake, change: str) -> None:
    """Copy and follow the table, change it, and have it pinned for another copy."""
    source.pin()
    source.copy()
    source.execute("insert into t values (1000, 'x')")
    source.catch_up()
    source.execute(change)
    restart_copy(source.pipeline.store, source.row(T))
    source.pin()


def test_a_table_that_is_created_with_its_copy(
    postgres_dsn: NewDatabase, spark_server: SparkServer
) -> None:
    table = {"partition_by": ["bucket(2, id)"]}
    with losing(postgres_dsn, spark_server, table=table) as (source, line):
        source.pin()
        line.lose_reply("t")
        with pytest.raises(Fenced):
            source.copy()
        assert line.lost == 1
        source.copy()
        goes_on(source)


# As earlier versions left a table, Iceberg doesn't try a commit of it again.
@pytest.mark.parametrize(
    "properties",
    [{RETRIES: "0"}, {RETRIES: "0", COPYING: ""}, {}],
    ids=["whole", "half made", "tried again"],
)
def test_a_table_that_is_replaced_by_its_copy(
    postgres_dsn: NewDatabase, spark_server: SparkServer, properties: dict[str, str]
) -> None:
    with losing(postgres_dsn, spark_server) as (source, line):
        to_be_copied_again(source, "alter table t add w int default 7")
        if properties:
            name = source.lake_table(T).sql_name
            source.session.sql(f"alter table {name} set tblproperties ({listed(properties)})")
        line.lose_reply("t")
        with pytest.raises(PySparkException) if properties else nullcontext():
            source.copy()
        assert line.lost == 1
        source.copy()
        goes_on(source)


@pytest.mark.parametrize("after", range(3), ids=["draft", "rows", "publishing"])
def test_a_table_whose_rows_are_overwritten_by_its_copy(
    postgres_dsn: NewDatabase, spark_server: SparkServer, after: int
) -> None:
    with losing(postgres_dsn, spark_server) as (source, line):
        to_be_copied_again(source, "delete from t where id = 8")
        line.lose_reply("t", after=after)
        written_again(source, line, source.copy)


@pytest.mark.parametrize(
    "after", range(6), ids=["created", "snapshot", "mark", "draft", "rows", "publishing"]
)
def test_a_table_that_begins_without_a_copy(
    postgres_dsn: NewDatabase, spark_server: SparkServer, after: int
) -> None:
    settings = {"snapshot": {"mode": "never"}}
    with losing(postgres_dsn, spark_server, **settings) as (source, line):
        source.execute("delete from t")
        source.pin()
        source.execute("insert into t values (1, 'x')")
        source.flush()
        line.lose_reply("t", after=after)
        written_again(source, line, lambda: source.drain(T))
