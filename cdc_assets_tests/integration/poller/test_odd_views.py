"""Views that fail, write, lock, or are called oddly: none does harm, or holds up another table."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from cdc_assets.log.states import TableState
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId, quoted
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.poller.test_views import OF_W, W, errors
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, T, queried
from cdc_assets_tests.support.waiting import wait_for

READ_ONLY = "25006"  # the SQL state of what a READ ONLY transaction refuses
BY_NUMBER = {"column": "n", "order": "sequence", "lag_numbers": 5}
NAMES = (
    *('we"ird', "it's", "Ünï çode 雪", "UPPER", "100%", "%s", "%(x)s", "back\\slash", "a.b"),
    *("new\nline", "{curly}", "$1", "-- x", "a;b", "t", "select", "x" * 63, "é" * 31),
)


@pytest.mark.parametrize("kind", ["table", "view", "materialized view"])
def test_names_are_only_names(postgres_dsn: NewDatabase, tmp_home: object, kind: str) -> None:
    """Of schema, table, key and watermark; a value is like that, too."""
    made, tables, keys = "", list[Any](), dict[TableId, str]()
    for place, name in enumerate(NAMES):
        key, watermark = (NAMES[place - back] for back in (1, 2))
        table = TableId(name, name)
        below = str(table) if kind == "table" else f"{quoted(name)}.below"
        made += f"""
        create schema {quoted(name)};
        create table {below} ({quoted(key)} text primary key,
          {quoted(watermark)} timestamptz not null default now());
        insert into {below} values ('%s''"'||chr(10));"""
        of: Any = {"name": str(table), "watermark": {"column": watermark, "lag": "1h"}}
        if kind != "table":
            made += f"create {kind} {table} as select * from {below};"
            of["key"] = [key]
        tables.append(of)
        keys[table] = key
    with queried(postgres_dsn(), made, *tables) as source:
        assert not errors(source)
        assert source.poll(), source.progress.troubles
        for table, key in keys.items():
            assert [row[key] for row in source.staged(table)] == ["%s'\"\n"], table


def test_a_page_of_rows_without_a_watermark_ends(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    """NULL comes last: what followed such a page was the first one again, for ever."""
    made = "create table t (id int primary key, n bigint);"
    made += "create materialized view w as select * from t; create index on w (n)"
    with queried(postgres_dsn(), made, OF_W | {"watermark": BY_NUMBER}) as source:
        source.execute("insert into t select i, nullif(i, i) from generate_series(2, 12000) i")
        source.execute("insert into t values (1, 1); refresh materialized view w")
        polling = threading.Thread(target=source.poll, daemon=True)
        polling.start()
        polling.join(20)
        assert not polling.is_alive()
        assert source.found(W).keys() == {"1"}


def test_a_view_neither_writes_nor_locks_rows_when_it_is_asked(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    """By ``check``, by a pin, by a poll."""
    made = f"""{CLOCKED} insert into t values (1, 'x');
    create table noted (n int);
    create function note(n int) returns int language sql volatile
      as 'insert into public.noted values (n) returning n';
    create view w as select id, v, updated_at, note(id) as n from t;
    create function lock(n int) returns int language sql volatile
      as 'select id from public.t where id = n for update';
    create view l as select lock(id) as id, v, updated_at from t;
    create view wn as select id, v, note(id) as n from t"""
    tables = OF_W, OF_W | {"name": "l"}, OF_W | {"name": "wn", "watermark": BY_NUMBER}
    with queried(postgres_dsn(), made, *tables, pinned=False) as source:
        assert [READ_ONLY in f.message for f in warnings(source, "key_unproven")] == [True] * 3
        source.pins.prepare()
        wait_for(lambda: pinned(source) == {W, TableId("public", "l")})
        assert READ_ONLY in reason(source, TableId("public", "wn"))
        source.execute("insert into t values (2, 'x')")
        assert not source.poll()
        assert source.progress.troubles["queries"].count(READ_ONLY) == 2
        assert source.execute("select count(*) from noted") == [(0,)]
        assert {*source.execute("select xmax::text from t")} == {("0",)}


def warnings(source: Queried, code: str) -> list[Finding]:
    return [f for f in source_findings(source.config) if f.code == code]


def pinned(source: Queried) -> set[TableId]:
    """Those that are, after another look."""
    source.pins.tick()
    rows = source.pipeline.store.tables()
    return {row.table for row in rows if row.state != TableState.WAITING}


def reason(source: Queried, table: TableId) -> str:
    return next(str(r.reason) for r in source.pipeline.store.tables() if r.table == table)


def test_a_lock_below_views_is_not_waited_for(postgres_dsn: NewDatabase, tmp_home: object) -> None:
    """One would take 2 s."""
    names = [f"w{number}" for number in range(4)]
    made = "create view v as select * from t;"
    made += "".join(f"create view {name} as select * from v;" for name in names)
    with queried(
        postgres_dsn(), CLOCKED + made, *[OF_W | {"name": name} for name in names]
    ) as source:
        with source.session() as locking:
            locking.execute("begin; lock table t")
            began = time.monotonic()
            assert not source.poll()
            assert time.monotonic() - began < 6
            assert source.progress.troubles["queries"].count("it is locked") == 4
        wait_for(source.poll)


def test_a_bound_that_can_not_be_asked_for_holds_up_no_other_copy(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    made = f"{CLOCKED} insert into t values (0, 'x');"
    made += "create view w as select id, v, 1 / id as n from t"
    with queried(
        postgres_dsn(), made, OF_W | {"watermark": BY_NUMBER}, BY_CLOCK, pinned=False
    ) as source:
        source.pins.prepare()
        wait_for(lambda: pinned(source) == {T})
        assert (
            reason(source, W)
            == "its watermark can't be asked for: division by zero (SQL state 22012)."
        )
        source.execute("update t set id = 1")
        wait_for(lambda: pinned(source) == {T, W})


def test_what_rules_of_a_table_read_is_not_below_it(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    made = f"{CLOCKED} create materialized view m as select 1;"
    made += "create rule r as on insert to t do also select * from m"
    with queried(postgres_dsn(), made, BY_CLOCK, pinned=False) as source:
        assert not errors(source)


@pytest.mark.parametrize("lag", ["0s", "1h"])
def test_what_gets_a_foreign_part_later_is_parked(
    postgres_dsn: NewDatabase, tmp_home: object, lag: str
) -> None:
    """``check`` and the pin had refused it."""
    made = f"{CLOCKED} create view w as select * from t;"
    made += "create foreign data wrapper far; create server far foreign data wrapper far;"
    made += "create materialized view m as select * from t;"
    made += "create table p (id int, v text, updated_at timestamptz not null)"
    made += " partition by range (id)"
    watermark = {"column": "updated_at", "lag": lag}
    tables = [OF_W | {"name": name, "watermark": watermark} for name in ("p", "w")]
    with queried(postgres_dsn(), made, *tables) as source:
        assert source.poll()
        source.execute("create or replace view w as select * from m")
        source.execute("create foreign table far partition of p default server far")
        source.poll()
        parked = {row.table.name for row in source.pipeline.store.tables(None, TableState.PARKED)}
        assert parked == ({"p", "w"} if lag == "0s" else {"p"})
        if lag == "0s":
            assert "public.m below it" in reason(source, W)
