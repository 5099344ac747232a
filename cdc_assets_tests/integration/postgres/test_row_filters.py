"""What Postgres makes of a row filter, found without a trace."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import psycopg
import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication import row_filters
from cdc_assets.postgres.publication.row_filters import kept
from cdc_assets_tests.conftest import NewDatabase

SETUP = """
create type mood as enum ('a');
create function same(mood, mood) returns boolean language sql immutable as 'select true';
create operator === (leftarg = mood, rightarg = mood, function = public.same);
create table "T t" (id int, region varchar(9) collate "C", "Big" numeric(9,2), m mood, d date,
  g int generated always as (id * 2) stored);
"""
T = TableId("public", "T t")


@pytest.mark.parametrize(
    ("text", "columns", "foreign"),  # a function, an operator; or a column and its type
    [
        ("region = 'eu'", {"region"}, None),
        ('"T t".id > 3 and "Big" < 5 or d > date \'2026-01-01\'', {"id", "Big", "d"}, None),
        ("g = 4 and region ~ '^e{1}%'", {"g", "region"}, None),
        ("m = 'a'", {"m"}, "m: public.mood"),
        ("m operator(public.===) 'a'", {"m"}, "operator public.===(public.mood,public.mood)"),
        ("id is null or true", {"id"}, None),
    ],
)
def test_a_publication_keeps_the_same(
    any_postgres_dsn: NewDatabase, text: str, columns: set[str], foreign: str | None
) -> None:
    with psycopg.connect(any_postgres_dsn(), autocommit=True) as source:
        source.execute(SETUP)
        source.execute("set search_path = pg_catalog")
        found = kept(source, T, text)
        assert found.columns == columns
        others = f"{found.foreign} {found.typed}"
        assert foreign in others if foreign else (found.foreign, found.typed) == (None, None)
        assert (
            source.execute("select 1 from pg_class where relpersistence = 't'").fetchone() is None
        )
        if foreign is None and source.info.server_version >= 150000 and "g =" not in text:
            source.execute(f'create publication p for table public."T t" where ({text})'.encode())
            row = source.execute("select pg_get_expr(prqual, prrelid) from pg_publication_rel")
            assert row.fetchone() == (found.text,)


@pytest.mark.parametrize(
    ("text", "mutable"),
    [
        ("d > now()::date", True),
        ("d > current_date - 30", True),
        ("random() < 0.5 and id > 3", True),
        ("lower(region) = 'eu' and d > date '2026-01-01'", False),
    ],
)
def test_what_no_publication_takes_is_known_before(
    postgres_dsn: NewDatabase, text: str, mutable: bool
) -> None:
    with psycopg.connect(postgres_dsn(), autocommit=True) as source:
        source.execute(SETUP)
        assert kept(source, T, text).mutable is mutable
        publish = f'create publication p for table public."T t" where ({text})'.encode()
        with (
            pytest.raises(psycopg.errors.FeatureNotSupported) if mutable else nullcontext(),
        ):
            source.execute(publish)


def test_it_is_asked_once(postgres_dsn: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table may wait for its pin for hours, and is looked at every two seconds."""
    with psycopg.connect(postgres_dsn(), autocommit=True) as source:
        source.execute("create table t (id int, region text)")
        table = TableId("public", "t")
        first = kept(source, table, "id > 1")
        asked = list[str]()
        execute = psycopg.Connection.execute

        def told(self: Any, query: Any, *more: Any, **how: Any) -> Any:
            asked.append(str(query))
            return execute(self, query, *more, **how)

        monkeypatch.setattr(psycopg.Connection, "execute", told)
        assert kept(source, table, "id > 1") is first
        assert len(asked) == 1
        source.execute("alter table t alter id type bigint")
        assert kept(source, table, "id > 1").text == "(id > 1)"
        assert len(asked) > 3
    assert row_filters._KNOWN
