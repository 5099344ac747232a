"""From staged text to the lake's values: what every mode's merge does with rows."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from cdc_assets.materializer.fold import member
from cdc_assets.spark.tables import LakeColumn, LakeTable


def names_of(lake: LakeTable) -> list[str]:
    """The source's columns that the lake has, as the lake calls them."""
    return [c.name for c in lake.columns]


def texts_of(lake: LakeTable) -> list[str]:
    """The same columns as the staged rows call them: as the source does."""
    return [c.source.name for c in lake.columns]


def as_lake(frame: DataFrame, columns: Sequence[LakeColumn], struct: str, *keep: str) -> DataFrame:
    """The members of ``struct``, cast from text to the lake's types; ``keep`` columns come along.

    A cast is SQL text over a column's name, so the members get plain names first.
    """
    flat = frame.select(
        *(member(struct, c.source.name).alias(f"text_{i}") for i, c in enumerate(columns)), *keep
    )
    return flat.select(
        *(
            F.expr(c.mapping.cast(f"text_{i}", c.policy)).alias(c.name)
            for i, c in enumerate(columns)
        ),
        *keep,
    )
