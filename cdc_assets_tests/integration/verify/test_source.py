"""What a comparison asks the source for: texts by stated rules, rows by the table's own name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import types as T

from cdc_assets.config.source import parse_config
from cdc_assets.config.tables import TableConfig
from cdc_assets.pins.holders import under
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.session.connect import connect
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.postgres.types import mapping
from cdc_assets.verify.canonical import source_text
from cdc_assets.verify.point import moment
from cdc_assets.verify.representable import _at_source
from cdc_assets.verify.source import parts, whole
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.waiting import wait_for

DATE, TIMESTAMP, NTZ = T.DateType(), T.TimestampType(), T.TimestampNTZType()
TEXT, LAST = T.StringType(), "9999-12-31 23:59:59.999999"
# Postgres's type, the lake's, policy, value; how it is compared, and whether it has no form.
TEXTS: list[tuple[str, T.DataType, str, str | None, str | None, bool | None]] = [
    ("integer", T.IntegerType(), "null", None, None, None),
    ("date", DATE, "null", None, None, None),
    ("date", DATE, "null", "2024-02-29", "2024-02-29", False),
    ("date", DATE, "null", "infinity", None, True),
    ("date", DATE, "clamp", "0044-03-15 BC", "0001-01-01", True),
    ("date", DATE, "fail", "infinity", "infinity", True),
    ("date", TEXT, "null", "infinity", "infinity", None),
    ("timestamp(3) without time zone", NTZ, "clamp", "infinity", LAST, True),
    ("timestamp with time zone", TIMESTAMP, "null", f"{LAST}+00", f"{LAST}+00", False),
    ("timestamp with time zone", TIMESTAMP, "null", "10000-01-01 00:00+00", None, True),
    ("numeric(4,2)", T.DecimalType(4, 2), "null", "1.5", "1.50", False),
    ("numeric(4,2)", T.DecimalType(4, 2), "null", "NaN", None, True),
    ("numeric(5,5)", T.DecimalType(5, 5), "clamp", "NaN", "0.99999", True),
    ("pair", TEXT, "null", "(,)", "(,)", None),
    ("pair", TEXT, "null", None, None, None),
    ("text[]", T.ArrayType(TEXT), "null", '{"a b",NULL,""}', '{"a b",NULL,""}', False),
    ("text[]", T.ArrayType(TEXT), "null", "{{a},{b}}", None, True),
    ("integer[]", T.ArrayType(T.IntegerType()), "null", "{}", "{}", False),
    ("integer[]", T.ArrayType(T.IntegerType()), "null", "[0:1]={1,2}", "{1,2}", True),
    ("boolean[]", T.ArrayType(T.BooleanType()), "null", "{t,f,NULL}", "{t,f,NULL}", False),
    ("date[]", T.ArrayType(DATE), "null", "{2024-01-01,infinity}", "{2024-01-01,NULL}", True),
    ("date[]", T.ArrayType(DATE), "clamp", "{-infinity}", "{0001-01-01}", True),
    ("positive", T.IntegerType(), "null", "3", "3", None),
]


def _owner(dsn: str) -> psycopg.Connection[Any]:
    """A session that prints as ours do, and finds the test's tables by their names."""
    connection = connect(dsn)
    connection.execute("set search_path = public")
    return connection


def test_the_source_prints_its_values_by_the_stated_rules(any_postgres_dsn: NewDatabase) -> None:
    with _owner(any_postgres_dsn()) as source:
        source.execute("create type pair as (a int, b text)")
        source.execute("create domain positive as int")
        for kind, lake, policy, value, expected, lost in TEXTS:
            made = source_text("v v", kind, lake, policy)
            found = source.execute(
                sql.SQL("select {}, {} from (select {}::text::{}) t ({})").format(
                    made.text,
                    made.lost or sql.SQL("null::bool"),
                    sql.Literal(value),
                    sql.SQL(kind),
                    sql.Identifier("v v"),
                )
            ).fetchone()
            assert found == (expected, lost), (kind, policy, value)


def test_every_row_of_a_tree_is_in_one_range(any_postgres_dsn: NewDatabase) -> None:
    with _owner(any_postgres_dsn()) as source:
        source.execute("create table p (id int, v text) partition by list (id)")
        source.execute("create table one partition of p for values in (1) partition by list (v)")
        source.execute("create table one_a partition of one for values in ('a')")
        source.execute("create table rest partition of p default")
        source.execute("insert into p select i % 3, 'a' from generate_series(1, 9000) i")
        [(oid,)] = source.execute("select 'p'::regclass::oid::bigint").fetchall()
        found = parts(source, oid, only=False)
        assert sorted(part.id.name for part in found) == ["one_a", "rest"]
        ranges = whole(found, 4)
        assert len(ranges) > 5
        counts = [
            source.execute(f"select count(*) from p where {pages.predicate}".encode()).fetchone()
            for pages in ranges
        ]
        assert sum(count[0] for count in counts if count) == 9000
        assert len([count for count in counts if count and count[0]]) > 5
        plan = source.execute(
            f"explain select * from p where {ranges[0].predicate}".encode()
        ).fetchall()
        assert sum("Tid Range Scan" in line for (line,) in plan) == 2
        source.execute("create table q (id int); create table below () inherits (q)")
        [(oid,)] = source.execute("select 'q'::regclass::oid::bigint").fetchall()
        assert [len(parts(source, oid, only=only)) for only in (False, True)] == [2, 1]


def test_a_snapshot_is_held_without_the_slot_that_would_keep_wal(
    any_postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    dsn = any_postgres_dsn()
    config = parse_config(
        {"name": "held", "postgres": {"dsn": dsn}, "tables": [{"name": "public.t"}]}, "test"
    )
    slots = "select count(*) from pg_replication_slots where database = current_database()"
    with _owner(dsn) as source, Pipeline.open(config) as pipeline:
        source.execute("create table t (id int); insert into t values (1)")
        with moment(pipeline, "verify") as (point, snapshot_name):
            source.execute("insert into t values (2)")
            wait_for(lambda: source.execute(slots).fetchone() == (0,))
            with connect(dsn) as other, under(other, snapshot_name):
                assert other.execute("select id from public.t").fetchall() == [(1,)]
            assert point < current_lsn(source)


def test_values_without_a_form_are_counted_range_by_range(any_postgres_dsn: NewDatabase) -> None:
    """A statement over all of a large table would keep its lock, and vacuum waiting, for hours."""
    with _owner(any_postgres_dsn()) as source:
        source.execute("create table t (id int, d date) with (fillfactor = 10)")
        source.execute(
            "insert into t select i, case when i % 100 = 0 then 'infinity' else '2024-01-01' end"
            "::date from generate_series(1, 2000) i"
        )
        [(oid,)] = source.execute("select 't'::regclass::oid::bigint").fetchall()
        asked = list[str]()

        class Asked:
            def execute(self, query: Any, parameters: Any = None) -> Any:
                asked.append(query if isinstance(query, str) else query.as_string(source))
                return source.execute(query, parameters)

        column = SimpleNamespace(
            name="d", source=SimpleNamespace(name="d", type="date"), mapping=mapping("date")
        )
        table = TableConfig(name="public.t", chunk_pages=16)
        lake: Any = SimpleNamespace(row=SimpleNamespace(oid=oid), table=table)
        counting: Any = Asked()
        columns: Any = [column]
        assert _at_source(counting, lake, columns, None) == {"d": 20}
        assert len([query for query in asked if "ctid" in query]) > 3
