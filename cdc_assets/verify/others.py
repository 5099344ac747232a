"""Columns that only the lake table has, and whether anything is in them."""

from __future__ import annotations

from pyspark.sql import functions as F

from cdc_assets.lake.spark.sql import ticked
from cdc_assets.verify.rows import Beside


def other_columns(beside: Beside) -> tuple[str, ...]:
    """A sentence for each column that only the lake has: why it is there, and its values."""
    if not beside.others:
        return ()
    loaded = beside.lake.load()
    ours = set(beside.lake.recorded(loaded).fields.values()) if loaded is not None else set[int]()
    ids = {f.name: f.field_id for f in loaded.schema().fields} if loaded is not None else {}
    counts = beside.rows.agg(
        F.count(F.lit(1)), *(F.count(F.col(ticked(name))) for name in beside.others)
    ).collect()[0]
    excluded = beside.lake.table.columns.exclude
    return tuple(
        f"{name} is in the lake only, "
        + (
            "excluded by the configuration"
            if name in excluded
            else "dropped at the source"
            if ids.get(name) in ours
            else "of another writer"
        )
        + f": {counts[number]:,} of {counts[0]:,} rows have a value"
        for number, name in enumerate(beside.others, 1)
    )
