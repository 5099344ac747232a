"""Lake tables have the names and namespaces that the configuration gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyiceberg.exceptions import ForbiddenError

from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.maintenance.run import maintain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, NewLake, copied

pytestmark = pytest.mark.spark

T, U = TableId("public", "t"), TableId("public", "u")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 9) i; create table u (id int primary key); insert into u values (1)"
)


def _used(source: Lake) -> None:
    """Changed, merged, cared for, copied anew, and equal."""
    source.execute("update t set v = 'y' where id > 3; delete from t where id = 1")
    source.catch_up()
    mark_for_copy(source.pipeline, [T])
    source.pin()
    source.copy()
    source.execute("update t set v = 'z' where id = 5")
    source.catch_up()
    done = list(maintain(source.pipeline, lambda: source.session, source.tables))
    assert [one.problem for one in done] == [None] * len(source.tables)
    assert [one.equal for one in source.verify()] == [True] * len(source.tables)


def test_a_table_lives_in_a_namespace_of_its_own(copied_lake: NewLake) -> None:
    tables = {"name": "t", "namespace": "mart", "as": "Things"}, "u"
    with copied_lake(SETUP, *tables) as source:
        catalog = open_catalog(source.config)
        assert catalog.list_tables("mart") == [("mart", "Things")]
        assert catalog.list_tables("src") == [("src", "u")]
        _used(source)
        place = Path(catalog.load_table(("mart", "Things")).location().removeprefix("file:"))
        assert list(place.rglob("*.parquet"))
        assert "lake_table_gone" not in {f.code for f in review(source.config)}
        moved = source.config.tables[0].model_copy(update={"namespace": None})
        away = source.config.model_copy(update={"tables": (moved,)})
        found = {finding.code: finding for finding in review(away)}["lake_table_gone"]
        assert "its lake table is called mart.Things" in found.message
        left = source.config.model_copy(update={"tables": source.config.tables[1:]})
        with Pipeline.open(left) as pipeline:
            assert drop_table(pipeline, T, purge=True).purged == ("lake.`mart`.`Things`",)
        assert not list(place.rglob("*.parquet"))


def test_two_sources_of_one_form_share_a_namespace(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    catalog = {"uri": postgres_dsn(), "warehouse": f"file://{tmp_home}/warehouse"}
    url = spark_server.ensure()

    def shard(name: str) -> dict[str, Any]:
        lake = {"catalog": catalog, "namespace": "all", "prefix": f"{name}_"}
        return {"name": name, "lake": lake}

    with (
        copied(postgres_dsn(), url, SETUP, "t", "u", **shard("eu")) as one,
        copied(postgres_dsn(), url, SETUP, "t", "u", **shard("us")) as other,
    ):
        other.execute("delete from u")
        _used(one)
        _used(other)
        there = {name for _, name in open_catalog(one.config).list_tables("all")}
        assert there == {"eu_t", "eu_u", "us_t", "us_u"}
        with Pipeline.open(one.config.model_copy(update={"tables": one.config.tables[1:]})) as left:
            assert drop_table(left, T, purge=True).purged == ("lake.`all`.`eu_t`",)
        assert [one.equal for one in other.verify()] == [True, True]


@pytest.mark.parametrize("hidden", ["list_namespaces", "list_tables", "load_table"])
def test_what_the_catalog_does_not_show_us_keeps_nothing_of_ours_from_being_seen(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    with copied_lake(SETUP, "t", "u") as source:
        catalog = open_catalog(source.config)
        catalog.create_namespace("finance")
        source.session.sql("create table lake.finance.x (a int) using iceberg")
        shown = getattr(type(catalog), hidden)

        def show(self: Any, *place: Any) -> Any:
            if not place or "finance" in place[0]:
                raise ForbiddenError("finance isn't yours")
            return shown(self, *place)

        monkeypatch.setattr(type(catalog), hidden, show)
        moved = source.config.tables[0].model_copy(update={"as_": "other"})
        away = source.config.model_copy(update={"tables": (moved,)})
        found = {finding.code: finding for finding in review(away)}["lake_table_gone"]
        assert "its lake table is called src.t" in found.message
        left = source.config.model_copy(update={"tables": source.config.tables[1:]})
        with Pipeline.open(left) as pipeline:
            assert drop_table(pipeline, T).purged == ()
            assert drop_table(pipeline, T, purge=True).purged == ("lake.`src`.`t`",)
