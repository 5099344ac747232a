"""Where the SQL catalog's tables are made and found; what a trial leaves of it: nothing."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any, cast

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo
from pyiceberg.catalog import Catalog, load_catalog
from pyspark.sql import SparkSession
from sqlalchemy.engine import make_url

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.lake.catalog import place as catalog_place
from cdc_assets.lake.catalog.catalog import IDLE_SECONDS, open_catalog, shown, spark_settings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets.snapshot.coordinator import copy_tables
from cdc_assets.snapshot.landing import Landing
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import lake

COLUMNS = pa.schema([pa.field("id", pa.int32())])


def _config(dsn: str, **settings: Any) -> SourceConfig:
    given = {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "public.t"}], **settings}
    return parse_config(given, "test")


def _everything(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "select n.nspname, c.relname from pg_namespace n left join pg_class c"
            " on c.relnamespace = n.oid where n.nspname !~ '^pg_' order by 1, 2"
        ).fetchall()


def _rows(dsn: str, schema: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute(f"select table_name from {schema}.iceberg_tables".encode())
        return {str(row[0]) for row in found}


def _earlier(config: SourceConfig, dsn: str) -> Catalog:
    """As it was made before there was a schema for it."""
    uri = dsn.replace("postgresql://", "postgresql+psycopg://")
    return load_catalog("lake", type="sql", uri=uri, warehouse=config.warehouse)


def _with_password(uri: str, dsn: str) -> str:
    """What a person makes of the address that is shown."""
    password = make_url(dsn).password
    return make_url(uri).set(password=password).render_as_string(hide_password=False)


def test_a_table_of_the_catalogs_name_with_other_columns_is_none(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    dsn = postgres_dsn()
    with psycopg.connect(dsn) as connection:
        connection.execute("create table t (id int primary key)")
        connection.execute("create table iceberg_tables (id int, catalog_name int)")
    config = _config(dsn)
    assert {f.code for f in review(config) if f.severity == "error"} == set()
    assert catalog_place.catalog_schema(config) == config.state.schema_


def test_a_trial_leaves_nothing(postgres_dsn: NewDatabase, tmp_home: Path) -> None:
    dsn = postgres_dsn()
    with psycopg.connect(dsn) as connection:
        connection.execute("create table t (id int primary key)")
    config, before = _config(dsn), _everything(dsn)
    for _ in range(2):
        assert {f.code for f in review(config) if f.severity == "error"} == set()
        assert _everything(dsn) == before
    open_catalog(config).create_namespace("src")
    before = _everything(dsn)
    assert {f.code for f in review(config) if f.severity == "error"} == set()
    assert _everything(dsn) == before
    assert _rows(dsn, "_pg2iceberg") == set()


def test_the_catalog_is_made_in_a_schema_of_ours_and_anybody_can_open_it(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    dsn = postgres_dsn()
    config = _config(dsn)
    _earlier(config, dsn)  # without a table of ours it isn't ours
    catalog = open_catalog(config)
    catalog.create_namespace("src")
    catalog.create_table("src.t", COLUMNS)
    assert (_rows(dsn, "_pg2iceberg"), _rows(dsn, "public")) == ({"t"}, set())
    told = shown(config)
    assert told["schema"] == "_pg2iceberg"
    reader = load_catalog(
        told["name"],
        type=told["type"],
        uri=_with_password(told["uri"], dsn),
        warehouse=told["warehouse"],
    )
    assert reader.list_tables(told["namespace"]) == [("src", "t")]
    # An address that is configured is used as it is.
    configured = {"catalog": {"type": "sql", "uri": dsn, "warehouse": config.warehouse}}
    assert open_catalog(_config(dsn, lake=configured)).list_namespaces() == []


def test_a_catalog_of_an_earlier_version_is_found_and_can_be_moved(
    postgres_dsn: NewDatabase, tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dsn = postgres_dsn()
    with psycopg.connect(dsn) as connection:
        connection.execute("create table t (id int primary key)")
    config = _config(dsn)
    earlier = _earlier(config, dsn)
    earlier.create_namespace("src")
    earlier.create_table("src.t", COLUMNS)
    assert open_catalog(config).list_tables("src") == [("src", "t")]
    assert shown(config)["schema"] == "public"
    (found,) = (f for f in review(config) if f.code == "catalog_place")
    assert found.severity == "warning"
    with psycopg.connect(dsn) as connection:
        connection.execute("create schema _pg2iceberg")
        connection.execute(found.remedy.partition("then: ")[2].encode())
    catalog_place._found.cache_clear()  # in the next process
    assert open_catalog(config).list_tables("src") == [("src", "t")]
    assert shown(config)["schema"] == "_pg2iceberg"
    assert not any(f.code == "catalog_place" for f in review(config))


def test_another_sources_new_catalog_hides_no_earlier_one(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    config = _config(dsn := postgres_dsn())
    _earlier(config, dsn).create_namespace("src")
    _earlier(config, dsn).create_table("src.t", COLUMNS)
    open_catalog(other := _config(dsn, name="other")).create_namespace("other")
    assert (shown(config)["schema"], shown(other)["schema"]) == ("public", "_pg2iceberg")
    catalog_place._found.cache_clear()  # in the next process
    assert (shown(config)["schema"], shown(other)["schema"]) == ("public", "_pg2iceberg")
    assert open_catalog(config).list_tables("src") == [("src", "t")]


def test_a_catalog_of_an_earlier_role_is_named(postgres_dsn: NewDatabase, tmp_home: Path) -> None:
    dsn = postgres_dsn()
    role, former = (f"{name}_{secrets.token_hex(4)}" for name in ("now", "former"))
    uri = make_url(dsn).set(username=role, password="x").render_as_string(hide_password=False)
    config = _config(uri)
    _earlier(config, dsn).create_namespace("src")
    _earlier(config, dsn).create_table("src.t", COLUMNS)
    with psycopg.connect(dsn, autocommit=True) as connection:
        database = connection.info.dbname
        for statement in (
            f"create role {role} login password 'x'",
            f"create role {former}",
            f"grant create on database {database} to {role}",
            f"grant usage, create on schema public to {former}, {role}",
            f"alter table iceberg_tables owner to {former}",
            f"alter table iceberg_namespace_properties owner to {former}",
        ):
            connection.execute(statement.encode())
        try:
            (found,) = (f for f in review(config) if f.code == "catalog_passed_over")
            assert (found.severity, former in found.message) == ("warning", True)
            remedy = found.remedy.partition(": ")[2].partition(" If not")[0]
            connection.execute(remedy.encode())
            catalog_place._found.cache_clear()  # in the next process
            assert open_catalog(config).list_tables("src") == [("src", "t")]
            assert not any(f.code == "catalog_passed_over" for f in review(config))
        finally:
            connection.execute(f"drop owned by {role}, {former} cascade".encode())
            connection.execute(f"drop role {role}".encode())
            connection.execute(f"drop role {former}".encode())


@pytest.mark.spark
def test_spark_finds_ours_beside_anothers(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    """Iceberg's JDBC catalog doesn't make its tables where any schema has some of that name."""
    dsn = postgres_dsn()
    _earlier(_config(dsn), dsn)
    setup = "create table t (id int primary key, v text); insert into t values (1, 'a')"
    with lake(dsn, spark_server.ensure(), setup, "t", snapshot={"mode": "never"}) as source:
        source.pin()
        source.execute("insert into t values (2, 'b')")
        source.flush()
        source.drain(TableId("public", "t"))
        assert source.rows(TableId("public", "t")) == [(2, "b")]
    assert (_rows(dsn, "_pg2iceberg"), _rows(dsn, "public")) == ({"t"}, set())


def test_a_table_that_a_restored_catalog_leads_nowhere_is_named_and_copied_anew(
    postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    config, no_spark = _config(dsn := postgres_dsn()), cast(SparkSession, None)
    with psycopg.connect(dsn, autocommit=True) as source, Pipeline.open(config) as pipeline:
        source.execute("create table t (id int primary key); insert into t values (1)")
        pins, [table] = Pins(pipeline), [config.tables[0].id]

        def opened() -> Landing:
            pins.prepare()
            pins.tick()
            row = pipeline.store.table(table)
            assert row is not None
            landing = Landing(config, pipeline.store, row)
            landing.open()
            return landing

        shutil.rmtree(tmp_home / "src" / "warehouse" / "src" / opened().lake.name / "metadata")
        problem = copy_tables(pipeline, no_spark, [table])[table]
        assert "metadata.json" in problem.what
        source.execute(problem.remedy.partition("for good: ")[2].partition(";")[0].encode())
        mark_for_copy(pipeline, [table])
        assert opened().lake.load() is not None
        pins.close()


@pytest.mark.parametrize("given", ["", "-c idle_session_timeout=10min"])
def test_sparks_idle_connections_end_as_the_address_says(
    given: str, postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    dsn = make_conninfo(postgres_dsn(), options=given)
    config = _config(dsn, lake={"catalog": {"uri": dsn}})
    options = spark_settings(config)["spark.sql.catalog.lake.jdbc.options"]
    assert (f"idle_session_timeout={IDLE_SECONDS}s" in options) == (not given)
    assert given in options
