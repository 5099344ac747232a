"""From staged text to the lake's values: casting rows, for every mode's merge.

If a column's policy is ``fail``, as a key's is if its values may not fit, a value that doesn't fit
fails the statement, which then changes nothing; :func:`naming_refusals` names the column.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import command
from cdc_assets.postgres.types import counted_from_one

# The error that Spark raises: the column's attribute number, and nothing of its value.
_REFUSED = "cdc_assets: a value of column {} has no form in the lake"
_REFUSAL = re.compile(_REFUSED.format(r"(\d+)"))


def names_of(lake: LakeTable) -> list[str]:
    """The source's columns that the lake has, as the lake calls them."""
    return [c.name for c in lake.columns]


def texts_of(lake: LakeTable) -> list[str]:
    """The same columns by their names at the source, which staged rows use."""
    return [c.source.name for c in lake.columns]


def as_lake(
    frame: DataFrame,
    columns: Sequence[LakeColumn],
    struct: str,
    *keep: str,
    read_later: bool = False,
) -> DataFrame:
    """The members of ``struct``, cast from text to the lake's types; ``keep`` columns come along.

    ``read_later``: the values were read at the source, see :func:`of_later`. The columns are named
    c0, c1, … until :func:`named`, because their own names may clash with helpers.
    """
    value = of_later if read_later else typed
    flat = frame.select(
        *(member(struct, c.source.name).alias(f"text_{i}") for i, c in enumerate(columns)),
        *keep,
    )
    return flat.select(
        *(F.expr(value(c, f"text_{i}")).alias(f"c{i}") for i, c in enumerate(columns)),
        *keep,
    )


def named(columns: Sequence[LakeColumn]) -> list[Column]:
    """The columns of :func:`as_lake` by their own names."""
    return [F.col(f"c{i}").alias(c.name) for i, c in enumerate(columns)]


def typed(column: LakeColumn, text: str) -> str:
    """The column's value in the lake, from its text form; both are Spark SQL expressions."""
    value, fits = column.mapping.cast(text, column.policy), column.mapping.fits
    if column.policy != "fail" or fits is None:
        return value
    # An array's bounds are lost whatever the policy, but never a key's.
    loose = column.mapping.lake.startswith("array<") and not column.is_key
    return (
        f"case when {text} is null or {fits(counted_from_one(text) if loose else text)}"
        f" then {value} else cast(raise_error('{_REFUSED.format(column.source.number)}')"
        f" as {column.mapping.lake}) end"
    )


def of_later(column: LakeColumn, text: str) -> str:
    """:func:`typed` of a value that was read at the source, which may be ahead of the log.

    A number that fits only the wider type that the column has there by now is NULL: the change that
    wrote it is still to come.
    """
    lake, value, fits = column.mapping.lake, typed(column, text), column.mapping.fits
    if lake not in ("int", "bigint") and not lake.startswith("decimal"):
        return value
    known = f" or not {fits(text)}" if fits is not None else ""
    return f"case when try_cast({text} as {lake}) is not null{known} then {value} end"


def same_in_lake(column: LakeColumn, value: str) -> str:
    """An expression that is equal where two of the column's values are; NULL only for NULL.

    Spark takes -0.0 for 0.0, and drops the sign of a value that it groups by; Postgres prints it.
    """
    if column.mapping.lake in ("float", "double"):
        return f"cast({value} as string)"
    if column.mapping.lake in ("array<float>", "array<double>"):
        return f"transform({value}, e -> cast(e as string))"
    return value


@contextmanager
def naming_refusals(store: LogStore, lake: LakeTable) -> Iterator[None]:
    """Turn what :func:`typed` raises within Spark into a TableProblem that names the column.

    A key's column is text from the next copy on; until then the table is parked.
    """
    try:
        yield
    except PySparkException as error:
        found = _REFUSAL.search(str(error))
        column = next(
            (c for c in lake.columns if found and c.source.number == int(found[1])),
            None,
        )
        if column is None:
            raise
        raise refused(store, lake, column) from error


def refused(store: LogStore, lake: LakeTable, column: LakeColumn) -> TableProblem:
    """The problem of a column that got a value it can't hold; parks the table for a key's."""
    table, name = lake.row.table, column.name
    what = f"column {name} got a value that the lake's {column.mapping.lake} can't hold"
    if not column.is_key:
        return TableProblem(
            table,
            what,
            f"Set columns.unrepresentable to null or clamp; or columns.types: {{{name}: string}},"
            f" and then: {command('resync', table)}",
        )
    problem = TableProblem(
        table,
        f"{what}, and belongs to its key",
        f"The lake has {name} as text once it is copied anew: {command('resync', table)}",
    )
    store.keep_as_text(table, {column.source.number})
    store.park(table, problem.reason, lake.row.epoch)
    return problem


def member(struct: str, name: str) -> Column:
    """One field of a struct column, whatever is in its name."""
    return F.col(struct).getField(name)
