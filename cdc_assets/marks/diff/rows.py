"""Comparing the rows of two lakes, each read by a session of its own.

One session can't have both: a SQL catalog's tables are known by the catalog's name, which is the
same in every lake of ours. So each side is reduced to fingerprints of its rows in buckets of keys
(the first pass, which is the only one where nothing differs); of the buckets that differ, the
hashes of keys and rows are fetched and matched here, up to ``MOST_ROWS``; and of the keys that
differ, some are fetched themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_assets.lake.spark.sql import ours
from cdc_assets.lake.tables import LakeTable
from cdc_assets.verify.difference import SHOWN_KEYS, Fingerprint, fingerprints
from cdc_assets.verify.key_names import NameKey
from cdc_assets.verify.rows import TIMES, as_key

# The first pass brings a row for each here; a differing row brings its bucket's rows.
BUCKETS = 4_096
# Rows of differing buckets that are fetched of each side, as three numbers each: 100 MB or less.
MOST_ROWS = 2_000_000
# Different rows of the keys that are shown: a damaged lake may have many of one key.
_SHOWN_ROWS = 10 * SHOWN_KEYS
_BUCKET, _KEY, _ROW = ours("bucket"), ours("key"), ours("row")
_KEY_SEED, _ROW_SEED = 3, 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of both sides, and keys that differ, or ``at_least`` so many; ``keys`` names some."""

    blue: int
    green: int
    differing: int = 0
    at_least: bool = False
    keys: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


def cells(frame: DataFrame, expressions: Sequence[str]) -> DataFrame:
    """The texts of rows, c0 and so on, with how often each counts."""
    texts = [F.expr(text).alias(f"c{place}") for place, text in enumerate(expressions)]
    return frame.select(F.col(TIMES).cast("long").alias(TIMES), *texts)


def compare_rows(lake: LakeTable, blue: DataFrame, green: DataFrame, name: NameKey) -> Rows:
    """Compare two frames of :func:`cells` of the columns of ``lake``."""
    with ThreadPoolExecutor(2) as pool:
        hashed = [_hashed(side, lake) for side in (blue, green)]
        one, other = pool.map(_fingerprints, hashed, [len(lake.columns)] * 2)
        totals = [sum(print_.rows for print_ in side.values()) for side in (one, other)]
        odd = sorted(b for b in one.keys() | other.keys() if one.get(b) != other.get(b))
        if not odd:
            return Rows(totals[0], totals[1])
        looked = _affordable(odd, one, other)
        matched = _matched(*pool.map(_rows_of, hashed, [looked] * 2))
        found = [*dict.fromkeys(matched[_KEY].to_pylist())]
        shown = sorted(found)[:SHOWN_KEYS]
        sides = [*pool.map(_shown, hashed, [lake] * 2, [shown] * 2)]
    keys, columns = _told(lake, sides, name)
    return Rows(
        totals[0], totals[1], max(1, len(found)), len(looked) < len(odd), tuple(keys), columns
    )


def _hashed(frame: DataFrame, lake: LakeTable) -> DataFrame:
    places = [i for i, c in enumerate(lake.columns) if c.is_key] or [*range(len(lake.columns))]

    def of(seed: int, some: Sequence[int]) -> Column:
        # A hash passes over NULLs, so a flag stands before each cell.
        flagged = [p for i in some for p in (F.col(f"c{i}").isNull(), F.col(f"c{i}"))]
        return F.xxhash64(F.lit(seed), *flagged)

    key = of(_KEY_SEED, places)
    return frame.withColumns(
        {
            _KEY: key,
            _ROW: of(_ROW_SEED, range(len(lake.columns))),
            _BUCKET: F.pmod(key, F.lit(BUCKETS)),
        }
    )


def _fingerprints(frame: DataFrame, width: int) -> dict[int, Fingerprint]:
    texts = [F.col(f"c{place}") for place in range(width)]
    rows = fingerprints(frame, texts, F.col(TIMES), _BUCKET).collect()
    return {int(row[0]): Fingerprint.of(row[1:]) for row in rows}


def _affordable(
    odd: Sequence[int], blue: Mapping[int, Fingerprint], green: Mapping[int, Fingerprint]
) -> list[int]:
    """The first of the ``odd`` buckets, one at least, with MOST_ROWS rows a side or less."""
    taken, nothing, most = list[int](), Fingerprint(), 0
    for bucket in odd:
        most += max(abs(side.get(bucket, nothing).rows) for side in (blue, green))
        if taken and most > MOST_ROWS:
            break
        taken.append(bucket)
    return taken


def _rows_of(frame: DataFrame, buckets: Sequence[int]) -> pa.Table:
    some = frame if len(buckets) == BUCKETS else frame.where(F.col(_BUCKET).isin([*buckets]))
    return _summed(some, _KEY, _ROW).toArrow()


def _summed(rows: DataFrame, *by: str) -> DataFrame:
    """Equal rows once, with how often they count: a table without a key may have many."""
    sums = rows.groupBy(*by).agg(F.sum(TIMES).alias(TIMES))
    return sums.where(F.col(TIMES) != 0)


def _matched(blue: pa.Table, green: pa.Table) -> pa.Table:
    """The rows that don't occur equally often on both sides."""
    minus = green.set_column(2, TIMES, pc.negate(green[TIMES]))
    both = pa.concat_tables([blue.select([_KEY, _ROW, TIMES]), minus.cast(blue.schema)])
    sums = both.group_by([_KEY, _ROW]).aggregate([(TIMES, "sum")])
    return sums.filter(pc.not_equal(sums[f"{TIMES}_sum"], 0))


_Shown = dict[int, tuple[str, list[list[str | None]], int]]
"""By a key's hash, its text, its rows' cells, and how many rows it has."""


def _shown(frame: DataFrame, lake: LakeTable, keys: Sequence[int]) -> _Shown:
    texts = {place: F.col(f"c{place}") for place in range(len(lake.columns))}
    some = frame.where(F.col(_KEY).isin([*keys])).select(
        _KEY, as_key(lake, texts).alias("text"), F.array(*texts.values()).alias("cells"), TIMES
    )
    rows = _summed(some, _KEY, "text", "cells").limit(_SHOWN_ROWS).collect()
    found: _Shown = {}
    for key, text, row, times in rows:
        _, there, count = found.get(key, (text, [], 0))
        found[key] = (text, [*there, row], count + times)
    return found


def _told(
    lake: LakeTable, sides: Sequence[_Shown], name: NameKey
) -> tuple[list[str], tuple[str, ...]]:
    """The names of the keys that are shown, each with its differing columns, and all of those."""
    told, odd = list[tuple[str, str]](), set[str]()
    blue, green = sides
    for key in blue.keys() | green.keys():
        text = (blue.get(key) or green[key])[0]
        counts = [side[key][2] if key in side else 0 for side in sides]
        said = f"blue {counts[0]}, green {counts[1]}"
        if counts == [1, 1] and key in blue and key in green:
            pairs = zip(lake.columns, blue[key][1][0], green[key][1][0], strict=True)
            names = [column.name for column, one, other in pairs if one != other]
            said += f": {', '.join(names)}" if names else ""
            odd.update(names)
        told.append((text, f"{name(text)} ({said})"))
    columns = tuple(column.name for column in lake.columns if column.name in odd)
    return [said for _, said in sorted(told)], columns
