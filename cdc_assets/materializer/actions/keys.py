"""Deleting the rows of a batch's keys.

Iceberg passes over files and row groups by the bounds of their columns, but no join tells it any:
so the bounds of keys that are numbers are told. A few such keys are named one by one, which needs
no join at all. Keys of other types are data that may be secret, and aren't written in statements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.lake.values import as_lake, member
from cdc_assets.materializer.actions.commit import Deletion

# The types of keys that are numbers, and the least key of each that bounds are told of: of a lower
# one, Iceberg's ``truncate`` leaves the type, and a partition of it isn't found by any bound.
_NUMBERS = {"int": -(2**30), "bigint": -(2**62)}
# Of 300 keys the statement costs 0.24 s of CPU less than a join (of 1.9), of 3,000 it costs more.
_NAMED = 1_000
# Iceberg looks for at most so many named ones in a file's bounds. So few need no bounds of their
# own, which are other numbers again and again, in code that Spark has to compile then.
_LOOKED_FOR = 200

_ENDS = ("min", "max")
_GREATEST = 2**63 - 1

Bounds = Mapping[str, tuple[int, int]]
"""The least and the greatest of the keys, for columns of the key by their names in the lake."""


def of_keys(lake: LakeTable, keys: pa.Table, sent: Callable[[], DataFrame]) -> Deletion:
    """The rows of ``keys``, structs ``key`` of texts; ``sent`` gives them to Spark."""
    bounds = bounds_in(lake, keys["key"])
    if len(lake.key) > 1 or not bounds or len(keys) > _NAMED:
        return of_frame(lake, sent(), bounds)
    ((name, column),) = _numbers(lake, keys["key"]).items()
    named = f"t.{ticked(name)} in ({', '.join(map(str, column.to_pylist()))})"
    condition = named if len(keys) <= _LOOKED_FOR else f"{within(bounds)} and {named}"
    return Deletion(condition, scattered=len(keys) > 1)


def of_frame(lake: LakeTable, frame: DataFrame, bounds: Bounds) -> Deletion:
    """The rows of the keys in ``frame``, structs ``key`` of texts."""
    same = " and ".join(f"t.{ticked(c.name)} = s.c{i}" for i, c in enumerate(lake.key))
    condition = f"{same} and {within(bounds)}" if bounds else same
    return Deletion(condition, as_lake(frame, lake.key, "key"))


def bounds_of(lake: LakeTable) -> list[Column]:
    """Aggregates of a frame with structs ``key`` of texts, for :func:`bounds_from`."""
    found = []
    for column in _counted(lake):
        number = member("key", column.source.name).cast("bigint")
        found += [F.min(number), F.max(number)]
    return found


def bounds_from(lake: LakeTable, values: Sequence[int | None]) -> Bounds:
    """What the aggregates of :func:`bounds_of` say; nothing of a column that had better have none.

    Nor if there is no key.
    """
    pairs = zip(_counted(lake), values[::2], values[1::2], strict=True)
    return {
        column.name: (low, high)
        for column, low, high in pairs
        if low is not None and high is not None and low >= _NUMBERS[column.mapping.lake]
    }


def bounds_in(lake: LakeTable, keys: pa.ChunkedArray) -> Bounds:
    """The bounds of keys, structs of texts."""
    numbers = _numbers(lake, keys).values()
    extremes = [pc.min_max(column)[end].as_py() for column in numbers for end in _ENDS]
    return bounds_from(lake, extremes)


def _numbers(lake: LakeTable, keys: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
    return {  # by place: as a name, one that begins with a dot would be a path
        column.name: pc.struct_field(keys, [place]).cast(pa.int64())
        for place, column in enumerate(lake.key)
        if column in _counted(lake)
    }


def _counted(lake: LakeTable) -> list[LakeColumn]:
    return [c for c in lake.key if c.mapping.lake in _NUMBERS]


def has_bounds(lake: LakeTable) -> bool:
    """Whether rows of some keys may be looked for without reading all of the table."""
    return bool(_counted(lake))


def within(bounds: Bounds) -> str:
    """A condition of the table's rows ``t``."""
    conditions = []
    for name, pair in bounds.items():
        low, high = _rounded(*pair)
        conditions.append(f"t.{ticked(name)} between {low} and {high}")
    return " and ".join(conditions)


def _rounded(low: int, high: int) -> tuple[int, int]:
    """Bounds that are at most a quarter of their distance further out, and seldom other ones.

    They are part of the code that Spark compiles to look at each row: if it is the same as for
    earlier merges, the JVM has optimized it by now.
    """
    step = 1 << max(0, (high - low).bit_length() - 3)
    return low // step * step, min((high // step + 1) * step - 1, _GREATEST)
