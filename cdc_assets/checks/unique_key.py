"""Is every key in the lake table once? Merges must keep it so; this asks the table itself."""

from __future__ import annotations

import dagster as dg
from pyspark.sql import SparkSession

from cdc_assets.assets.names import TableAssets
from cdc_assets.spark.tables import LakeTable, ticked

NAME = "primary_key_unique"


def check_unique_key(
    session: SparkSession, lake: LakeTable, names: TableAssets
) -> dg.AssetCheckResult:
    """Count the keys that stand more than once; a table without a key passes, and says so."""
    if lake.row.mode == "append":
        return dg.AssetCheckResult(
            asset_key=names.lake,
            check_name=NAME,
            passed=True,
            description=f"{names.table} is in mode append: a key has a row for each change.",
        )
    if not lake.key:
        return dg.AssetCheckResult(
            asset_key=names.lake,
            check_name=NAME,
            passed=True,
            description=f"{names.table} has no key: duplicates are legal, nothing is checked.",
        )
    key = ", ".join(ticked(column.name) for column in lake.key)
    counted = session.sql(
        f"select count(*), coalesce(sum(copies), 0) from (select {key}, count(*) as copies"
        f" from {lake.sql_name} group by {key}) where copies > 1"
    ).first()
    assert counted is not None  # an aggregate without grouping has one row
    keys, rows = int(counted[0]), int(counted[1])
    said = f"{keys:,} keys ({key}) stand more than once, in {rows:,} rows."
    return dg.AssetCheckResult(
        asset_key=names.lake,
        check_name=NAME,
        passed=not keys,
        severity=dg.AssetCheckSeverity.ERROR,
        description=f"Every key ({key}) stands once." if not keys else said,
        metadata={"duplicated keys": keys, "key": key},
    )
