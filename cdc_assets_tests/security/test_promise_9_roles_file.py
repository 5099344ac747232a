"""Promise 9: what ``roles.sql`` does with tables and columns that it can't publish as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.pins.enrol import Enrolled, described
from cdc_assets.postgres.publication.contents import GENERATED_COLUMNS
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.roles import apply_roles, dropped_after, dsn_of

SETUP = """
create table made (id int primary key, v text, secret text,
                   twice int generated always as (id * 2) stored);
create table keyless (id int, v text);
create table whole (id int, v text);
alter table whole replica identity full;
create table other_key (id int primary key, k int not null unique, v text);
alter table other_key replica identity using index other_key_k_key;
create table parts (id int primary key, v text) partition by range (id);
create table parts_1 partition of parts for values from (0) to (1000);
alter table parts_1 replica identity nothing;
create table t (id int primary key, v text, secret text);
insert into keyless values (1); insert into other_key values (1, 1); insert into parts values (1);
insert into t values (1);
"""


@pytest.fixture
def owner(
    any_postgres: EmbeddedPostgres, any_postgres_dsn: NewDatabase
) -> Iterator[psycopg.Connection[Any]]:
    dsn = any_postgres_dsn()
    with dropped_after(dsn), psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SETUP.encode())
        yield connection


def _dsn(owner: psycopg.Connection[Any], role: str) -> str:
    return dsn_of(
        psycopg.conninfo.make_conninfo(owner.info.dsn, password=owner.info.password), role
    )


def _config(owner: psycopg.Connection[Any], table: str, *excluded: str) -> SourceConfig:
    listed = [{"name": table, "columns": {"exclude": list(excluded)}}]
    return parse_config(
        {"name": "src", "postgres": {"dsn": _dsn(owner, "cdc_source")}, "tables": listed}, "test"
    )


def _published(owner: psycopg.Connection[Any]) -> dict[str, list[str]]:
    return dict(
        owner.execute(
            "select tablename, attnames::text[] from pg_publication_tables"
            " where pubname = 'cdc_src'"
        ).fetchall()
    )


def _roles(postgres: EmbeddedPostgres, owner: psycopg.Connection[Any], tables: str) -> str:
    dsn = psycopg.conninfo.make_conninfo(owner.info.dsn, password=owner.info.password)
    return apply_roles(postgres, dsn, tables)


@pytest.mark.parametrize("named", ["id, v", "id, v, twice"])
def test_promise_9_generated_columns_are_granted_and_published_where_they_can_be(
    any_postgres: EmbeddedPostgres,
    owner: psycopg.Connection[Any],
    tmp_home: Path,
    named: str,
) -> None:
    assert _roles(any_postgres, owner, f"public.made ({named})") == ""
    sends = owner.info.server_version >= GENERATED_COLUMNS and "twice" in named
    assert _published(owner) == {"made": ["id", "v", "twice"] if sends else ["id", "v"]}
    config = _config(owner, "made", "secret")
    with connect(_dsn(owner, "cdc_source")) as source:
        codes = {f.code for f in preflight(source, config) if f.table and f.severity != "info"}
        assert codes == set()
        found = described(source, config, [config.tables[0].id])[config.tables[0].id]
        assert isinstance(found, Enrolled)
    assert found.left_out == (() if sends else ("twice",))


@pytest.mark.parametrize("named", ["a, k", "k"])
def test_promise_9_no_table_is_published_without_a_generated_key_that_is_not_sent(
    any_postgres: EmbeddedPostgres, owner: psycopg.Connection[Any], tmp_home: Path, named: str
) -> None:
    if owner.info.server_version >= GENERATED_COLUMNS:
        pytest.skip("since 18 it is sent")
    owner.execute(
        "create table keyed (a int, secret text,"
        " k int generated always as (a + 1) stored primary key)"
    )
    said = _roles(any_postgres, owner, f"public.keyed ({named})")
    assert "keyed isn't published as it was named here" in said
    assert _published(owner) == {}
    owner.execute("insert into keyed (a) values (1); update keyed set secret = 'x'")


def test_promise_9_what_stays_published_as_a_whole_is_said(
    any_postgres: EmbeddedPostgres, owner: psycopg.Connection[Any], tmp_home: Path
) -> None:
    assert _roles(any_postgres, owner, "public.t") == ""
    said = _roles(any_postgres, owner, "public.t (id, v)")
    assert "t is published with columns that aren't named here" in said
    owner.execute(said.partition("the server: ")[2].partition(";")[0].encode())
    assert _roles(any_postgres, owner, "public.t (id, v)") == ""
    assert _published(owner) == {"t": ["id", "v"]}
    assert _roles(any_postgres, owner, " ; public.t ; ") == ""  # more is granted, no less published


def test_promise_9_no_table_is_published_whose_changes_postgres_would_refuse(
    any_postgres: EmbeddedPostgres, owner: psycopg.Connection[Any], tmp_home: Path
) -> None:
    said = _roles(
        any_postgres,
        owner,
        "public.keyless; public.whole; public.other_key (id, v); public.parts; public.t (v)",
    )
    assert set(_published(owner)) == {"whole"}
    for name in ("keyless", "other_key", "parts", "t"):
        assert f"{name} isn't published as it was named here" in said, name
        # Were it published, Postgres would refuse these.
        owner.execute(f"update {name} set v = 'x'; delete from {name}".encode())
    assert "whole isn't" not in said
