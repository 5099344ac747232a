"""The source's tables: external assets, so that lineage begins where the data does."""

from __future__ import annotations

import dagster as dg

from cdc_assets.dagster.metadata import source_metadata
from cdc_assets.dagster.names import TableAssets
from cdc_assets.messages.texts import described


def source_spec(names: TableAssets) -> dg.AssetSpec:
    """``postgres/<source>/<schema>/<table>``: nothing of ours ever writes it."""
    return dg.AssetSpec(
        names.source,
        group_name=names.config.name,
        owners=names.owners,
        kinds={"postgres"},
        description=described(f"The table {names.table} of the source {names.config.name}."),
        metadata=source_metadata(names),
    )
