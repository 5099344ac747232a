"""The staged log of a table: external to Dagster's runs, reported by the flusher's sensor."""

from __future__ import annotations

import dagster as dg

from cdc_assets.dagster.metadata import staged_metadata
from cdc_assets.dagster.names import TableAssets


def staged_log_spec(names: TableAssets) -> dg.AssetSpec:
    """``staged_log/<source>/<schema>/<table>``: Parquet files of changes, in commit order."""
    return names.spec(
        names.staged_log,
        {"postgres", "parquet"},
        f"Changes of {names.table} in commit order, staged by {_whom(names)}; at most one event a"
        " minute, however many files there are.",
        deps=[names.first_log or names.source],
        metadata=staged_metadata(names),
    )


def _whom(names: TableAssets) -> str:
    of = names.config.log_name
    return "the flusher" if of == names.config.name else f"the flusher of {of}, and passed on"
