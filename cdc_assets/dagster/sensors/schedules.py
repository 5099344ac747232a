"""Schedules: tables are maintained, and parts of them compared with the source.

Schedules and not sensors: nothing but time makes this due. A tick that is skipped loses nothing,
because each run looks at what is there. No run is asked for while the last one is active, nor for
tables that didn't change since they were looked at: those have their turn once a day, or so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.assets.marks import MARK_NAME, SCHEDULED_TAG
from cdc_assets.dagster.checks import sample
from cdc_assets.dagster.history import SKIPPED_TICKS
from cdc_assets.dagster.names import (
    SOURCE_TAG,
    TableAssets,
    all_tables,
    job_name,
    marks_key,
    marks_partitions_name,
    run_tags,
)
from cdc_assets.dagster.sensors.checks import again_seconds
from cdc_assets.dagster.sensors.pace import reachable, skipped
from cdc_assets.dagster.sensors.runs import active_runs
from cdc_assets.dagster.sensors.services import spark_address
from cdc_assets.dagster.sensors.sessions import session
from cdc_assets.log.asked import marks
from cdc_assets.log.states import SETTLED, TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.log.verified import compared_at_rest
from cdc_assets.maintenance.due import due
from cdc_assets.messages.texts import counted
from cdc_assets.pipeline import Pipeline

_Answer = dg.RunRequest | dg.SkipReason


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


def rest(config: SourceConfig, every: timedelta) -> timedelta:
    """How long a table that doesn't change isn't compared, by a schedule that comes so often.

    What is put off until the next tick isn't too old then, either.
    """
    return max(timedelta(seconds=again_seconds(config)) - every, timedelta(0))


def maintenance_schedule(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.ScheduleDefinition | None:
    """``maintenance_<source>``; None where the configuration wants it by hand only."""
    every = config.maintenance.every
    if every is None:
        return None
    tables = all_tables(config)

    def to_maintain(context: dg.ScheduleEvaluationContext, pipeline: Pipeline) -> _Answer:
        found = {*due(pipeline, [names.table for names in tables])}
        keys = [names.maintenance for names in tables if names.table in found]
        recently = dg.RunsFilter(
            tags=run_tags(config, "maintain"),
            statuses=[dg.DagsterRunStatus.SUCCESS],
            created_after=datetime.now(UTC) - SKIPPED_TICKS,
        )
        if not keys and not context.instance.get_runs_count(recently):
            keys = [names.maintenance for names in tables[:1]]  # any: its run prunes the history
        return _of_what_changed(run_tags(config, "maintain"), keys)

    said = (
        f"Has the lake tables of {config.name} maintained that changed; those that didn't,"
        " once a day."
    )
    return _schedule(config, job, "maintenance", "maintain", every, SETTLED, to_maintain, said)


def sample_schedule(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.ScheduleDefinition | None:
    """``sample_<source>``; None where nothing is decoded, or it is to be done by hand only."""
    every = config.verify.every
    if every is None or not config.publishes:
        return None
    tables, resting_for = all_tables(config), rest(config, every)

    def to_compare(_: dg.ScheduleEvaluationContext, pipeline: Pipeline) -> _Answer:
        resting = compared_at_rest(pipeline.store, resting_for)
        lakes = [names.lake for names in tables if names.table not in resting]
        keys = [dg.AssetCheckKey(lake, sample.NAME) for lake in lakes]
        return _of_what_changed(run_tags(config, "sample"), checks=keys)

    said = (
        f"Has a part of each table of {config.name} compared with the source; of one that is"
        " compared whole and doesn't change, after 22 hours."
    )
    worth = frozenset({TableState.STREAMING})
    return _schedule(config, job, "sample", "sample", every, worth, to_compare, said)


def marks_job(config: SourceConfig) -> dg.UnresolvedAssetJobDefinition:
    """``mark_<source>``: makes the mark that its partition names."""
    return dg.define_asset_job(
        f"mark_{config.name}",
        selection=dg.AssetSelection.assets(marks_key(config)),
        description=f"Tags every lake table of {config.name} at one LSN: as mark_<partition>."
        " Name a new partition.",
        executor_def=dg.in_process_executor,
    )


def marks_schedule(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.ScheduleDefinition | None:
    """``marks_<source>``; None where nothing is streamed, or marks are made by hand only.

    It looks each hour at least: a tick that is skipped, or a run that fails, loses no day's mark,
    and after a pause of the daemon no mark's name is of long before.
    """
    every = config.marks.every
    if every is None or not config.streams:
        return None
    partitions, look = marks_partitions_name(config), min(every, timedelta(hours=1))

    def to_mark(context: dg.ScheduleEvaluationContext, pipeline: Pipeline) -> _Answer:
        at = context.scheduled_execution_time.astimezone(UTC)
        due_since = f"{last_due(every, at):{MARK_NAME}}"
        if any(name >= due_since for name in marks.names(pipeline.store, only_scheduled=True)):
            return dg.SkipReason(f"{due_since} is marked.")
        known = {row.table: row for row in pipeline.store.tables()}
        # One that is copied anew is left out of a mark, and told: that may take days.
        first = [t.id for t in config.tables if _is_new(known.get(t.id))]
        if first:
            return dg.SkipReason(f"{counted(len(first), 'table', 'wait')} for a first copy.")
        name = f"{at:{MARK_NAME}}"
        context.instance.add_dynamic_partitions(partitions, [name])
        tags = {**run_tags(config, "mark"), SCHEDULED_TAG: "true"}
        return dg.RunRequest(partition_key=name, tags=tags)

    said = f"Marks {config.name}; the oldest of more than {config.marks.keep} goes."
    worth = frozenset({TableState.STREAMING})
    return _schedule(config, job, "marks", "mark", look, worth, to_mark, said)


def _of_what_changed(
    tags: Mapping[str, str],
    assets: Sequence[dg.AssetKey] = (),
    checks: Sequence[dg.AssetCheckKey] = (),
) -> _Answer:
    if not assets and not checks:
        return dg.SkipReason("Nothing has changed since the last run.")
    return dg.RunRequest(asset_selection=assets, asset_check_keys=checks, tags=dict(tags))


def _is_new(row: TableRow | None) -> bool:
    """Whether a table was never copied."""
    return row is None or (row.epoch == 1 and row.state in (TableState.WAITING, TableState.COPYING))


def _schedule(
    config: SourceConfig,
    job: dg.UnresolvedAssetJobDefinition,
    name: str,
    work: str,
    every: timedelta,
    worth: frozenset[TableState],
    asked: Callable[[dg.ScheduleEvaluationContext, Pipeline], _Answer],
    description: str,
) -> dg.ScheduleDefinition:
    """Asks for runs tagged ``work``, as ``asked`` says, once a table is in a state ``worth`` it."""
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
            if not {row.state for row in pipeline.store.tables()} & worth:
                return dg.SkipReason("No table is copied yet.")
            if active:
                return dg.SkipReason("The last run is still at it.")
            if spark_address(config) is None:
                return dg.SkipReason("Waiting for Spark to start.")
            return asked(context, pipeline)

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


def last_due(every: timedelta, at: datetime) -> datetime:
    """When a schedule that comes so often came last, ``at`` included, as :func:`cron` has it."""
    hour = 3 if every >= timedelta(days=1) else 0
    minute = 7 if every >= timedelta(hours=1) else 0
    first = at.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return first + (at - first) // every * every
