"""Differences between two sides of a comparison, by key and column."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.messages.texts import counted
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.key_names import NameKey
from cdc_assets.verify.rows import Beside, Shape

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


Outcome = Literal["equal", "different", "not compared"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing one table. ``keys`` names some that differ, ``columns`` where.

    ``problem``: why it wasn't compared, ``since`` when. ``lost``: by column, how many values of the
    source have no form in the lake; they are compared as the column's policy changes them.
    ``others``: remarks on columns that only the lake has. ``repaired``: keys that were corrected
    before that; ``unrepaired``: why those that differ weren't, though that was asked for.
    """

    table: TableId
    lsn: Lsn | None
    source_rows: int = 0
    lake_rows: int = 0
    differing: int = 0
    keys: tuple[str, ...] = ()
    problem: str | None = None
    seconds: float = 0.0
    columns: tuple[str, ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    since: datetime | None = None
    repaired: int = 0
    unrepaired: str | None = None

    @property
    def outcome(self) -> Outcome:
        if self.problem is not None:
            return "not compared"
        return "different" if self.differing else "equal"

    @property
    def remarks(self) -> list[str]:
        """Remarks on the table, even if it is equal."""
        was = "was" if self.repaired == 1 else "were"
        repaired = [f"{counted(self.repaired, 'key')} {was} corrected"] if self.repaired else []
        repaired += [f"not repaired: {self.unrepaired}"] if self.unrepaired else []
        lost = [
            f"{name}: {count:,} values have no form in the lake, and were compared as what"
            " columns.unrepresentable makes of them"
            for name, count in sorted(self.lost.items())
        ]
        return [*repaired, *lost, *self.others]

    @property
    def equal(self) -> bool:
        return self.outcome == "equal"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """How many rows there are, and sums of their hashes, which don't depend on the rows' order.

    Equal rows have equal fingerprints. Other rows have the same one by chance once in 2**128: two
    hashes of 64 bits a row are summed, each in two halves.
    """

    rows: int = 0
    sums: tuple[int, ...] = (0, 0, 0, 0)

    @staticmethod
    def of(row: Sequence[int | None]) -> Fingerprint:
        """From a row of :func:`fingerprints`, without what it is grouped by."""
        rows, *sums = (value or 0 for value in row)
        return Fingerprint(rows, tuple(sums))

    def __add__(self, more: Fingerprint) -> Fingerprint:
        """Of the rows of both."""
        sums = zip(self.sums, more.sums, strict=True)
        return Fingerprint(self.rows + more.rows, tuple(map(sum, sums)))


_SEEDS = (1, 2)
_LOW_HALF = 0xFFFF_FFFF


def fingerprints(frame: DataFrame, cells: Sequence[Column], times: Column, *by: str) -> DataFrame:
    """A row for each group of ``frame``: ``by``, how many rows it has, and four sums of hashes.

    ``cells``: the texts of a row; ``times``: how often it counts, a long. The sums don't overflow
    below 2**31 rows.
    """
    # A hash passes over NULLs, so a flag stands before each cell.
    flagged = [part for cell in cells for part in (cell.isNull(), cell)]
    hashes = [F.xxhash64(F.lit(seed), *flagged).alias(f"h{seed}") for seed in _SEEDS]
    halves = [
        half
        for seed in _SEEDS
        for half in (F.col(f"h{seed}").bitwiseAND(F.lit(_LOW_HALF)), F.shiftright(f"h{seed}", 32))
    ]
    return (
        frame.select(*by, times.alias("times"), *hashes)
        .groupBy(*by)
        .agg(F.sum("times"), *(F.sum(F.col("times") * half) for half in halves))
    )


def odd_keys(
    read: DataFrame, theirs: DataFrame, places: Sequence[int], most: int
) -> dict[tuple[str | None, ...], bool]:
    """The texts of keys that differ, by the cells at ``places``, and whether the source has it.

    No more than ``most``.
    """
    shown = [
        side.select(
            "key",
            F.array(*(F.col("cells")[place] for place in places)).alias("texts"),
            F.lit(number).alias("at_source"),
        )
        for side, number in ((read, 1), (theirs, 0))
    ]
    odd = _balanced(read, theirs).where("balance != 0").select("key").distinct()
    texts = shown[0].unionByName(shown[1]).join(odd, "key", "left_semi")
    found = texts.groupBy("texts").agg(F.max("at_source").alias("at_source")).limit(most)
    return {tuple(row.texts): bool(row.at_source) for row in found.collect()}


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
    grouped = _balanced(read, theirs).persist()
    try:
        totals = (F.coalesce(F.sum(side), F.lit(0)) for side in ("source", "lake"))
        counts = grouped.agg(*totals, F.count_if(F.expr(odd_ones))).collect()[0]
        source_rows, lake_rows, odd_rows = map(int, counts)
        if not odd_rows:
            return Balance(source_rows, lake_rows, 0, (), ())
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
            source_rows,
            lake_rows,
            odd.select("key").distinct().count(),
            tuple(keys),
            tuple(c.name for c in lake.columns if c.name in named),
        )
    finally:
        grouped.unpersist()


def _balanced(read: DataFrame, theirs: DataFrame) -> DataFrame:
    """How often a row occurs on each side, and the balance of that."""
    both = read.select(
        "key", "digest", F.lit(1).alias("source"), F.lit(0).alias("lake")
    ).unionByName(theirs.select("key", "digest", F.lit(0).alias("source"), "lake"))
    sums = both.groupBy("key", "digest").agg(
        F.sum("source").alias("source"), F.sum("lake").alias("lake")
    )
    return sums.withColumn("balance", F.col("source") - F.col("lake"))


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


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides of a table as they were compared at ``point``, alone.

    ``snapshot_name``: a snapshot of the source at that point, ``shape`` the source's then.
    ``offset``: up to where the log was applied at some moment before it. ``state``: the lake's.
    """

    beside: Beside
    read: DataFrame
    theirs: DataFrame
    point: Lsn
    snapshot_name: str
    shape: Shape
    offset: int
    state: LakeState
    balance: Balance


Mend = Callable[[Compared], int]
"""Corrects what differs; how many keys. Raises CdcError where it can't be done."""
