"""Comparable texts: equal values have the same text, which each side makes in its own way.

The source's text is what Postgres itself prints, in a SELECT of its own; the lake's is rendered
from the lake's value, by its actual lake type. Neither the type table of the copy and the log nor
its casts are used, so an error of theirs is seen and not cancelled out. Only where a value's text
isn't unique (floats) both sides are read as numbers.

A value that has no form in its lake type is treated by the column's policy, by rules that are
stated here in Postgres's SQL: it becomes NULL, or the end of the range, and is counted. So does an
array of several dimensions. An array that doesn't begin at 1 does so in the lake, and is counted.

Pure functions to SQL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from psycopg import sql
from pyspark.sql import types as T

# Postgres's types, as format_type spells them, with values that the lake type lacks.
_CALENDAR = {
    "date": ("0001-01-01", "9999-12-31", "10000-01-01"),
    "timestamp without time zone": (
        "0001-01-01 00:00:00",
        "9999-12-31 23:59:59.999999",
        "10000-01-01 00:00:00",
    ),
    "timestamp with time zone": (
        "0001-01-01 00:00:00+00",
        "9999-12-31 23:59:59.999999+00",
        "10000-01-01 00:00:00+00",
    ),
}
_NUMERIC = re.compile(r"\Anumeric\((\d+),(-?\d+)\)\Z")
_PRECISION = re.compile(r"\(\d+\)")


@dataclass(frozen=True, slots=True)
class SourceText:
    """How the source prints a column: ``text``, and ``lost``: whether the value has no form.

    Both are SQL expressions; ``lost`` is None where every value has one.
    """

    text: sql.Composable
    lost: sql.Composable | None


def source_text(name: str, postgres_type: str, lake: T.DataType, policy: str) -> SourceText:
    """How the source prints its column ``name`` for a lake column of type ``lake``."""
    column = sql.Identifier(name)
    if isinstance(lake, T.StringType):
        return SourceText(_printed(column), None)
    if not postgres_type.endswith("[]"):
        return _scalar(column, postgres_type, policy)
    element = _scalar(sql.SQL("e.v"), postgres_type.removesuffix("[]"), policy)
    flat = sql.SQL("coalesce(pg_catalog.array_ndims({}), 1) = 1").format(column)
    first = sql.SQL("coalesce(pg_catalog.array_lower({}, 1), 1) = 1").format(column)
    elements = sql.SQL("pg_catalog.unnest({}) with ordinality as e (v, n)").format(column)
    text = sql.SQL(
        "case when {0} is not distinct from null then null when {1} then pg_catalog.format('%s',"
        " array(select {2} from {3} order by e.n)) end"
    ).format(column, flat, element.text, elements)
    lost = sql.SQL("not ({} and {})").format(flat, first)
    if element.lost is not None:
        lost = sql.SQL("({} or exists (select from {} where {}))").format(
            lost, elements, element.lost
        )
    return SourceText(text, lost)


def _printed(value: sql.Composable) -> sql.Composable:
    """A value by its type's output function; ``is null`` would be true of a row of NULLs."""
    return sql.SQL(
        "case when {0} is distinct from null then pg_catalog.format('%s', {0}) end"
    ).format(value)


def _scalar(value: sql.Composable, postgres_type: str, policy: str) -> SourceText:
    printed = _printed(value)
    if (match := _NUMERIC.match(postgres_type)) is not None:
        precision, scale = int(match[1]), max(0, int(match[2]))
        largest = ("9" * (precision - scale) or "0") + ("." + "9" * scale if scale else "")
        lost = sql.SQL("{} = 'NaN'").format(value)  # numeric(p, s) has no infinity
        return SourceText(_by_policy(printed, [(lost, largest)], policy), lost)
    bounds = _CALENDAR.get(_PRECISION.sub("", postgres_type))
    if bounds is None:
        return SourceText(printed, None)
    first, last, beyond = bounds
    early = sql.SQL("{} < {}").format(value, sql.Literal(first))
    late = sql.SQL("{} >= {}").format(value, sql.Literal(beyond))
    return SourceText(
        _by_policy(printed, [(early, first), (late, last)], policy),
        sql.SQL("({} or {})").format(early, late),
    )


def _by_policy(
    printed: sql.Composable, rules: list[tuple[sql.Composable, str]], policy: str
) -> sql.Composable:
    if policy == "fail":
        return printed  # such a value isn't in the lake: it would be a difference
    cases = [
        sql.SQL("when {} then {}").format(
            lost, sql.Literal(end) if policy == "clamp" else sql.SQL("null")
        )
        for lost, end in rules
    ]
    return sql.SQL("case {} else {} end").format(sql.SQL(" ").join(cases), printed)


def comparable_text(text: str, lake: T.DataType) -> str:
    """The source's ``text`` in the form that is compared (a Spark SQL expression)."""
    if isinstance(lake, (T.FloatType, T.DoubleType)):
        return _number(text, lake)
    if isinstance(lake, T.ArrayType) and isinstance(lake.elementType, (T.FloatType, T.DoubleType)):
        # Numbers are never quoted.
        element = f"if(e = 'NULL', null, {_number('e', lake.elementType)})"
        parts = f"split(substring({text}, 2, length({text}) - 2), ',')"
        elements = f"if({text} = '{{}}', array(), transform({parts}, e -> {element}))"
        return f"if({text} is null, null, {_joined(elements)})"
    return text


def _number(text: str, lake: T.DataType) -> str:
    return f"cast(cast({text} as {lake.simpleString()}) as string)"


def lake_text(value: str, lake: T.DataType) -> str:
    """The comparable text of the lake's ``value`` (a Spark SQL expression)."""
    if isinstance(lake, T.ArrayType):
        rendered = f"transform({value}, e -> {lake_text('e', lake.elementType)})"
        return f"if({value} is null, null, {_joined(rendered)})"
    if isinstance(lake, T.BooleanType):
        return f"case {value} when true then 't' when false then 'f' end"
    if isinstance(lake, T.BinaryType):
        return f"concat('\\\\x', lower(hex({value})))"
    if isinstance(lake, T.TimestampType):
        return f"concat(cast({value} as string), '+00')"
    return f"cast({value} as string)"


def _joined(texts: str) -> str:
    """Texts as array_out prints them.

    It quotes what is empty, the word NULL, and what has braces, quotes, backslashes, commas or
    white space: https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO
    """
    quoted = (
        "if(e = '' or upper(e) = 'NULL' or e rlike '[{}\",\\\\\\\\\\\\s]',"
        " concat('\"', regexp_replace(e, '([\"\\\\\\\\])', '\\\\\\\\$1'), '\"'), e)"
    )
    elements = f"transform({texts}, e -> if(e is null, 'NULL', {quoted}))"
    return f"concat('{{', array_join({elements}, ','), '}}')"
