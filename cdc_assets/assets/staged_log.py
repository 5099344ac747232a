"""The staged log of a table: external to Dagster's runs, reported by the flusher's sensor."""

from __future__ import annotations

import dagster as dg

from cdc_assets.assets.names import TableAssets


def staged_log_spec(names: TableAssets) -> dg.AssetSpec:
    """``staged_log/<source>/<schema>/<table>``: Parquet files of changes, in commit order."""
    return dg.AssetSpec(
        names.staged_log,
        deps=[names.source],
        group_name=names.config.name,
        kinds={"postgres", "parquet"},
        description=(
            f"Changes of {names.table} in commit order, staged by the flusher; at most one event a"
            " minute, however many files there are."
        ),
        metadata={"dagster/uri": names.config.staging_uri},
    )
