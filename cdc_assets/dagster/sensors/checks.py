"""The sensor that has the checks run: soon after a table begins to stream, then now and then.

With many tables a run takes long, so none begins while tables are copied, and the longer the last
one took, the longer is the pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.checks import ready
from cdc_assets.dagster.checks.tables import check_job_name
from cdc_assets.dagster.names import TableAssets, all_tables, run_tags
from cdc_assets.dagster.sensors.pace import reachable, skipped
from cdc_assets.dagster.sensors.runs import active_runs
from cdc_assets.dagster.sensors.services import spark_address
from cdc_assets.dagster.sensors.sessions import keep_instance, session
from cdc_assets.log.states import TableState

TICK_SECONDS = 15
EVERY_SECONDS = 600.0
# So that checking takes 5 % of the time at most.
PAUSE_FACTOR = 20.0


def wait_seconds(
    last: tuple[float, float] | None, now: float, *, unchecked: Sequence[str]
) -> float:
    """Seconds left until the next run, given the last one's start and end (epoch seconds)."""
    if last is None:
        return 0.0
    began, ended = last
    pause = PAUSE_FACTOR * (ended - began)
    # A table that has never been checked doesn't wait for the others' turn.
    due = ended + (pause if unchecked else max(EVERY_SECONDS, pause))
    return max(0.0, due - now)


def checks_sensor(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.SensorDefinition:
    """``checks_<source>``."""
    tables = all_tables(config)
    tags, first_tags = run_tags(config, "check"), run_tags(config, "ready")

    @dg.sensor(
        name=f"checks_{config.name}",
        job=job,
        minimum_interval_seconds=TICK_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Has the checks run: of the source at once, of a table after its copy, then all"
        " of them every ten minutes.",
    )
    @skipped
    def tick(context: dg.SensorEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        keep_instance(context)
        with reachable(config), session(config, "checks sensor") as pipeline:
            active = bool(active_runs(context.instance, pipeline.store, tags))
            asking = bool(active_runs(context.instance, pipeline.store, first_tags))
            states = {row.table: row.state for row in pipeline.store.tables()}
        if not asking and (asked := _never_asked(context.instance, tables)):
            return dg.RunRequest(asset_selection=[], asset_check_keys=asked, tags=first_tags)
        streaming = [names for names in tables if states.get(names.table) == TableState.STREAMING]
        if not streaming:
            return dg.SkipReason("No table is copied yet.")
        if TableState.COPYING in states.values():
            return dg.SkipReason("Tables are being copied; checks come after that.")
        instance = context.instance
        if active:
            return dg.SkipReason("A run is at it.")
        if spark_address(config) is None:
            return dg.SkipReason("Waiting for Spark to start.")
        past = instance.get_run_records(dg.RunsFilter(tags=tags), limit=1)
        last = (past[0].start_time, past[0].end_time) if past else None
        keys = [dg.AssetCheckKey(names.lake, "primary_key_unique") for names in streaming]
        known = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
        unchecked = [key.asset_key.to_user_string() for key in keys if key not in known]
        left = wait_seconds(
            (last[0] or 0.0, last[1] or 0.0) if last else None,
            datetime.now(UTC).timestamp(),
            unchecked=unchecked,
        )
        if left > 0:
            return dg.SkipReason(f"The next checks are due in {left:.0f} s.")
        return dg.RunRequest(tags=tags)

    return tick


def _never_asked(
    instance: dg.DagsterInstance, tables: Sequence[TableAssets]
) -> list[dg.AssetCheckKey]:
    """The checks ``ready``, or none if each was evaluated before: they come before a copy."""
    keys = [dg.AssetCheckKey(names.source, ready.NAME) for names in tables]
    known = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    return [] if all(key in known for key in keys) else keys


def checks_job(
    config: SourceConfig, checks: Sequence[dg.AssetChecksDefinition]
) -> dg.UnresolvedAssetJobDefinition:
    """The job that runs ``checks``, those of every table."""
    return dg.define_asset_job(
        check_job_name(config),
        selection=dg.AssetSelection.checks(*checks),
        description=f"The checks of the source {config.name} and of its lake tables.",
    )
