"""Are there values that the lake table can't hold? They are NULL or clamped there."""

from __future__ import annotations

import dagster as dg
from pyspark.sql import SparkSession

from cdc_assets.dagster.names import TableAssets
from cdc_assets.lake.tables import LakeTable
from cdc_assets.messages.texts import described
from cdc_assets.pipeline import Pipeline
from cdc_assets.verify.representable import unrepresentable

NAME = "values_representable"
REMEDY = (
    "They are NULL or clamped in the lake, by columns.unrepresentable. To keep them as text set"
    " columns.types: {<column>: string}, then `cdc-assets --config FILE resync` the table."
)


def check_values(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, names: TableAssets
) -> dg.AssetCheckResult:
    """Warn with the number of values by column, since the table's copy."""
    lost = unrepresentable(pipeline, session, lake)
    said = ", ".join(f"{column}: {count:,}" for column, count in sorted(lost.items()))
    return dg.AssetCheckResult(
        asset_key=names.lake,
        check_name=NAME,
        passed=not lost,
        severity=dg.AssetCheckSeverity.WARN,
        description=described(f"Values that have no form in the lake: {said}. {REMEDY}")
        if lost
        else "Every value has a form in the lake.",
        metadata={f"lost of {column}": count for column, count in lost.items()},
    )
