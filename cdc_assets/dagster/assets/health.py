"""``health/<source>``: a report that a person reads in the UI, with pictures of the last day.

A sensor reports it every ten minutes without a run; a run by hand reports the present.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import health_key
from cdc_assets.observe.report import Health, look, markdown
from cdc_assets.pipeline import Pipeline


def health_asset(config: SourceConfig) -> dg.AssetsDefinition:
    """The asset; its materializations are reports."""

    @dg.asset(
        key=health_key(config),
        group_name=config.assets.group or config.name,
        tags=config.assets.tags,
        owners=config.owners,
        kinds={"postgres", "iceberg"},
        description=f"How {config.name} is: what is wrong and what helps, slot, flusher, tables,"
        " and lag, throughput and retained WAL over the last day.",
    )
    def health() -> dg.MaterializeResult[None]:
        with Pipeline.open(config) as pipeline:
            return dg.MaterializeResult(metadata=health_metadata(look(pipeline)))

    return health


def health_metadata(found: Health) -> dict[str, Any]:
    """The report, and the numbers that Dagster plots by itself."""
    lags = [t.lag_seconds for t in found.status.tables if t.lag_seconds is not None]
    numbers: dict[str, Any] = {
        "lag seconds": round(max(lags), 1) if lags else None,
        "retained bytes": found.status.retained_bytes,
        "changes a second": round(rate, 1) if (rate := found.rows_per_second) is not None else None,
        "changes waiting": sum(table.pending_rows for table in found.status.tables),
    }
    return {
        "report": dg.MetadataValue.md(markdown(found)),
        "grade": found.grade,
        **{key: value for key, value in numbers.items() if value is not None},
    }
