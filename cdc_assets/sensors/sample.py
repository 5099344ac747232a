"""The schedule that has a part of each table compared with the source, if no run is at it still."""

from __future__ import annotations

import dagster as dg

from cdc_assets.assets.names import run_tags
from cdc_assets.checks.sample import sample_checks
from cdc_assets.config import SourceConfig
from cdc_assets.sensors.maintenance import cron
from cdc_assets.sensors.runs import active_runs
from cdc_assets.sensors.services import spark_address
from cdc_assets.sensors.sessions import NOT_REACHABLE, session, waiting_sentence


def sample_job(config: SourceConfig) -> dg.UnresolvedAssetJobDefinition:
    """The job that compares a part of every table of the source."""
    return dg.define_asset_job(
        f"sample_{config.name}_tables",
        selection=dg.AssetSelection.checks(sample_checks(config)),
        description=f"Compares a part of each table of {config.name} with the lake, in turn.",
    )


def sample_schedule(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.ScheduleDefinition | None:
    """``sample_<source>``; None where nothing is streamed, or it is to be done by hand only."""
    every = config.verify.every
    if every is None or config.snapshot.mode == "snapshot_only":
        return None
    tags = run_tags(config, "sample")

    @dg.schedule(
        name=f"sample_{config.name}",
        job=job,
        cron_schedule=cron(every),
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=f"Has a part of each table of {config.name} compared with the source.",
    )
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        try:
            with session(config, "sample schedule") as pipeline:
                active = active_runs(context.instance, pipeline.store, tags)
                states = {row.state for row in pipeline.store.tables()}
        except NOT_REACHABLE as error:
            return dg.SkipReason(waiting_sentence(config, error))
        if "streaming" not in states:
            return dg.SkipReason("No table is copied yet.")
        if active:
            return dg.SkipReason("The last run is still at it.")
        if spark_address(config) is None:
            return dg.SkipReason("Waiting for Spark to start.")
        return dg.RunRequest(tags=tags)

    return tick
