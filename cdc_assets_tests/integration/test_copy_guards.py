"""What a source can do to a copy: hide rows, leave columns out, end sessions, rewrite tables.

Whatever it is, a copy that isn't whole is never called complete, and other tables don't notice.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import CdcError, CopyRestarted, SlotBusy, TableProblem
from cdc_assets.log.progress import chunks
from cdc_assets.log.store import TableRow
from cdc_assets.postgres import pins, replication
from cdc_assets.postgres.connect import connect
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.preflight import preflight
from cdc_assets.postgres.replication import GENERATED_COLUMNS, NewSlot, create_slot
from cdc_assets.snapshot.copy import copy_table
from cdc_assets.spark.server import SparkServer
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.lake_support import Lake, lake

pytestmark = pytest.mark.spark

T, U = TableId("public", "t"), TableId("public", "u")
PAIR = """
create table t (id int primary key, v text not null);
insert into t select i, 'old ' || i from generate_series(1, 1000) i;
create table u as table t;
alter table u add primary key (id);
"""
ODD = TableId("My.Schema", "we ird/ta'ble%\"x – ü")


def state(source: Lake, table: TableId) -> TableRow:
    row = source.pipeline.store.table(table)
    assert row is not None
    return row


def equal(source: Lake, table: TableId, columns: str = "*") -> bool:
    there = source.execute(f"select {columns} from {table}")
    return source.rows(table) == sorted(there, key=repr)


def catch_up(source: Lake, *tables: TableId) -> None:
    source.flush()
    for table in tables or source.tables:
        source.drain(table)


@contextmanager
def role(dsn: str, *settings: str) -> Iterator[tuple[str, str]]:
    """``(name, dsn)`` of a role that replicates and is no superuser; it owns what it makes."""
    name, password = f"test_{secrets.token_hex(4)}", secrets.token_hex(8)
    parts = conninfo_to_dict(dsn)
    with psycopg.connect(dsn, autocommit=True) as superuser:
        who = sql.Identifier(name)
        superuser.execute(
            sql.SQL("create role {} login replication password {}").format(who, password)
        )
        superuser.execute(
            sql.SQL("grant create on database {} to {}").format(
                sql.Identifier(str(parts["dbname"])), who
            )
        )
        superuser.execute(sql.SQL("grant create on schema public to {}").format(who))
        for setting in settings:
            superuser.execute(
                sql.SQL("alter role {} set {}").format(who, sql.SQL(setting))  # type: ignore[arg-type]
            )
        try:
            address = f"{parts['host']}:{parts['port']}/{parts['dbname']}"
            yield name, f"postgresql://{name}:{password}@{address}"
        finally:
            superuser.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s",
                [name],
            )
            superuser.execute(sql.SQL("drop owned by {} cascade").format(who))
            superuser.execute(sql.SQL("drop role {}").format(who))


# --- rows that the role doesn't see ---


@pytest.mark.parametrize(
    ("rights", "reason", "remedy"),
    [
        (
            'grant select on t to "{role}"; alter table t enable row level security;',
            "row-level security hides rows of it from the role {role}",
            'alter role "{role}" bypassrls',
        ),
        ("", "the role {role} may not read it", 'grant select on public.t to "{role}"'),
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
        parked = state(source, T)
        assert parked.state == "parked"
        assert reason.format(role=name) in str(parked.reason)
        assert remedy.format(role=name) in str(parked.reason)
        with connect(role_dsn) as connection:
            errors = {f.code for f in preflight(connection, source.config) if f.severity == "error"}
        assert errors & {"row_security", "select_privilege"}
        copy_table(source.pipeline, source.session, U)
        source.execute("update u set v = 'new' where id = 1")
        catch_up(source, U)
        assert equal(source, U)


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
        keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
        copy_table(source.pipeline, source.session, T, only=keys[:1])
        source.execute(
            "alter table t enable row level security; alter table t force row level security"
        )
        with pytest.raises(TableProblem, match="row-level security"):
            copy_table(source.pipeline, source.session, T)
        assert state(source, T).state != "streaming"
        source.execute("alter table t disable row level security")
        source.copy()
        catch_up(source)
        assert equal(source, T)
        assert equal(source, U)


# --- publications made by hand ---


@pytest.mark.parametrize(
    ("publication", "reason", "remedy", "way_out"),
    [
        (
            "for table t where (id > 5), u",
            "has a row filter",
            "alter publication cdc_src drop table public.t",
            "alter publication cdc_src drop table public.t",
        ),
        (
            "for table t (id), u",
            "has a column list",
            "alter publication cdc_src drop table public.t",
            "alter publication cdc_src drop table public.t",
        ),
        (
            "for table t, u with (publish = 'insert')",
            "doesn't publish every kind of change",
            "alter publication cdc_src set (publish = 'insert, update, delete, truncate')",
            "alter publication cdc_src set (publish = 'insert, update, delete, truncate')",
        ),
        (
            "for table t, u",
            "as those of the partitions",
            "alter publication cdc_src set (publish_via_partition_root = true)",
            "alter publication cdc_src set (publish_via_partition_root = true)",
        ),
    ],
    ids=["row filter", "column list", "only inserts", "partitions"],
)
def test_a_publication_that_leaves_something_out_parks_the_table_until_it_is_mended(
    any_postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    publication: str,
    reason: str,
    remedy: str,
    way_out: str,
) -> None:
    setup = """
    create table t (id int primary key, v text not null) partition by range (id);
    create table t_low partition of t for values from (0) to (500);
    create table t_high partition of t for values from (500) to (5000);
    insert into t select i, 'old ' || i from generate_series(1, 1000) i;
    create table u (id int primary key);
    """
    if "partitions" not in reason:
        publication += ", " if "with (" in publication else " with ("
        publication = publication.replace("), ", ", ").rstrip(", ")
        publication += "" if publication.endswith("(") else ", "
        publication += "publish_via_partition_root = true)"
    with lake(
        any_postgres_dsn(),
        spark_server.ensure(),
        f"{setup} create publication cdc_src {publication};",
        "t",
        "u",
    ) as source:
        found = {f.code: f for f in preflight(source.source, source.config)}
        assert reason in found["table_partial"].message
        source.pin()
        assert state(source, T).state == "parked"
        assert reason in str(state(source, T).reason)
        assert remedy in str(state(source, T).reason)
        source.execute(way_out)
        source.pin()
        copy_table(source.pipeline, source.session, T)
        source.execute("update t set v = 'new' where id in (1, 999)")
        source.execute("delete from t where id in (2, 998)")
        catch_up(source, T)
        assert equal(source, T)
