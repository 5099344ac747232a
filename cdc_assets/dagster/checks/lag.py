"""How long ago did the lake table last equal the source? Asked of the log, not of Dagster."""

from __future__ import annotations

import dagster as dg

from cdc_assets.dagster.metadata import without_zeros
from cdc_assets.dagster.names import TableAssets
from cdc_assets.log.states import TableState
from cdc_assets.messages.texts import described
from cdc_assets.observe.status import TableStatus

NAME = "replication_lag"


def check_lag(status: TableStatus, names: TableAssets) -> dg.AssetCheckResult:
    """Warn and fail at the table's own freshness limits; not copied yet is no failure."""
    limits = names.config.table(names.table).freshness
    warn, fail = limits.warn.total_seconds(), limits.fail.total_seconds()
    lag = status.lag_seconds
    if status.state == TableState.PARKED:
        return dg.AssetCheckResult(
            asset_key=names.lake,
            check_name=NAME,
            passed=False,
            severity=dg.AssetCheckSeverity.ERROR,
            description=described(f"{names.table} is parked: {status.reason}"),
        )
    if lag is None:
        return dg.AssetCheckResult(
            asset_key=names.lake,
            check_name=NAME,
            passed=True,
            description=described(
                f"{names.table} is {status.state}: no lag before its copy is complete."
            ),
        )
    limit = f"warning above {warn:.0f} s" if lag <= warn else f"failure above {fail:.0f} s"
    return dg.AssetCheckResult(
        asset_key=names.lake,
        check_name=NAME,
        passed=lag <= warn,
        severity=dg.AssetCheckSeverity.ERROR if lag > fail else dg.AssetCheckSeverity.WARN,
        description=f"{lag:.1f} s behind ({limit}); {status.pending_rows:,} changes wait.",
        metadata=without_zeros({"lag seconds": round(lag, 3), "lag bytes": status.lag_bytes or 0}),
    )
