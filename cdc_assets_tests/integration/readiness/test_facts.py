"""What is asked of the source about tables is asked for all of them at once."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.pins.enrol import Enrolled, described
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.source.enrolment import facts_of
from cdc_assets.readiness.source.rights import missing_rights
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.support.flusher import Bench

_ODD = """
create domain positive as int check (value > 0);
create domain small_positive as positive;
create table plain (id int primary key, v text, n numeric(12, 2)[]);
create table domains (id small_positive primary key, v positive, w varchar(7));
create table keyless (id int, v text);
create table by_index (id int primary key, a int not null, b int not null);
create unique index on by_index (b, a);
alter table by_index replica identity using index by_index_b_a_idx;
create table late (id int primary key deferrable, v text);
create table nothing (id int primary key); alter table nothing replica identity nothing;
create table stored (id int primary key, g int generated always as (id * 2) stored);
create unlogged table unlogged (id int primary key);
create table parent (id int primary key); create table child () inherits (parent);
create table parted (id int, at date, primary key (id, at)) partition by range (at);
create table parted_1 partition of parted for values from ('2024-01-01') to ('2025-01-01');
create table parted_2 partition of parted for values from ('2025-01-01') to ('2026-01-01')
    partition by range (id);
create table parted_2_1 partition of parted_2 for values from (0) to (1000);
create table bare (id int, at date, primary key (id, at)) partition by range (at);
create table mixed (id int primary key) partition by range (id);
create unlogged table mixed_1 partition of mixed for values from (0) to (9);
create view seen as select 1 as id;
create schema "Odd"; create table "Odd"."ta'ble, %s" (id int primary key, "c""o" text);
alter table plain drop column v;
"""
_NAMES = [
    "plain",
    "domains",
    "keyless",
    "by_index",
    "late",
    "nothing",
    "stored",
    "unlogged",
    "parent",
    "child",
    "parted",
    "parted_1",
    "parted_2_1",
    "bare",
    "mixed",
    "seen",
    "missing",
]
_TABLES = [*(TableId("public", name) for name in _NAMES), TableId("Odd", "ta'ble, %s")]


@pytest.fixture(params=[15, 18], ids="pg{}".format)
def postgres_version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def _config(source: Bench) -> SourceConfig:
    settings = source.settings()
    settings["tables"] = [
        {"name": str(table), "columns": {"exclude": ["w"] if table.name == "domains" else []}}
        for table in _TABLES
    ]
    return parse_config(settings, "test")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements so far."""
    found, execute = list[str](), psycopg.Cursor.execute

    def noted(cursor: Any, query: Any, *given: Any, **more: Any) -> Any:
        found.append(str(query))
        return execute(cursor, query, *given, **more)

    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    return found


def test_each_of_many_tables_is_judged_as_if_it_were_alone(source: Bench) -> None:
    source.execute(_ODD)
    config = _config(source)
    together = described(source.connection, config, _TABLES)
    for table in _TABLES:
        alone = described(source.connection, config, [table])[table]
        assert str(together[table]) == str(alone)
    followed = {table.name for table in _TABLES if isinstance(together[table], Enrolled)}
    assert followed == {
        "plain",
        "domains",
        "by_index",
        "stored",
        "parted",
        "bare",
        _TABLES[-1].name,
    }
    findings = preflight(source.connection, config)
    for wanted in config.tables:
        found = preflight(source.connection, config, tables=[wanted])
        assert [f for f in findings if f.table == wanted.name] == [f for f in found if f.table]


def test_what_is_asked_does_not_grow_with_the_tables(source: Bench, asked: list[str]) -> None:
    source.execute(_ODD)
    asked.clear()
    facts_of(source.connection, _config(source), _TABLES)
    of_all = len(asked)
    facts_of(source.connection, _config(source), _TABLES[10:12])
    assert of_all == len(asked) - of_all


def test_publications_are_read_once_for_all_tables(source: Bench, asked: list[str]) -> None:
    source.execute(f"{_ODD}; create publication {_config(source).publication} for table plain")

    def times(*tables: TableId) -> int:
        asked.clear()
        config = _config(source)
        some = [table for table in config.tables if table.id in tables]
        preflight(source.connection, config, tables=some)
        return sum("c.relispartition and p.pubviaroot" in query for query in asked)

    assert times(*_TABLES) == times(*_TABLES[:2]) > 0


def test_no_statement_of_ours_is_compiled(source: Bench) -> None:
    """Over the catalogs of hundreds of tables that takes the source seconds, for tenths of one."""
    with connect(source.dsn) as connection:
        assert connection.execute("show jit").fetchone() == ("off",)


def test_a_column_that_one_table_leaves_out_is_wanted_of_the_others(source: Bench) -> None:
    role = f"reader_{source.name}"[:63]
    read = "ctid, xmin, cmin, id"
    source.execute(
        f"create role {role}; create table a (id int, w text); create table b (id int, w text);"
        f" grant select ({read}) on a, b to {role}"
    )
    [(a, b)] = source.execute("select 'a'::regclass::oid::int, 'b'::regclass::oid::int")
    try:
        source.connection.execute(f"set role {role}".encode())
        found = missing_rights(source.connection, {a: {"w"}, b: set()})
        assert [finding.code for finding in found[a]] == []
        assert [finding.code for finding in found[b]] == ["select_privilege"]
    finally:
        source.execute(f"reset role; drop owned by {role}; drop role {role}")
