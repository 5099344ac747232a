"""The source's tables: external assets, so that lineage begins where the data does."""

from __future__ import annotations

import dagster as dg

from cdc_assets.dagster.metadata import source_metadata
from cdc_assets.dagster.names import TableAssets


def source_spec(names: TableAssets) -> dg.AssetSpec:
    """``postgres/<source>/<schema>/<table>``: nothing of ours ever writes it."""
    return names.spec(
        names.source,
        {"postgres"},
        f"The table {names.table} of the source {names.config.name}.",
        metadata=source_metadata(names),
    )
