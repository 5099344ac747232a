"""Schedules: tables are maintained, and parts of them compared with the source.

Schedules and not sensors: nothing but time makes this due. A tick that is skipped loses nothing,
because each run looks at what is there. No run is asked for while the last one is active.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import SOURCE_TAG, TableAssets, job_name, run_tags
from cdc_assets.dagster.sensors.pace import reachable, skipped
from cdc_assets.dagster.sensors.runs import active_runs
from cdc_assets.dagster.sensors.services import spark_address
from cdc_assets.dagster.sensors.sessions import session
from cdc_assets.log.states import SETTLED, TableState


def maintenance_job(
    config: SourceConfig, tables: Sequence[TableAssets]
) -> dg.UnresolvedAssetJobDefinition:
    """The job that maintains every table of the source."""
    return dg.define_asset_job(
        job_name(config.name, "maintain"),
        selection=dg.AssetSelection.assets(*(names.maintenance for names in tables)),
        description=f"Compaction, expiry and removal for every lake table of {config.name}.",
        executor_def=dg.in_process_executor,
    )


def sample_job(
    config: SourceConfig, checks: dg.AssetChecksDefinition
) -> dg.UnresolvedAssetJobDefinition:
    """The job that runs ``checks``, which compare a part of every table of the source."""
    return dg.define_asset_job(
        job_name(config.name, "sample"),
        selection=dg.AssetSelection.checks(checks),
        description=f"Compares a part of each table of {config.name} with the lake, in turn.",
        executor_def=dg.in_process_executor,
    )


def maintenance_schedule(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.ScheduleDefinition | None:
    """``maintenance_<source>``; None where the configuration wants it by hand only."""
    every = config.maintenance.every
    if every is None:
        return None
    said = f"Has every lake table of {config.name} maintained."
    return _schedule(config, job, "maintenance", "maintain", every, SETTLED, said)


def sample_schedule(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.ScheduleDefinition | None:
    """``sample_<source>``; None where nothing is streamed, or it is to be done by hand only."""
    every = config.verify.every
    if every is None or not config.streams:
        return None
    said = f"Has a part of each table of {config.name} compared with the source."
    return _schedule(
        config, job, "sample", "sample", every, frozenset({TableState.STREAMING}), said
    )


def _schedule(
    config: SourceConfig,
    job: dg.UnresolvedAssetJobDefinition,
    name: str,
    work: str,
    every: timedelta,
    worth: frozenset[TableState],
    description: str,
) -> dg.ScheduleDefinition:
    """Asks for runs tagged ``work``, once a table is in one of the states ``worth`` it."""
    tags = run_tags(config, work)

    @dg.schedule(
        name=f"{name}_{config.name}",
        tags={SOURCE_TAG: config.name},
        job=job,
        cron_schedule=cron(every),
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=description,
    )
    @skipped
    def tick(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        with reachable(config), session(config, f"{name} schedule") as pipeline:
            active = active_runs(context.instance, pipeline.store, tags)
            states = {row.state for row in pipeline.store.tables()}
        if not states & worth:
            return dg.SkipReason("No table is copied yet.")
        if active:
            return dg.SkipReason("The last run is still at it.")
        if spark_address(config) is None:
            return dg.SkipReason("Waiting for Spark to start.")
        return dg.RunRequest(tags=tags)

    return tick


def cron(every: timedelta) -> str:
    """A cron line for an interval that divides an hour or a day (the configuration sees to it).

    Not at the full hour, when everybody's jobs start.
    """
    minutes = round(every.total_seconds() / 60)
    if minutes < 60:
        return f"*/{minutes} * * * *"
    hours = minutes // 60
    return "7 * * * *" if hours == 1 else f"7 */{hours} * * *" if hours < 24 else "7 3 * * *"
