"""The one table of types: each Postgres type's form in the lake, and how both paths get there.

A value reaches the lake on two paths, and must be the same on both: the snapshot (a SELECT whose
rows COPY sends in binary: ``select_expression``, ``copy_out.values`` and then ``snapshot.convert``)
and the log (Postgres's text form inside staged JSON, then ``TypeMapping.cast``). The SELECT sends a
value as it is where Arrow has a type for it, and everything else in its text form.

A value that a lake type can't hold (infinity, years outside 1 to 9999, NaN in a decimal, a
multi-dimensional array) follows the column's policy; a row is never dropped. Key columns have to be
exact: different keys have to stay different.

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
from cdc_assets.postgres.copy_out.kinds import MAX_DIGITS

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
# Types whose cast to text is their output function, too: the cast saves half a microsecond a value.
_CASTS_PRINT = frozenset({"numeric", "uuid", "json", "jsonb"})
# A text that Postgres is made to refuse as a number: its error shows the text.
_NO_LIST = "column {}: no list is like it"
_REFUSED_ARRAY = re.compile(r'"column (.*): no list is like it"', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TypeMapping:
    """How a column of one Postgres type is carried.

    ``lake`` is the Spark SQL type. ``native``: the snapshot's SELECT sends the value as it is, and
    otherwise its text form; ``sent`` is what COPY sends then (``copy_out.values.Kind``). ``cast``
    turns a Spark SQL expression of the text form into one of the lake type; under policy ``fail``
    it gives NULL for a value that doesn't fit, which ``fits`` finds first. ``fits`` is the
    condition that the lake's value is exactly the text's; None where every value fits.
    """

    lake: str
    sent: str
    native: bool
    cast: Callable[[str, Policy], str]
    fits: Callable[[str], str] | None = None


def _plain(lake: str) -> Callable[[str, Policy], str]:
    """Casts of text that can't fail for a legal value."""
    return lambda text, _policy: f"cast({text} as {lake})"


def _identity(text: str, _policy: Policy) -> str:
    return text


def _boolean(text: str, _policy: Policy) -> str:
    return f"({text} = 't')"


def _bytes(text: str, _policy: Policy) -> str:
    return f"unhex(substring({text}, 3))"


def _calendar(lake: str, low: str, high: str) -> TypeMapping:
    """Dates and timestamps: years 1 to 9999 as ``yyyy-…``; infinity and BC follow the policy."""

    def fits(text: str) -> str:
        return f"(substring({text}, 5, 1) = '-' and right({text}, 2) != 'BC')"

    def cast(text: str, policy: Policy) -> str:
        # '+00' is all that TimeZone=UTC ever prints; Spark's session is in UTC too.
        bare = f"left({text}, length({text}) - 3)" if lake == "timestamp" else text
        value = f"cast({bare} as {lake})"
        other = f"cast(null as {lake})"
        if policy == "clamp":
            early = f"(startswith({text}, '-') or right({text}, 2) = 'BC')"
            other = f"if({early}, {lake} '{low}', {lake} '{high}')"
        return f"case when {text} is null then null when {fits(text)} then {value} else {other} end"

    sent = "date" if lake == "date" else "timestamp"
    return TypeMapping(lake, sent, native=True, cast=cast, fits=fits)


def _decimal(precision: int, scale: int) -> TypeMapping:
    lake = f"decimal({precision},{scale})"

    def fits(text: str) -> str:
        return f"({text} not in ('NaN', 'Infinity', '-Infinity'))"

    def cast(text: str, policy: Policy) -> str:
        largest = "9" * (precision - scale) + ("." + "9" * scale if scale else "")
        other = f"cast(null as {lake})"
        if policy == "clamp":  # NaN sorts above everything in Postgres
            other = f"cast(if({text} = '-Infinity', '-{largest}', '{largest}') as {lake})"
        return (
            f"case when {text} is null then null"
            f" when {fits(text)} then cast({text} as {lake}) else {other} end"
        )

    native = precision <= MAX_DIGITS
    return TypeMapping(lake, "numeric" if native else "text", native, cast=cast, fits=fits)


# Possessive: Java's matcher recurses for each character that it may have to give back, until the
# stack overflows and takes the whole of Spark with it.
ELEMENT = r"""(?s)("[^"\\]*+(?:\\.[^"\\]*+)*+"|[^,{}"]++)"""
_UNQUOTED = (
    "case when e = 'NULL' then null when startswith(e, '\"')"
    r" then regexp_replace(substring(e, 2, length(e) - 2), r'(?s)\\(.)', '$1') else e end"
)


def counted_from_one(text: str) -> str:
    """An array's text form without the bounds that Postgres prints if they aren't the usual ones.

    ``[0:1]={a,b}`` has a lower bound that no list has; its elements are those of ``{a,b}``.
    """
    return f"if(startswith({text}, '['), substring({text}, locate('=', {text}) + 1), {text})"


def _array(element: TypeMapping) -> TypeMapping:
    """One-dimensional array literals, element by element.

    https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO: an element is quoted when it is
    empty, is the word NULL, or has braces, quotes, backslashes, commas or white space in it.
    """
    lake = f"array<{element.lake}>"

    def elements(body: str) -> str:
        return f"transform(regexp_extract_all({body}, r'{ELEMENT}', 1), e -> {_UNQUOTED})"

    def fits(text: str) -> str:
        flat = f"startswith({text}, '{{') and not startswith({text}, '{{{{')"
        if element.fits is None:
            return f"({flat})"
        return f"({flat} and forall({elements(text)}, e -> e is null or {element.fits('e')}))"

    def cast(text: str, policy: Policy) -> str:
        body = counted_from_one(text)
        values = f"transform({elements(body)}, e -> {element.cast('e', policy)})"
        # A second dimension has no form in the lake.
        return (
            f"case when {text} is null or startswith({body}, '{{{{')"
            f" then cast(null as {lake}) else {values} end"
        )

    return TypeMapping(lake, f"{element.sent}[]", element.native, cast=cast, fits=fits)


_TEXT = TypeMapping("string", "text", native=False, cast=_identity)
_NATIVE: dict[str, TypeMapping] = {
    "boolean": TypeMapping("boolean", "bool", native=True, cast=_boolean),
    "smallint": TypeMapping("int", "int2", native=True, cast=_plain("int")),
    "integer": TypeMapping("int", "int4", native=True, cast=_plain("int")),
    "bigint": TypeMapping("bigint", "int8", native=True, cast=_plain("bigint")),
    "real": TypeMapping("float", "float4", native=True, cast=_plain("float")),
    "double precision": TypeMapping("double", "float8", native=True, cast=_plain("double")),
    "text": TypeMapping("string", "text", native=True, cast=_identity),
    "character varying": TypeMapping("string", "text", native=True, cast=_identity),
    "character": TypeMapping("string", "text", native=True, cast=_identity),
    "bytea": TypeMapping("binary", "bytea", native=True, cast=_bytes),
    "date": _calendar("date", "0001-01-01", "9999-12-31"),
    "timestamp without time zone": _calendar(
        "timestamp_ntz", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"
    ),
    "timestamp with time zone": _calendar(
        "timestamp", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"
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
        return _array(element)
    if match := _NUMERIC.match(postgres_type):
        precision, scale = int(match[1]), int(match[2])
        if 0 <= scale <= precision <= MAX_PRECISION:
            return _decimal(precision, scale)
        return _TEXT
    return _NATIVE.get(_LENGTH.sub("", postgres_type), _TEXT)


def arrow_type(lake: str) -> pa.DataType:
    """The Arrow type of a Spark SQL type of a mapping."""
    if lake.startswith("array<"):
        return pa.list_(arrow_type(lake.removeprefix("array<").removesuffix(">")))
    if match := _DECIMAL.match(lake):
        return pa.decimal128(int(match[1]), int(match[2]))
    return _ARROW[lake]


def text_form(value: sql.Composable) -> sql.Composable:
    """A value as its output function prints it, which is the very text that the log has.

    A cast to text may be another function. ``is not null`` is false for a composite with a NULL
    field, though it isn't NULL itself.
    """
    return sql.SQL(
        "case when {0} is distinct from null then pg_catalog.format('%s', {0}) end"
    ).format(value)


def select_expression(
    column: Column, found: TypeMapping, policy: Policy, *, is_key: bool
) -> sql.Composable:
    """How the snapshot's SELECT sends the column: as it is, or as its output function prints it.

    Under policy ``fail`` an array that has no form in the lake fails the SELECT
    (:func:`refused_array`).
    """
    name = sql.Identifier(column.name)
    sent = name if found.native else text_form(name)
    if found.lake.startswith("array<"):
        sent = _list(column, found, refuse=policy == "fail", shift=not is_key)
    elif not found.native and column.type.partition("(")[0] in _CASTS_PRINT:
        sent = sql.SQL("{}::text").format(name)
    return sql.SQL("{} as {}").format(sent, name)


def _list(column: Column, found: TypeMapping, *, refuse: bool, shift: bool) -> sql.Composable:
    """One-dimensional array. ``shift``: one with another lower bound is made to begin at 1."""
    flat = "coalesce(pg_catalog.array_ndims({0}), 1) = 1"
    usual = "coalesce(pg_catalog.array_lower({0}, 1), 1) = 1"
    cases = [f"when {flat} and {usual} then {{0}}{{1}}"]
    if shift:
        cases.append("when pg_catalog.array_ndims({0}) = 1 then ({0})[:]{1}")
    if refuse:  # a text that is no number: Postgres's error shows it, not the value
        cases.append("else ({0})[:(left({0}::text, 0) || {2})::int4]{1}")
    return sql.SQL(f"case {' '.join(cases)} end").format(
        sql.Identifier(column.name),
        sql.SQL("" if found.native else "::text[]"),
        sql.Literal(_NO_LIST.format(column.name)),
    )


def refused_array(message: str) -> str | None:
    """The column whose array Postgres refused by :func:`select_expression`; None if none."""
    found = _REFUSED_ARRAY.search(message)
    return found[1] if found else None
