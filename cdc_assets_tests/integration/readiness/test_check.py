"""Every finding of ``check`` that isn't the restart record's, provoked on real servers."""

from __future__ import annotations

import importlib.metadata
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.checks.ready import NAME, check_ready
from cdc_assets.dagster.names import all_tables
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import CoordinationError
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.store import LogStore
from cdc_assets.messages.findings import Finding
from cdc_assets.observe.status import collect
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness import surroundings as readiness
from cdc_assets.readiness.source import left as left_findings
from cdc_assets.readiness.source import server as preflight
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.s3 import ObjectStore
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(300)


def config_of(dsn: str, *tables: Any, **settings: Any) -> SourceConfig:
    listed = [{"name": t} if isinstance(t, str) else t for t in tables or ("t",)]
    return parse_config(
        {"name": "src", "postgres": {"dsn": dsn}, "tables": listed, **settings}, "test"
    )


def found(config: SourceConfig) -> dict[str, Finding]:
    return {finding.code: finding for finding in readiness.review(config)}


def errors(config: SourceConfig) -> set[str]:
    return {f.code for f in readiness.review(config) if f.severity == "error"}


@pytest.fixture
def ready(postgres_dsn: NewDatabase, tmp_home: Path) -> str:
    """A source that lacks nothing."""
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute("create table t (id int primary key, v text)")
    return dsn


def test_where_nothing_is_missing_nothing_is_found_and_nothing_is_left(
    ready: str, spark_server: SparkServer, tmp_home: Path
) -> None:
    config = config_of(ready, spark={"remote": spark_server.ensure()})
    assert errors(config) == set()
    with psycopg.connect(ready, autocommit=True) as source:
        made = source.execute("select relname from pg_class where relname ~ '^iceberg_'")
        assert made.fetchall() == []
        query = "select count(*) from pg_replication_slots where database = current_database()"
        assert source.execute(query).fetchone() == (0,)
        assert source.execute("select to_regnamespace('_pg2iceberg')").fetchone() == (None,)
    assert [path for path in tmp_home.rglob("*") if "src" in path.parts] == []


def test_a_server_that_is_not_prepared(public_directory: Path, tmp_home: Path) -> None:
    settings = {
        "wal_level": "replica",
        "max_replication_slots": "1",
        "max_wal_senders": "0",
        "fsync": "off",
    }
    with EmbeddedPostgres(public_directory / "unprepared", settings=settings) as server:
        dsn = server.dsn()
        assert dsn is not None
        named = found(config_of(dsn))
        codes = {"wal_level", "slots_exhausted", "senders_exhausted", "table_missing"}
        assert {code for code, f in named.items() if f.severity == "error"} == codes
        assert named["wal_unbounded"].severity == "warning"
        assert "alter system set wal_level = logical" in named["wal_level"].remedy


def test_a_slot_that_is_about_to_lose_its_wal(public_directory: Path, tmp_home: Path) -> None:
    settings = {"max_slot_wal_keep_size": "64MB", "max_replication_slots": "1", "fsync": "off"}
    with EmbeddedPostgres(public_directory / "headroom", settings=settings) as server:
        dsn = server.dsn()
        assert dsn is not None
        with psycopg.connect(dsn, autocommit=True) as source:
            source.execute("create table t (id int primary key)")
            source.execute("select pg_create_logical_replication_slot('cdc_src', 'pgoutput')")
            named = found(config_of(dsn))
            assert "slot_headroom" not in named
            assert named["slots_exhausted"].severity == "error"  # no table has its pin yet
            for number in range(3):
                source.execute("select pg_logical_emit_message(false, 'x', %s::text)", ("y",))
                source.execute("select pg_switch_wal()")
                source.execute("insert into t values (%s)", (number,))
            assert "max_slot_wal_keep_size" in found(config_of(dsn))["slot_headroom"].remedy


def test_what_a_table_and_a_source_have_left_is_named(
    ready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "_spark", lambda _: [])
    with psycopg.connect(ready, autocommit=True) as source:
        source.execute("create table u (id int primary key)")
        with Pipeline.open(config_of(ready, "t", "u")) as pipeline:
            pins = Pins(pipeline)
            pins.prepare()
            pins.close()
        fewer, renamed = config_of(ready, "t"), config_of(ready, "t", "u", name="renamed")
        assert "public.u isn't in the configuration" in found(fewer)["table_left"].message
        with Pipeline.open(fewer) as pipeline:
            assert collect(pipeline).left == ("public.u",)
            pipeline.store.park(TableId("public", "t"), "where was wrong")
        said = found(fewer)["table_parked"]
        assert said.message.endswith(": where was wrong") and "resync public.t" in said.remedy
        source.execute(found(fewer)["table_left"].remedy.split(";")[0].encode())
        assert {"table_left", "slot_unread"}.isdisjoint(found(fewer))
        with Pipeline.open(fewer) as pipeline:
            assert collect(pipeline).left == ()

        assert found(renamed)["slot_unread"].severity == "info"
        monkeypatch.setattr(left_findings, "UNREAD_BYTES", 0)
        assert found(renamed)["slot_unread"].severity == "warning"
        source.execute(found(renamed)["slot_unread"].remedy.encode())
        assert "slot_unread" not in found(renamed)


def test_transactions_that_hold_up_a_slot(ready: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LONG_TRANSACTION_SECONDS", 0.0)
    with psycopg.connect(ready) as writer:
        writer.execute("insert into t values (1)")
        named = found(config_of(ready))["long_transactions"]
        assert f"process {writer.info.backend_pid}" in named.message
        writer.rollback()
        writer.execute("insert into t values (1); prepare transaction 'it''s prepared'")
        try:
            assert "'it''s prepared'" in found(config_of(ready))["long_transactions"].message
        finally:
            writer.commit()
            writer.autocommit = True
            writer.execute("rollback prepared 'it''s prepared'")
    assert "long_transactions" not in found(config_of(ready))


def test_a_role_without_rights(ready: str) -> None:
    with psycopg.connect(ready, autocommit=True) as owner:
        owner.execute("drop role if exists poor; create role poor login password 'p'")
        owner.execute("alter table t enable row level security")
        try:
            poor = make_conninfo(ready, user="poor", password="p")
            codes = {"replication_privilege", "coordination_schema", "select_privilege"}
            assert codes <= errors(config_of(poor))
            assert "publication_privilege" in found(config_of(poor))
            owner.execute("grant select on t to poor")
            assert "row_security" in errors(config_of(poor))
            # As on RDS, where this is all that a role can be given.
            owner.execute("create role rds_replication; grant rds_replication to poor")
            assert "replication_privilege" not in found(config_of(poor))
        finally:
            owner.execute("drop owned by poor; drop role poor")
            owner.execute("drop role if exists rds_replication")


@pytest.mark.parametrize("made", ["nothing", "an empty schema", "an older one", "the newest"])
def test_a_coordination_schema_that_the_role_may_not_use(ready: str, made: str) -> None:
    """The log can be opened exactly when nothing is found, and the remedy is the way there."""
    with psycopg.connect(ready, autocommit=True) as owner:
        owner.execute("drop role if exists poor; create role poor login password 'p' replication")
        if made != "nothing":
            owner.execute("create schema _pg2iceberg")
        if made in ("an older one", "the newest"):
            LogStore.open(ready, "src", "_pg2iceberg").close()
        if made == "an older one":
            owner.execute(
                "delete from _pg2iceberg.schema_version where version > 1;"
                " grant usage, create on schema _pg2iceberg to poor;"
                " grant select on all tables in schema _pg2iceberg to poor"
            )
        try:
            poor = make_conninfo(ready, user="poor", password="p")
            finding = found(config_of(poor))["coordination_schema"]
            with pytest.raises(CoordinationError):
                LogStore.open(poor, "src", "_pg2iceberg")
            owner.execute(finding.remedy.encode())
            assert "coordination_schema" not in found(config_of(poor))
            if made != "an older one":  # whose tables are in truth the newest
                LogStore.open(poor, "src", "_pg2iceberg").close()
        finally:
            owner.execute("drop owned by poor cascade; drop role poor")


def test_a_coordination_database_that_takes_no_writes(ready: str) -> None:
    read_only = make_conninfo(ready, options="-c default_transaction_read_only=on")
    config = config_of(ready, state={"postgres_url": read_only})
    assert "coordination_read_only" in errors(config)


def test_tables_that_cannot_be_followed(ready: str) -> None:
    with psycopg.connect(ready, autocommit=True) as source:
        source.execute(
            "create view v as select * from t; create unlogged table u (id int primary key);"
            " create foreign data wrapper w; create server s foreign data wrapper w;"
            " create foreign table f (id int) server s;"
            " create table n (v text); create table g (id int primary key, d int generated always"
            " as (id * 2) virtual); create table p (id int primary key, secret text)"
        )
    names: list[Any] = ["v", "u", "f", "n", "g", "public.gone"]
    excluding = {"name": "p", "columns": {"exclude": ["id", "no_such"]}}
    config = config_of(ready, *names, excluding)
    named = readiness.review(config)
    by_table: dict[str, set[str]] = {}
    for finding in named:
        if finding.table is not None:
            by_table.setdefault(finding.table, set()).add(finding.code)
    assert by_table["public.v"] == {"table_missing"}
    assert by_table["public.f"] == {"table_missing"}
    assert by_table["public.gone"] == {"table_missing"}
    assert by_table["public.u"] == {"table_unlogged"}
    assert by_table["public.n"] == {"replica_identity"}
    assert by_table["public.g"] == {"generated_columns"}
    assert by_table["public.p"] >= {"column_missing", "key_excluded"}
    # The same in the UI, each table with its own.
    names_of = {names.table.name: names for names in all_tables(config)}
    unlogged = check_ready(named, names_of["u"])
    assert not unlogged.passed
    assert "table_unlogged" in str(unlogged.metadata["findings"].value)
    assert "table_missing" not in str(unlogged.metadata["findings"].value)


def test_large_values_that_an_update_leaves_out(ready: str) -> None:
    assert found(config_of(ready))["toast_columns"].severity == "info"
    append = config_of(ready, {"name": "t", "mode": "append"})
    assert found(append)["toast_columns"].severity == "warning"
    with psycopg.connect(ready, autocommit=True) as source:
        source.execute("alter table t replica identity full")
    assert "toast_columns" not in found(append)


def test_a_publication_that_leaves_something_out(ready: str) -> None:
    with psycopg.connect(ready, autocommit=True) as source:
        source.execute("create publication cdc_src for table t where (id > 0)")
    assert "row filter" in found(config_of(ready))["table_partial"].message


def test_a_pooler_in_between(ready: str, public_directory: Path, unused_port: int) -> None:
    command = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if command is None:
        pytest.skip("pgbouncer isn't installed")
    params = psycopg.conninfo.conninfo_to_dict(ready)
    folder = public_directory / "pooler"  # it doesn't run as root
    folder.mkdir()
    (folder / "users").write_text(f'"{params["user"]}" "{params.get("password", "")}"\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={params['port']}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {unused_port}\npool_mode = transaction\n"
        f"auth_type = plain\nauth_file = {folder}/users\nuser = nobody\nunix_socket_dir =\n"
        "ignore_startup_parameters = extra_float_digits,options\ndefault_pool_size = 4\n"
    )
    pooler = subprocess.Popen([command, str(folder / "pgbouncer.ini")])
    try:
        dsn = make_conninfo(ready, host="127.0.0.1", port=unused_port)
        wait_for(lambda: _listens(unused_port))
        assert "pooler" in errors(config_of(dsn))
        with pytest.raises(CoordinationError, match="transaction pooler"):
            LogStore.open(dsn, "src", "_pg2iceberg")
    finally:
        pooler.terminate()
        pooler.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_databases_that_cannot_be_reached(ready: str, unused_port: int) -> None:
    nowhere = make_conninfo(ready, port=unused_port)
    named = found(config_of(nowhere))
    assert "postgres.dsn" in named["source_unreachable"].remedy
    assert {"coordination_unreachable", "catalog_unwritable"}.isdisjoint(named)
    config = config_of(ready, state={"postgres_url": nowhere})
    assert {"coordination_unreachable", "catalog_unwritable"} <= errors(config)
    assert "source_unreachable" not in errors(config)


def test_a_coordination_schema_of_a_newer_version(ready: str) -> None:
    with psycopg.connect(ready, autocommit=True) as source:
        source.execute(
            "create schema _pg2iceberg; set search_path to _pg2iceberg; create table schema_version"
            " as select 999 as version, now() as applied_at;"
            " create table pipeline_meta (source text, key text, value text)"
        )
    assert "Upgrade cdc_assets" in found(config_of(ready))["coordination_newer"].remedy
    with psycopg.connect(ready, autocommit=True) as source:
        source.execute("update _pg2iceberg.schema_version set version = 1")
        source.execute("select pg_create_logical_replication_slot('cdc_src', 'pgoutput')")
    before = found(config_of(ready))
    assert before["coordination_older"].severity == "info"
    # Before an upgrade nobody knows whether there is a log.
    assert ("slot" in before, "slot_unrecorded" in before) == (True, False)


def test_clocks_that_are_apart(ready: str, postgres_dsn: NewDatabase) -> None:
    """The coordination database's clock is ahead: another function has the place of the real."""
    state = postgres_dsn()
    with psycopg.connect(state, autocommit=True) as administrator:
        administrator.execute(
            "set allow_system_table_mods = on;"
            " alter function pg_catalog.clock_timestamp() rename to really;"
            " create function pg_catalog.clock_timestamp() returns timestamptz language sql"
            " as $$ select pg_catalog.really() + interval '1 minute' $$"
        )
    ahead = config_of(ready, state={"postgres_url": state})
    assert "60 s apart" in found(ahead)["clock_skew"].message
    assert "clock_skew" not in found(config_of(ready))


def test_places_that_cannot_be_written(ready: str, s3: ObjectStore) -> None:
    config = config_of(
        ready,
        staging={"uri": "s3://no-such-bucket/staging"},
        lake={"catalog": {"type": "sql", "warehouse": "s3://no-such-bucket/lake"}},
        s3=s3.settings,
    )
    named = found(config)
    assert "staging.uri" in named["staging_unwritable"].remedy
    assert "lake.catalog" in named["catalog_unwritable"].remedy
    assert open_catalog(config).list_namespaces() == []


def test_no_java(ready: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert "java" in errors(config_of(ready))


def test_a_spark_that_is_not_there(ready: str, unused_port: int) -> None:
    config = config_of(ready, spark={"remote": f"sc://127.0.0.1:{unused_port}"})
    assert "spark.remote" in found(config)["spark_unreachable"].remedy


@pytest.fixture
def bare_spark(tmp_path: Path) -> Iterator[str]:
    """A Spark without Iceberg."""
    conf = {"spark.jars.packages": "", "spark.sql.extensions": ""}
    server = SparkServer(SparkServerSettings(conf=conf), tmp_path)
    yield server.ensure()
    server.stop()


@pytest.mark.spark
def test_a_spark_without_iceberg(ready: str, bare_spark: str) -> None:
    config = config_of(ready, spark={"remote": bare_spark})
    named = found(config)
    assert "spark.jars.packages=" in named["iceberg_runtime"].remedy
    assert {"spark_version", "spark_python"} & set(named) == set()


@pytest.mark.spark
def test_a_spark_of_other_versions(
    ready: str, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(ready, spark={"remote": spark_server.ensure()})
    theirs = importlib.metadata.version("cdc-assets")
    monkeypatch.setattr(readiness, "_SPARK", "3.5")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.9.9")  # here, not there
    named = found(config)
    assert "3.5 is needed" in named["spark_version"].message
    assert f"cdc-assets {theirs} (" in named["spark_python"].message
    assert "instead of 9.9.9" in named["spark_python"].message
    assert "spark.sql.execution.pyspark.python" in named["spark_python"].remedy


def test_the_ui_has_the_check_on_every_source_table(ready: str) -> None:
    config = config_of(ready)
    graph = build_defs(config).resolve_asset_graph()
    checks = {(key.asset_key, key.name) for key in graph.asset_check_keys}
    assert {(names.source, NAME) for names in all_tables(config)} <= checks
