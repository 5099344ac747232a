"""Promise 9: ``roles.sql`` grants by table and column, it is enough for everything, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.operations.running import flushing
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.source.server import preflight
from cdc_assets.verify.sample import sample
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.roles import apply_roles, dropped_after, dsn_of
from cdc_assets_tests.support.lake import copied, lake

pytestmark = [pytest.mark.spark]

SETUP = """
create schema sales;
create table public.t (id int primary key, v text);
create table sales."Or'der" (id int primary key, secret text default 'hidden', v text);
create table public.parts (id int primary key, v text) partition by range (id);
create table public.parts_1 partition of parts for values from (0) to (1000);
create table public.other (id int primary key, v text);
insert into t select g, 'v' || g from generate_series(1, 500) g;
insert into sales."Or'der" (id, v) select g, 'v' || g from generate_series(1, 500) g;
insert into parts select g, 'v' || g from generate_series(1, 500) g;
"""
TABLES = """ public.t; sales."Or'der" (id, v) ; public.parts"""
CONFIGURED = [
    {"name": "public.t"},
    {"name": 'sales."Or\'der"', "columns": {"exclude": ["secret"]}},
    {"name": "public.parts"},
]


@pytest.fixture
def database(postgres_dsn: NewDatabase) -> Iterator[str]:
    """The owner's DSN."""
    dsn = postgres_dsn()
    with dropped_after(dsn):
        yield dsn


def _refused(connection: psycopg.Connection[Any], *statements: str) -> None:
    for statement in statements:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement.encode())


def test_promise_9_the_roles_are_enough_for_everything_and_may_nothing_else(
    postgres: EmbeddedPostgres, database: str, spark_server: SparkServer, tmp_home: Path
) -> None:
    with psycopg.connect(database, autocommit=True) as owner:
        owner.execute(SETUP.encode())
        apply_roles(postgres, database, "public.t")
        apply_roles(postgres, database, TABLES)  # and it may be run again
        settings = {
            "postgres": {
                "dsn": dsn_of(database, "cdc_source"),
                "replication_dsn": dsn_of(database, "cdc_replication"),
            },
            "state": {"postgres_url": dsn_of(database, "cdc_state")},
            "lake": {"catalog": {"type": "sql", "uri": dsn_of(database, "cdc_catalog")}},
        }
        with lake(
            dsn_of(database, "cdc_source"), spark_server.ensure(), "select", *CONFIGURED, **settings
        ) as source:
            findings = preflight(source.source, source.config)
            assert [f for f in findings if f.severity == "error"] == []
            assert "excess_rights" not in {f.code for f in findings}
            source.pin()
            source.copy()
            owner.execute(
                "update t set v = 'changed' where id % 3 = 0; delete from t where id % 7 = 0;"
                " truncate sales.\"Or'der\"; insert into sales.\"Or'der\" values (1, 'x', null);"
                " update parts set id = id + 400 where id > 450"
            )
            source.catch_up()
            assert all(found.equal for found in source.verify())
            assert len(source.rows(TableId("public", "t"))) == 500 - 500 // 7
            assert source.rows(TableId("sales", "Or'der")) == [(1, None)]
            with flushing(source.config):
                found = sample(source.pipeline, source.session, TableId("public", "parts"), 1000)
            assert (found.rows, found.looked_up, found.differing) == (500, 500, 0), found.skipped
            assert {row.reason for row in source.pipeline.store.tables()} == {None}

            # No more than that.
            _refused(
                source.source,
                "insert into t values (0, null)",
                "update t set v = null",
                "delete from t",
                "truncate t",
                "create table public.mine (id int)",
                "create schema mine",
                "alter publication cdc_src drop table t",
                "drop publication cdc_src",
                "select * from _pg2iceberg.tables",
                "select * from iceberg.iceberg_tables",
                "select * from pg_authid",
                "select * from other",
                'select secret from sales."Or\'der"',
                'select t from sales."Or\'der" t',
                "select pg_create_logical_replication_slot('mine', 'pgoutput')",
                "select pg_drop_replication_slot('cdc_src')",
            )
        others = {
            "cdc_replication": (
                "select * from _pg2iceberg.tables",
                "alter publication cdc_src drop table t",
            ),
            "cdc_state": (
                "select * from iceberg.iceberg_tables",
                "select pg_create_logical_replication_slot('mine', 'pgoutput')",
            ),
            "cdc_catalog": (
                "select * from _pg2iceberg.tables",
                "select pg_create_logical_replication_slot('mine', 'pgoutput')",
            ),
        }
        for role, statements in others.items():
            with psycopg.connect(dsn_of(database, role), autocommit=True) as connection:
                _refused(
                    connection,
                    "select * from public.t",
                    "select * from public.other",
                    'select secret from sales."Or\'der"',
                    "create table public.mine (id int)",
                    *statements,
                )


def test_promise_9_an_excluded_column_is_neither_granted_nor_sent(
    postgres: EmbeddedPostgres, database: str, spark_server: SparkServer, tmp_home: Path
) -> None:
    """And the table is parked, by name, where the grant or the list has less than is wanted."""
    with psycopg.connect(database, autocommit=True) as owner:
        owner.execute(SETUP.encode())
        apply_roles(postgres, database, TABLES)
        reads = dsn_of(database, "cdc_source")
        settings = {
            "postgres": {"dsn": reads, "replication_dsn": dsn_of(database, "cdc_replication")},
            "state": {"postgres_url": dsn_of(database, "cdc_state")},
        }
        with copied(reads, spark_server.ensure(), "select", *CONFIGURED, **settings) as source:
            owner.execute(
                'alter table sales."Or\'der" rename v to w;'
                " update sales.\"Or'der\" set w = 'x', secret = 'planted' where id = 1;"
                ' alter table sales."Or\'der" rename secret to open;'
                " update sales.\"Or'der\" set open = 'planted', w = 'y' where id = 2"
            )
            source.catch_up()
            table = TableId("sales", "Or'der")
            assert source.rows(table)[0:2] == [(1, "x"), (10, "v10")]
            assert (2, "y") in source.rows(table)
            assert all(found.equal for found in source.verify())
            staged = b"".join(f.read_bytes() for f in Path(tmp_home).rglob("staging/**/*.parquet"))
            assert b"planted" not in staged and b"hidden" not in staged

            # A column more, which neither is granted nor sent.
            owner.execute('alter table sales."Or\'der" add column more int')
            codes = {f.code for f in preflight(source.source, source.config, source.pipeline.store)}
            assert {"select_privilege", "table_partial"} <= codes
            source.pins.prepare()  # as a flusher does when it starts
            row = source.row(table)
            assert row.state == "parked"
            assert "column list" in str(row.reason)


@pytest.mark.parametrize("schema", ["_pg2iceberg", "iceberg"])
def test_promise_9_a_schema_that_somebody_else_has_made_is_named(
    postgres: EmbeddedPostgres, database: str, schema: str
) -> None:
    with psycopg.connect(database, autocommit=True) as owner:
        owner.execute("create role somebody")
        owner.execute(f"create schema {schema} authorization somebody".encode())
        try:
            with pytest.raises(AssertionError, match=f"the schema {schema} is not cdc_"):
                apply_roles(postgres, database, "")
        finally:
            owner.execute("drop owned by somebody; drop role somebody")
        apply_roles(postgres, database, "")
