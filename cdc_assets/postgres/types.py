"""The one table of types: what a Postgres type is in the lake, and how both paths get there.

A value reaches the lake on two paths, and must be the same on both: the snapshot (a SELECT whose
result ADBC hands over as Arrow, ``select_expression`` and then ``snapshot.convert``) and the log
(Postgres's text form inside staged JSON, then ``TypeMapping.cast``). The SELECT sends a value as it
is where Arrow has a type for it, decimals as text, and everything else in its text form.

What a lake type can't hold (infinity, years outside 1 to 9999, NaN in a decimal, a
multi-dimensional array) follows the column's policy; a row is never dropped.

Pure functions; a property test runs both paths over generated values of every type.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from psycopg import sql

from cdc_assets.postgres.catalog import Column

Policy = Literal["null", "clamp", "fail"]

_ARROW = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp_ntz": pa.timestamp("us"),
    "timestamp": pa.timestamp("us", "UTC"),
}
_DECIMAL = re.compile(r"\Adecimal\((\d+),(\d+)\)\Z")
# Spark's decimals hold 38 digits.
MAX_PRECISION = 38
_NUMERIC = re.compile(r"\Anumeric\((\d+),(-?\d+)\)\Z")
_LENGTH = re.compile(r"\((\d+)\)")
# Types whose cast to text isn't their output function (pg_cast has a function of its own for them);
# format('%s') always calls the output function.
_TEXT_CAST_DIFFERS = frozenset({"inet", "cidr", "boolean", "character", '"char"'})


@dataclass(frozen=True, slots=True)
class TypeMapping:
    """How a column of one Postgres type is carried.

    ``lake`` is the Spark SQL type. ``native`` says that ADBC's Arrow value, or its elements, are
    the lake's. ``cast`` turns a Spark SQL expression of the text form into one of the lake type.
    """

    lake: str
    native: bool
    cast: Callable[[str, Policy], str]


def _plain(lake: str) -> Callable[[str, Policy], str]:
    """Casts of text that can't fail for a legal value."""
    return lambda text, _policy: f"cast({text} as {lake})"


def _identity(text: str, _policy: Policy) -> str:
    return text


def _boolean(text: str, _policy: Policy) -> str:
    return f"({text} = 't')"


def _bytes(text: str, _policy: Policy) -> str:
    return f"unhex(substring({text}, 3))"


def _calendar(lake: str, low: str, high: str) -> Callable[[str, Policy], str]:
    """Dates and timestamps: years 1 to 9999 as ``yyyy-…``; infinity and BC follow the policy."""

    def cast(text: str, policy: Policy) -> str:
        # '+00' is all that TimeZone=UTC ever prints; Spark's session is in UTC too.
        bare = f"left({text}, length({text}) - 3)" if lake == "timestamp" else text
        legal = f"(substring({text}, 5, 1) = '-' and right({text}, 2) != 'BC')"
        value = f"cast({bare} as {lake})"
        if policy == "fail":
            other = f"cast(raise_error(concat({text}, ' does not fit {lake}')) as {lake})"
        elif policy == "clamp":
            early = f"(startswith({text}, '-') or right({text}, 2) = 'BC')"
            other = f"if({early}, {lake} '{low}', {lake} '{high}')"
        else:
            other = f"cast(null as {lake})"
        return f"case when {text} is null then null when {legal} then {value} else {other} end"

    return cast


def _decimal(precision: int, scale: int) -> Callable[[str, Policy], str]:
    lake = f"decimal({precision},{scale})"

    def cast(text: str, policy: Policy) -> str:
        largest = "9" * (precision - scale) + ("." + "9" * scale if scale else "")
        special = f"{text} in ('NaN', 'Infinity', '-Infinity')"
        if policy == "fail":
            return f"cast({text} as {lake})"
        other = f"cast(null as {lake})"
        if policy == "clamp":  # NaN sorts above everything in Postgres
            other = f"cast(if({text} = '-Infinity', '-{largest}', '{largest}') as {lake})"
        return f"case when {special} then {other} else cast({text} as {lake}) end"

    return cast


# Possessive: Java's matcher recurses for each character that it may have to give back, until the
# stack overflows and takes the whole of Spark with it.
ELEMENT = r"""(?s)("[^"\\]*+(?:\\.[^"\\]*+)*+"|[^,{}"]++)"""


def _array(element: TypeMapping) -> Callable[[str, Policy], str]:
    """One-dimensional array literals, element by element.

    https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO: an element is quoted when it is
    empty, is the word NULL, or has braces, quotes, backslashes, commas or white space in it.
    """

    def cast(text: str, policy: Policy) -> str:
        tokens = f"regexp_extract_all({text}, r'{ELEMENT}', 1)"
        unquoted = (
            "case when e = 'NULL' then null when startswith(e, '\"')"
            r" then regexp_replace(substring(e, 2, length(e) - 2), r'(?s)\\(.)', '$1') else e end"
        )
        inner = element.cast("e", policy)
        values = f"transform(transform({tokens}, e -> {unquoted}), e -> {inner})"
        # A lower bound other than 1 ('[0:1]={…}') or a second dimension has no form in the lake.
        flat = f"(startswith({text}, '{{') and not startswith({text}, '{{{{'))"
        lake = f"array<{element.lake}>"
        if policy == "fail":
            other = f"cast(raise_error(concat({text}, ' does not fit {lake}')) as {lake})"
        else:
            other = f"cast(null as {lake})"
        return f"case when {text} is null then null when {flat} then {values} else {other} end"

    return cast


_TEXT = TypeMapping("string", native=False, cast=_identity)
_NATIVE: dict[str, TypeMapping] = {
    "boolean": TypeMapping("boolean", native=True, cast=_boolean),
    "smallint": TypeMapping("int", native=True, cast=_plain("int")),
    "integer": TypeMapping("int", native=True, cast=_plain("int")),
    "bigint": TypeMapping("bigint", native=True, cast=_plain("bigint")),
    "real": TypeMapping("float", native=True, cast=_plain("float")),
    "double precision": TypeMapping("double", native=True, cast=_plain("double")),
    "text": TypeMapping("string", native=True, cast=_identity),
    "character varying": TypeMapping("string", native=True, cast=_identity),
    "character": TypeMapping("string", native=True, cast=_identity),
    "bytea": TypeMapping("binary", native=True, cast=_bytes),
    "date": TypeMapping("date", native=True, cast=_calendar("date", "0001-01-01", "9999-12-31")),
    "timestamp without time zone": TypeMapping(
        "timestamp_ntz",
        native=True,
        cast=_calendar("timestamp_ntz", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"),
    ),
    "timestamp with time zone": TypeMapping(
        "timestamp",
        native=True,
        cast=_calendar("timestamp", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"),
    ),
}


def mapping(postgres_type: str, forced: str | None = None) -> TypeMapping:
    """The mapping of ``format_type``'s spelling; ``forced='string'`` keeps the text form."""
    if forced == "string":
        return _TEXT
    if postgres_type.endswith("[]"):
        element = mapping(postgres_type.removesuffix("[]"))
        if element is _TEXT or (element.lake == "string" and not element.native):
            return _TEXT
        return TypeMapping(f"array<{element.lake}>", element.native, cast=_array(element))
    if match := _NUMERIC.match(postgres_type):
        precision, scale = int(match[1]), int(match[2])
        if 0 <= scale <= precision <= MAX_PRECISION:
            lake = f"decimal({precision},{scale})"
            return TypeMapping(lake, native=False, cast=_decimal(precision, scale))
        return _TEXT
    return _NATIVE.get(_LENGTH.sub("", postgres_type), _TEXT)


def arrow_type(lake: str) -> pa.DataType:
    """The Arrow type of a Spark SQL type of a mapping."""
    if lake.startswith("array<"):
        return pa.list_(arrow_type(lake.removeprefix("array<").removesuffix(">")))
    if match := _DECIMAL.match(lake):
        return pa.decimal128(int(match[1]), int(match[2]))
    return _ARROW[lake]


def select_expression(
    column: Column, forced: str | None = None, policy: Policy = "null"
) -> sql.Composable:
    """How the snapshot's SELECT sends the column: as it is, or as its output function prints it."""
    name = sql.Identifier(column.name)
    found = mapping(column.type, forced)
    if found.lake.startswith("array<"):
        return _one_dimension(column, found, policy)
    if found.native:
        return name
    if _LENGTH.sub("", column.type) in _TEXT_CAST_DIFFERS:
        return sql.SQL(
            "case when {0} is not null then pg_catalog.format('%s', {0}) end as {0}"
        ).format(name)
    return sql.SQL("{0}::text as {0}").format(name)


def _one_dimension(column: Column, found: TypeMapping, policy: Policy) -> sql.Composable:
    """An array if it has a form in the lake: one dimension, counted from 1, or no element."""
    name = sql.Identifier(column.name)
    sent = sql.SQL("" if found.native else "::text[]")
    other: sql.Composable = sql.SQL("")
    if policy == "fail":  # a text that is no array: Postgres refuses and shows it, not the value
        other = sql.SQL(" else (left({0}::text, 0) || {1})::{2}{3}").format(
            name,
            sql.Literal(f"column {column.name}: a value does not fit {found.lake}"),
            sql.SQL(column.type),  # format_type's own spelling
            sent,
        )
    return sql.SQL(
        "case when coalesce(pg_catalog.array_ndims({0}), 1) = 1"
        " and coalesce(pg_catalog.array_lower({0}, 1), 1) = 1 then {0}{1}{2} end as {0}"
    ).format(name, sent, other)
