"""A copy's place in the lake that another table has."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.maintenance.run import maintain
from cdc_assets.snapshot.landing import Landing
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import LONG_PAIR, T
from cdc_assets_tests.support.lake import NewLake, copied, lake

pytestmark = pytest.mark.spark


def test_a_lake_table_of_somebody_else_is_left_alone(new_lake: NewLake) -> None:
    with new_lake(LONG_PAIR, "t") as source:
        open_catalog(source.config).create_namespace("src")
        source.session.sql("create table lake.src.t (mine int) using iceberg")
        source.session.sql("insert into lake.src.t values (1)")
        source.pin()
        with pytest.raises(TableProblem, match="wasn't made from it"):
            source.copy()
        assert source.rows(T) == [(1,)]


def test_a_table_that_takes_anothers_place_in_the_lake_is_refused(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = LONG_PAIR + "create schema other; create table other.t (id int primary key, v text);"
    dsn = postgres_dsn()
    with copied(dsn, spark_server.ensure(), setup, "t"):
        pass
    with lake(dsn, spark_server.ensure(), "select 1", "other.t") as source:
        source.pin()
        with pytest.raises(TableProblem, match="wasn't made from it"):
            source.copy()


def test_a_copy_under_way_of_another_table_is_left_alone(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    """Which is called as a copy of this one would be, by another source of the same namespace."""
    catalog = {"uri": postgres_dsn(), "warehouse": f"file://{tmp_home}/warehouse"}
    url, shared = spark_server.ensure(), {"catalog": catalog, "namespace": "both"}
    called = {"name": "t", "as": "t__copy_1"}
    with lake(postgres_dsn(), url, LONG_PAIR, called, name="other", lake=shared) as other:
        other.pin()
        Landing(other.config, other.pipeline.store, other.row(T)).open()
        with copied(postgres_dsn(), url, LONG_PAIR, "t", lake=shared) as source:
            there = open_catalog(source.config).list_tables("both")
            assert sorted(there) == [("both", "t"), ("both", "t__copy_1")]
            assert list(maintain(source.pipeline, lambda: source.session, [T]))
            assert sorted(open_catalog(source.config).list_tables("both")) == sorted(there)
        other.copy()
        other.flush()
        assert [one.equal for one in other.verify()] == [True]
