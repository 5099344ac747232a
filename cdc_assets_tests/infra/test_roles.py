"""``roles.sql``: what the three roles may is enough for everything, and no more."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.embedded.demo_schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.preflight import preflight
from cdc_assets.spark.server import SparkServer
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.lake_support import lake

pytestmark = [pytest.mark.spark]

FILE = Path(__file__).parents[2] / "infra" / "postgres" / "roles.sql"
ROLES = {"cdc_source": "it's a secret", "cdc_state": "b", "cdc_catalog": "c"}
SETUP = """
create schema sales;
create table public.t (id int primary key, v text);
create table sales."Or'der" (id int primary key, v text);
insert into t select g, 'v' || g from generate_series(1, 500) g;
insert into sales."Or'der" select g, 'v' || g from generate_series(1, 500) g;
"""


@pytest.fixture
def database(postgres: EmbeddedPostgres, postgres_dsn: NewDatabase) -> Iterator[str]:
    """The owner's DSN; the roles are the server's, and go with the test."""
    dsn = postgres_dsn()
    yield dsn
    with psycopg.connect(dsn, autocommit=True) as owner:
        owner.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = any(%s)",
            (list(ROLES),),
        )
        owner.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
            " where database = current_database()"
        )
        for role in ROLES:
            owner.execute(f"drop owned by {role} cascade; drop role {role}".encode())


def _apply(postgres: EmbeddedPostgres, dsn: str, *, schemas: str) -> None:
    given = {
        "ON_ERROR_STOP": "1",
        "database": str(conninfo_to_dict(dsn)["dbname"]),
        "schemas": schemas,
        **{role.replace("cdc_", "") + "_password": secret for role, secret in ROLES.items()},
        "publication": "cdc_src",
    }
    variables = [part for key, value in given.items() for part in ("-v", f"{key}={value}")]
    done = subprocess.run(
        [str(postgres.program("psql")), "-X", "-q", *variables, "-f", str(FILE)],
        env=connection_environment(dsn),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_roles_are_enough_for_everything_and_may_nothing_else(
    postgres: EmbeddedPostgres, database: str, spark_server: SparkServer, tmp_home: Path
) -> None:
    with psycopg.connect(database, autocommit=True) as owner:
        owner.execute(SETUP.encode())
        _apply(postgres, database, schemas="public")
        _apply(postgres, database, schemas="public,sales")  # and it may be run again
        owner.execute('alter publication cdc_src add table t, sales."Or\'der"')

        def of(role: str) -> str:
            return make_conninfo(database, user=role, password=ROLES[role])

        tables = ["public.t", 'sales."Or\'der"']
        settings = {
            "state": {"postgres_url": of("cdc_state")},
            "lake": {"catalog": {"type": "sql", "uri": of("cdc_catalog")}},
        }
        with lake(of("cdc_source"), spark_server.ensure(), "select", *tables, **settings) as source:
            findings = preflight(source.source, source.config)
            assert [f for f in findings if f.severity == "error"] == []
            source.pin()
            source.copy()
            owner.execute(
                "update t set v = 'changed' where id % 3 = 0; delete from t where id % 7 = 0;"
                ' truncate sales."Or\'der"; insert into sales."Or\'der" values (1, null)'
            )
            source.flush()
            source.drain_all()
            assert all(found.equal for found in source.verify())
            assert len(source.rows(TableId("public", "t"))) == 500 - 500 // 7

            # No more than that.
            refused = (
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
            )
            for statement in refused:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    source.source.execute(statement.encode())
        others = {
            "cdc_state": "iceberg.iceberg_tables",
            "cdc_catalog": "_pg2iceberg.tables",
        }
        for role, hidden in others.items():
            with psycopg.connect(of(role), autocommit=True) as connection:
                for statement in (
                    "select * from public.t",
                    f"select * from {hidden}",
                    "create table public.mine (id int)",
                    "select pg_create_logical_replication_slot('mine', 'pgoutput')",
                ):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        connection.execute(statement.encode())
