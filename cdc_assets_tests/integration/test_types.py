"""A value is the same in the lake whether it came through the snapshot or through the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.spark.server import SparkServer
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.lake_support import lake

pytestmark = pytest.mark.spark

# type -> SQL expressions of values; NULL is added to each.
VALUES = {
    "boolean": ["true", "false"],
    "smallint": ["-32768", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "real": ["'NaN'", "'-Infinity'", "3.4028235e38", "1e-45", "0.1", "'-0'"],
    "double precision": ["'NaN'", "'Infinity'", "1.7976931348623157e308", "5e-324", "0.1"],
    "text": ["''", "'ü€😀'", r"E'a\\b\"c\n\t\x01'", "'null'", "repeat('x', 100000)"],
    "varchar(20)": ["'abc '", "''"],
    "char(5)": ["'ab'", "'     '"],
    "bytea": [r"'\x'", r"'\x00ff5c22'"],
    "date": ["'0001-01-01'", "'9999-12-31'", "'infinity'", "'0044-03-15 BC'", "'12345-01-01'"],
    "timestamp": [
        "'0001-01-01'",
        "'9999-12-31 23:59:59.999999'",
        "'-infinity'",
        "'2024-02-29 1:2:3.45'",
    ],
    "timestamptz": ["'1900-01-01 00:00:00.000001+00'", "'infinity'", "'2024-06-30 23:59:59+02'"],
    "numeric(12,2)": ["0", "-9999999999.99", "0.01", "'NaN'"],
    "numeric(38,10)": ["0", "9999999999999999999999999999.9999999999", "0.0000000001"],
    "numeric": ["1e100", "'NaN'", "0.10", "'Infinity'"],
    "numeric(50,2)": ["1e40"],
    "text[]": [
        "'{}'",
        "array['a', 'b c', null, '', 'null', 'NULL', '\"', '\\', '{,}', E'x\\ny']",
        "'{{a},{b}}'",
        "'[0:0]={a}'",
    ],
    "int[]": ["array[1, null, -2]", "'{}'"],
    "numeric(6,2)[]": ["array[1.50, null]"],
    "timestamptz[]": ["array['2024-01-01 00:00:00+00'::timestamptz]"],
    "boolean[]": ["array[true, false, null]"],
    "bytea[]": [r"array['\x00'::bytea, '\x5c'::bytea]"],
    "float8[]": ["array['NaN'::float8, 1.5]"],
    "uuid": ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"],
    "json": [r"""'{"a":  "\u00e9", "b": [1, null]}'"""],
    "jsonb": [r"""'{"a": "\"", "b": {"c": 1.0}}'"""],
    "mood": ["'so so'"],
    "interval": ["'1 year 2 days 03:04:05.6'", "'-1 day'"],
    "time": ["'23:59:59.999999'"],
    "timetz": ["'12:00:00+02'"],
    "inet": ["'10.0.0.1'", "'10.0.0.0/8'"],
    "cidr": ["'10.0.0.0/8'"],
    "macaddr": ["'08:00:2b:01:02:03'"],
    "int4range": ["'[1,5)'", "'empty'"],
    "bit(4)": ["b'1010'"],
    "varbit": ["b'101'"],
    "money": ["'12.34'"],
    "point": ["'(1.5,2)'"],
    "tsvector": ["'a:1 b:2'"],
    "pair": ["row(1, 'x y')"],
    "positive": ["42"],
    "words": ["array['a']"],
    '"char"': ["'c'"],
    "name": ["'some_name'"],
    "oid": ["123"],
}
TYPES = """
create type mood as enum ('happy', 'so so');
create type pair as (a int, b text);
create domain positive as int check (value > 0);
create domain words as text[];
"""


def test_every_type_has_one_value_on_both_paths(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    columns = {
        f"c{i}": (kind, [*values, "null"]) for i, (kind, values) in enumerate(VALUES.items())
    }
    listed = ", ".join(f"{name} {kind}" for name, (kind, _) in columns.items())
    count = max(len(values) for _, values in columns.values())

    def insert(first: int) -> str:
        rows = [
            f"({first + i}, " + ", ".join(v[i % len(v)] for _, v in columns.values()) + ")"
            for i in range(count)
        ]
        return ";".join(f"insert into t values {row}" for row in rows)

    setup = f"{TYPES} create table t (id int primary key, {listed}); {insert(0)};"
    with lake(postgres_dsn(), spark_server.ensure(), setup, "t") as opened:
        opened.pin()
        opened.copy()
        opened.execute(insert(1000))
        opened.flush()
        table = TableId("public", "t")
        opened.drain(table)
        rows = {row[0]: row[1:] for row in opened.rows(table)}
        assert len(rows) == 2 * count
        names = list(columns)
        for i in range(count):
            copied, logged = rows[i], rows[1000 + i]
            for name, left, right in zip(names, copied, logged, strict=True):
                assert repr(left) == repr(right), (columns[name][0], columns[name][1], i)
        comparison = opened.verify()[0]
        assert comparison.equal, comparison


@pytest.mark.parametrize("policy", ["null", "clamp"])
def test_what_does_not_fit_follows_the_policy_on_both_paths(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path, policy: str
) -> None:
    setup = """
    create table t (id int primary key, d date, ts timestamptz, n numeric(5,2));
    insert into t values (1, 'infinity', '-infinity', 'NaN'), (2, '0044-03-15 BC', 'infinity', 1);
    """
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        setup,
        {"name": "t", "columns": {"unrepresentable": policy}},
    ) as opened:
        opened.pin()
        opened.copy()
        opened.execute("insert into t select id + 10, d, ts, n from t")
        opened.flush()
        table = TableId("public", "t")
        opened.drain(table)
        rows = {row[0]: tuple(str(value) for value in row[1:]) for row in opened.rows(table)}
        expected = {
            "null": [("None", "None", "None"), ("None", "None", "1.00")],
            "clamp": [
                ("9999-12-31", "0001-01-01 00:00:00", "999.99"),
                ("0001-01-01", "9999-12-31 23:59:59.999999", "1.00"),
            ],
        }[policy]
        assert [rows[1], rows[2]] == expected
        assert [rows[11], rows[12]] == expected
        assert opened.verify()[0].equal
