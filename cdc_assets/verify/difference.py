"""Differences between two sides of a comparison, by key and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_assets.lake.tables import LakeTable
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.key_names import NameKey

# As many differing keys as a person will read; the count covers all of them.
SHOWN_KEYS = 20


@dataclass(frozen=True, slots=True)
class Balance:
    """Rows of two sides, and keys that differ; ``keys`` names some of these."""

    source_rows: int
    lake_rows: int
    differing: int
    keys: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Rows of two sides, and how many distinct ones don't occur equally often on both."""

    source_rows: int
    lake_rows: int
    odd: int


def balance(
    read: DataFrame,
    theirs: DataFrame,
    lake: LakeTable,
    name: NameKey,
    *,
    at_least: bool = False,
) -> Balance:
    """Compare two sides (``rows.digested``); ``lake`` in ``theirs`` is how often a row counts.

    ``name``: from a row's key to its name in messages.

    A row that doesn't occur equally often on both sides differs; with ``at_least`` one that occurs
    less often in the lake.
    """
    odd_ones = "balance > 0" if at_least else "balance != 0"
    grouped = _balanced(_both(read, theirs), "key", "digest").persist()
    try:
        found = Totals(*map(int, grouped.agg(*_totals(odd_ones)).collect()[0]))
        if not found.odd:
            return Balance(found.source_rows, found.lake_rows, 0, (), ())
        odd = grouped.where(odd_ones)
        shown = (
            odd.groupBy("key")
            .agg(F.sum("source").alias("source"), F.sum("lake").alias("lake"))
            .orderBy("key")
            .limit(SHOWN_KEYS)
            .collect()
        )
        once = [r.key for r in shown if (r.source, r.lake) == (1, 1)]
        columns = _columns(read, theirs, lake, once) if once else {}
        keys = [
            f"{name(r.key)} (source {r.source}, lake {r.lake}"
            + (f": {', '.join(columns[r.key])})" if columns.get(r.key) else ")")
            for r in shown
        ]
        named = {name for names in columns.values() for name in names}
        return Balance(
            found.source_rows,
            found.lake_rows,
            odd.select("key").distinct().count(),
            tuple(keys),
            tuple(c.name for c in lake.columns if c.name in named),
        )
    finally:
        grouped.unpersist()


def totals(sides: Mapping[TableId, tuple[DataFrame, DataFrame]]) -> dict[TableId, Totals]:
    """How the two sides of each table compare, in one Spark job."""
    both = [
        _both(read, theirs).withColumn("number", F.lit(number))
        for number, (read, theirs) in enumerate(sides.values())
    ]
    if not both:
        return {}
    # A digest is one of all columns, the key's too.
    grouped = _balanced(reduce(DataFrame.unionByName, both), "number", "digest")
    rows = grouped.groupBy("number").agg(*_totals("balance != 0")).collect()
    found = {int(row[0]): Totals(*map(int, row[1:])) for row in rows}
    return {table: found.get(number, Totals(0, 0, 0)) for number, table in enumerate(sides)}


def _both(read: DataFrame, theirs: DataFrame) -> DataFrame:
    return read.select(
        "key", "digest", F.lit(1).alias("source"), F.lit(0).alias("lake")
    ).unionByName(theirs.select("key", "digest", F.lit(0).alias("source"), "lake"))


def _balanced(both: DataFrame, *by: str) -> DataFrame:
    """How often a row occurs on each side, and the balance of that."""
    sums = both.groupBy(*by).agg(F.sum("source").alias("source"), F.sum("lake").alias("lake"))
    return sums.withColumn("balance", F.col("source") - F.col("lake"))


def _totals(odd_ones: str) -> tuple[Column, ...]:
    return (
        F.coalesce(F.sum("source"), F.lit(0)),
        F.coalesce(F.sum("lake"), F.lit(0)),
        F.count_if(F.expr(odd_ones)),
    )


def _columns(
    read: DataFrame, theirs: DataFrame, lake: LakeTable, keys: Sequence[str]
) -> dict[str, list[str]]:
    """By key, the columns that differ, for keys that each side has once."""
    cells = [
        {row.key: row.cells for row in side.where(F.col("key").isin(list(keys))).collect()}
        for side in (read, theirs)
    ]
    return {
        key: [
            column.name
            for column, mine, others in zip(lake.columns, cells[0][key], cells[1][key], strict=True)
            if mine != others
        ]
        for key in keys
        if key in cells[0] and key in cells[1]
    }
