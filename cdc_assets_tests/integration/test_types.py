"""A value is the same in the lake whether it came through the snapshot or through the log."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from uuid import UUID

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import NewLake

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
    "numeric(18,0)": ["999999999999999999", "-100000000", "0"],
    "numeric(18,18)": ["0.999999999999999999", "-0.000000000000000001"],
    "numeric(18,9)": ["-999999999.999999999", "10000.0001", "'NaN'"],
    "numeric(19,3)": ["9999999999999999.999"],
    "numeric(38,10)": ["0", "9999999999999999999999999999.9999999999", "0.0000000001"],
    "numeric": ["1e100", "'NaN'", "0.10", "'Infinity'"],
    "numeric(50,2)": ["1e40"],
    "text[]": [
        "'{}'",
        "array['a', 'b c', null, '', 'null', 'NULL', '\"', '\\', '{,}', E'x\\ny']",
        "'{{a},{b}}'",
        "'[0:0]={a}'",
    ],
    "int[]": ["array[1, null, -2]", "'{}'", "'[-1:1]={1,2,3}'"],
    "numeric(6,2)[]": ["array[1.50, null]", "array['NaN', -0.01]", "'{{1}}'"],
    "numeric(20,2)[]": ["array[1.50, null, 123456789012345678.90]"],
    "date[]": ["array['2024-02-29'::date, 'infinity', null]"],
    "timestamp[]": ["array['1999-12-31 23:59:59.999999'::timestamp, null]"],
    "smallint[]": ["array[-1, null, 32767]"],
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
    "pair": ["row(1, 'x y')", "row(1, null)", "row(null, null)"],
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


def test_every_type_has_one_value_on_both_paths(copied_lake: NewLake) -> None:
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
    with copied_lake(setup, "t") as opened:
        opened.execute(insert(1000))
        opened.flush()
        table = TableId("public", "t")
        opened.drain(table)
        rows = {row[0]: row[1:] for row in opened.rows(table)}
        assert len(rows) == 2 * count
        names = list(columns)
        for i in range(count):
            snapshot, logged = rows[i], rows[1000 + i]
            for name, left, right in zip(names, snapshot, logged, strict=True):
                assert repr(left) == repr(right), (columns[name][0], columns[name][1], i)
        lists, pairs = (list(VALUES).index(kind) for kind in ("int[]", "pair"))
        assert [rows[i][lists] for i in range(3)] == [[1, None, -2], [], [1, 2, 3]]
        assert [rows[i][pairs] for i in range(3)] == ['(1,"x y")', "(1,)", "(,)"]
        comparison = opened.verify()[0]
        assert comparison.equal, comparison


@pytest.mark.parametrize("policy", ["null", "clamp"])
def test_what_does_not_fit_follows_the_policy_on_both_paths(
    copied_lake: NewLake, policy: str
) -> None:
    setup = """
    create table t (id int primary key, d date, ts timestamptz, n numeric(5,2));
    insert into t values (1, 'infinity', '-infinity', 'NaN'), (2, '0044-03-15 BC', 'infinity', 1);
    """
    with copied_lake(
        setup,
        {"name": "t", "columns": {"unrepresentable": policy}},
    ) as opened:
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


def _text(random: Random) -> str:
    alphabet = "aZ09 \t\n\\\"'{},%$;:/é漢\U0001f600\u0001\u2028"
    return "".join(random.choice(alphabet) for _ in range(random.randrange(40)))


def _number(random: Random, whole: int, scale: int) -> str:
    if random.random() < 0.05:
        return "NaN"
    digits = "".join(random.choice("0123456789") for _ in range(random.randrange(1, whole + 1)))
    fraction = "".join(random.choice("0123456789") for _ in range(scale))
    return random.choice(["", "-"]) + digits + (f".{fraction}" if scale else "")


def _day(random: Random) -> str:
    if random.random() < 0.1:
        return random.choice(["infinity", "-infinity", "0044-03-15 BC", "25000-01-01"])
    month, day = random.randrange(1, 13), random.randrange(1, 29)
    return f"{random.randrange(1, 10000):04d}-{month:02d}-{day:02d}"


def _moment(random: Random) -> str:
    day = _day(random)
    if "infinity" in day or "BC" in day:
        return day
    clock = f"{random.randrange(24):02d}:{random.randrange(60):02d}:{random.randrange(60):02d}"
    return f"{day} {clock}.{random.randrange(10**6):06d}"


def _floating(random: Random, code: str) -> str:
    value = struct.unpack(code, random.randbytes(struct.calcsize(code)))[0]
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))


def _bytes(random: Random) -> str:
    return "\\x" + random.randbytes(random.randrange(30)).hex()


def _list(random: Random, element: Callable[[Random], str]) -> str:
    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    elements = [
        "NULL" if random.random() < 0.2 else quoted(element(random))
        for _ in range(random.randrange(5))
    ]
    return "{" + ",".join(elements) + "}"


def _fraction(random: Random) -> str:
    return random.choice(["", "-"]) + "0." + "".join(random.choices("0123456789", k=5))


RANDOM: dict[str, Callable[[Random], str]] = {
    "boolean": lambda r: r.choice("tf"),
    "smallint": lambda r: str(r.randint(-(2**15), 2**15 - 1)),
    "integer": lambda r: str(r.randint(-(2**31), 2**31 - 1)),
    "bigint": lambda r: str(r.randint(-(2**63), 2**63 - 1)),
    "real": lambda r: _floating(r, "f"),
    "double precision": lambda r: _floating(r, "d"),
    "numeric(38,10)": lambda r: _number(r, 28, 10),
    "numeric(5,5)": _fraction,
    "numeric": lambda r: _number(r, 60, 40),
    "text": _text,
    "varchar(40)": _text,
    "char(45)": _text,
    "bytea": _bytes,
    "date": _day,
    "timestamp": _moment,
    "timestamptz": _moment,
    "interval": lambda r: f"{r.randint(-999, 999)} mons {r.randint(-9999, 9999)} s",
    "uuid": lambda r: str(UUID(bytes=r.randbytes(16))),
    "jsonb": lambda r: json.dumps({_text(r).replace("\0", ""): [r.random(), _text(r)]}),
    "boolean[]": lambda r: _list(r, lambda r: r.choice("tf")),
    "bigint[]": lambda r: _list(r, lambda r: str(r.randint(-(2**63), 2**63 - 1))),
    "double precision[]": lambda r: _list(r, lambda r: _floating(r, "d")),
    "numeric(20,3)[]": lambda r: _list(r, lambda r: _number(r, 17, 3)),
    "text[]": lambda r: _list(r, _text),
    "bytea[]": lambda r: _list(r, _bytes),
    "date[]": lambda r: _list(r, _day),
    "timestamptz[]": lambda r: _list(r, _moment),
}


@pytest.mark.parametrize("seed", [1, 2])
def test_random_values_are_the_same_on_both_paths(new_lake: NewLake, seed: int) -> None:
    random, count = Random(seed), 400
    columns = ", ".join(f"c{i} {kind}" for i, kind in enumerate(RANDOM))
    rows = [
        [None if random.random() < 0.05 else make(random) for make in RANDOM.values()]
        for _ in range(count)
    ]
    insert = "insert into t values (%s" + "".join(f", %s::text::{kind}" for kind in RANDOM) + ")"
    setup = f"create table t (id int primary key, {columns});"
    with new_lake(setup, "t") as opened:

        def write(first: int) -> None:
            with opened.source.transaction(), opened.source.cursor() as cursor:
                cursor.executemany(
                    insert.encode(), [(first + i, *row) for i, row in enumerate(rows)]
                )

        write(0)
        opened.pin()
        opened.copy()
        write(count)
        opened.flush()
        table = TableId("public", "t")
        opened.drain(table)
        found = {row[0]: row[1:] for row in opened.rows(table)}
        assert len(found) == 2 * count
        for i in range(count):
            for kind, given, left, right in zip(
                RANDOM, rows[i], found[i], found[count + i], strict=True
            ):
                assert repr(left) == repr(right), (kind, given)
        assert opened.verify()[0].equal
