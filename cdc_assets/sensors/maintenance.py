"""The schedule that has tables maintained: every so often, if no run is at it still.

A schedule and not a sensor: table care is due by the clock. A tick that is skipped loses nothing,
because each run looks at what is there.
"""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

from cdc_assets.assets.names import all_tables, run_tags
from cdc_assets.config import SourceConfig
from cdc_assets.sensors.runs import active_runs
from cdc_assets.sensors.services import spark_address
from cdc_assets.sensors.sessions import NOT_REACHABLE, session, waiting_sentence


def cron(every: timedelta) -> str:
    """A cron line for an interval that divides an hour or a day (the configuration sees to it).

    Not at the full hour, when everybody's jobs start.
    """
    minutes = round(every.total_seconds() / 60)
    if minutes < 60:
        return f"*/{minutes} * * * *"
    hours = minutes // 60
    return "7 * * * *" if hours == 1 else f"7 */{hours} * * *" if hours < 24 else "7 3 * * *"


def maintenance_job(config: SourceConfig) -> dg.UnresolvedAssetJobDefinition:
    """The job that maintains every table of the source."""
    return dg.define_asset_job(
        f"maintain_{config.name}_tables",
        selection=dg.AssetSelection.assets(*(names.maintenance for names in all_tables(config))),
        description=f"Compaction, expiry and removal for every lake table of {config.name}.",
    )


def maintenance_schedule(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.ScheduleDefinition | None:
    """``maintenance_<source>``; None where the configuration wants it by hand only."""
    every = config.maintenance.every
    if every is None:
        return None
    tags = run_tags(config, "maintain")

    @dg.schedule(
        name=f"maintenance_{config.name}",
        job=job,
        cron_schedule=cron(every),
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Has every lake table of {config.name} maintained.",
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        try:
            with session(config, "maintenance schedule") as pipeline:
                active = active_runs(context.instance, pipeline.store, tags)
                states = {row.state for row in pipeline.store.tables()}
        except NOT_REACHABLE as error:
            return dg.SkipReason(waiting_sentence(config, error))
        if not states & {"streaming", "copied"}:
            return dg.SkipReason("No table is copied yet.")
        if active:
            return dg.SkipReason("The last run is still at it.")
        if spark_address(config) is None:
            return dg.SkipReason("Waiting for Spark to start.")
        return dg.RunRequest(tags=tags)

    return tick
