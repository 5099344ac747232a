"""What a source can leave out of a copy: rows by its policies, changes by a publication, columns.

A copy that isn't whole is never called complete, and other tables don't notice.
"""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.postgres.publication.contents import GENERATED_COLUMNS
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.source.server import preflight
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import PAIR, T, U, chunk_keys, role
from cdc_assets_tests.support.lake import NewLake, lake

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    ("rights", "reason", "remedy"),
    [
        (
            'grant select on t to "{role}"; alter table t enable row level security;',
            "row-level security hides rows of public.t from the role {role}",
            'alter role "{role}" bypassrls',
        ),
        ("", "the role {role} may not read public.t", 'grant select on public.t to "{role}"'),
    ],
    ids=["row-level security", "no select"],
)
def test_a_table_that_the_role_does_not_see_whole_is_parked(
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    rights: str,
    reason: str,
    remedy: str,
) -> None:
    dsn = postgres_dsn()
    with (
        role(dsn) as (name, role_dsn),
        lake(
            dsn,
            spark_server.ensure(),
            PAIR + rights.format(role=name) + f"alter table u owner to {name};",
            "t",
            "u",
            postgres={"dsn": role_dsn},
            state={"postgres_url": dsn},
        ) as source,
    ):
        source.pin()
        parked = source.row(T)
        assert parked.state == "parked"
        assert reason.format(role=name) in str(parked.reason)
        assert remedy.format(role=name) in str(parked.reason)
        with connect(role_dsn) as connection:
            errors = {f.code for f in preflight(connection, source.config) if f.severity == "error"}
        assert errors & {"row_security", "select_privilege"}
        copy_table(source.pipeline, source.session, U)
        source.execute("update u set v = 'new' where id = 1")
        source.catch_up(U)
        assert source.equal(U)


def test_row_level_security_that_comes_on_during_the_copy_hides_nothing_silently(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    dsn = postgres_dsn()
    with (
        role(dsn) as (name, role_dsn),
        lake(
            dsn,
            spark_server.ensure(),
            f"{PAIR} alter table t owner to {name}; alter table u owner to {name};",
            {"name": "t", "chunk_pages": 1},
            "u",
            postgres={"dsn": role_dsn},
            state={"postgres_url": dsn},
        ) as source,
    ):
        source.pin()
        keys = chunk_keys(source)
        copy_table(source.pipeline, source.session, T, only=keys[:1])
        source.execute(
            "alter table t enable row level security; alter table t force row level security"
        )
        with pytest.raises(TableProblem, match="row-level security"):
            copy_table(source.pipeline, source.session, T)
        assert source.row(T).state != "streaming"
        source.execute("alter table t disable row level security")
        source.copy()
        source.catch_up()
        assert source.equal(T)
        assert source.equal(U)


@pytest.mark.parametrize(
    ("tables", "options", "reason"),
    [
        ("t where (id > 5), u", "publish_via_partition_root = true", "has a row filter"),
        ("t (id), u", "publish_via_partition_root = true", "has a column list"),
        (
            "t, u",
            "publish = 'insert', publish_via_partition_root = true",
            "doesn't publish every kind of change",
        ),
        ("t, u", "publish_via_partition_root = false", "as those of the partitions"),
    ],
    ids=["row filter", "column list", "only inserts", "partitions"],
)
def test_a_publication_that_leaves_something_out_parks_the_table_until_it_is_mended(
    any_postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    tables: str,
    options: str,
    reason: str,
) -> None:
    setup = """
    create table t (id int primary key, v text not null) partition by range (id);
    create table t_low partition of t for values from (0) to (500);
    create table t_high partition of t for values from (500) to (5000);
    insert into t select i, 'old ' || i from generate_series(1, 1000) i;
    create table u (id int primary key);
    """
    with lake(
        any_postgres_dsn(),
        spark_server.ensure(),
        f"{setup} create publication cdc_src for table {tables} with ({options});",
        "t",
        "u",
    ) as source:
        found = {f.code: f for f in preflight(source.source, source.config)}
        assert reason in found["table_partial"].message
        source.pin()
        parked = source.row(T)
        assert parked.state == "parked"
        assert reason in str(parked.reason)
        way_out = re.search(r"alter publication [^;]*", str(parked.reason))
        assert way_out is not None, "the remedy can be pasted"
        source.execute(way_out[0].rstrip("."))
        source.pin()
        source.copy()
        source.execute("update t set v = 'new' where id in (1, 999)")
        source.execute("delete from t where id in (2, 998)")
        source.execute("insert into u values (1)")
        source.catch_up()
        assert source.equal(T)
        assert source.equal(U)


def test_generated_columns_are_in_the_lake_where_postgres_sends_them(
    any_postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    dsn = any_postgres_dsn()
    with psycopg.connect(dsn) as connection:
        sends = connection.info.server_version >= GENERATED_COLUMNS
    virtual = ", virt int generated always as (n + 1) virtual" if sends else ""
    setup = f"""
    create table t (
        id int primary key, n int, stored int generated always as (n * 2) stored{virtual}
    );
    insert into t select i, i from generate_series(1, 1000) i;
    """
    with lake(dsn, spark_server.ensure(), setup, "t") as source:
        named = [
            f.message
            for f in preflight(source.source, source.config)
            if f.code == "generated_columns"
        ]
        assert len(named) == 1
        assert ("(virt)" if sends else "(stored)") in named[0]
        source.pin()
        source.execute("update t set n = -n where id % 10 = 0")
        source.copy()
        source.execute("update t set n = 7 where id % 15 = 0")
        source.catch_up()
        assert source.equal(T, "id, n, stored" if sends else "id, n")
        assert source.verify()[0].equal


def test_a_publication_without_generated_columns_leaves_them_out_of_the_copy_too(
    new_lake: NewLake,
) -> None:
    setup = """
    create table t (id int primary key, n int, stored int generated always as (n * 2) stored);
    insert into t select i, i from generate_series(1, 1000) i;
    create publication cdc_src for table t;
    """
    with new_lake(setup, "t") as source:
        findings = preflight(source.source, source.config)
        assert "generated_columns" in {finding.code for finding in findings}
        source.pin()
        source.execute("update t set n = -n where id % 10 = 0")
        source.copy()
        source.catch_up()
        assert source.equal(T, "id, n")
