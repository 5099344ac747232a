"""The sensor that tells people: what is wrong, what became worse or better, what is well again.

It collects what Dagster knows (freshness, runs, checks), has the engine add the rest, and delivers.
What was told and what waits to be delivered is in the sensor's cursor, so that a new code server
tells nothing twice, and it is told of a database that can't be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby

import dagster as dg
from dagster._core.definitions.freshness import FreshnessState
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus

from cdc_assets.alerts.conditions import conditions
from cdc_assets.alerts.facts import FailedCheck, FailedRun, Stale, facts, unreachable
from cdc_assets.alerts.memory import Memory, due, observe
from cdc_assets.alerts.sinks import deliver
from cdc_assets.assets.names import SOURCE_TAG, TABLE_TAG, WORK_TAG, TableAssets, all_tables
from cdc_assets.checks import lag, values
from cdc_assets.config import SourceConfig
from cdc_assets.sensors.sessions import NOT_REACHABLE, session

TICK_SECONDS = 15
# Enough to find the last two runs of every kind and table between two ticks.
_RUNS = 200
_FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]


def alerts_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``cdc_alerts_<source>``."""
    tables = all_tables(config)

    @dg.sensor(
        name=f"cdc_alerts_{config.name}",
        minimum_interval_seconds=TICK_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells of problems, of what becomes worse or better, and of recoveries: to"
        f" {', '.join(sink.type for sink in config.alerts.sinks)}.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        try:
            with session(config, "alerts sensor") as pipeline:
                found = facts(pipeline)
        except NOT_REACHABLE as error:
            found = unreachable(config, error)
        found = replace(
            found,
            stale=stale(context.instance, tables),
            failed_runs=failed_runs(context.instance, config),
            failed_checks=failed_checks(context.instance, _checks(context, tables)),
        )
        wrong = conditions(found, config)
        memory = observe(Memory.load(context.cursor), wrong, found.now)
        memory, notices = due(memory, config.alerts, found.now)
        memory, problems = deliver(config, memory)
        context.update_cursor(memory.dump())
        for problem in problems:
            context.log.error("%s", problem)
        return dg.SkipReason(_sentence(memory, len(notices), problems))

    return tick


def _checks(
    context: dg.SensorEvaluationContext, tables: Sequence[TableAssets]
) -> list[dg.AssetCheckKey]:
    """Every check of a lake table, but the lag's: the lag is told from the source itself."""
    assets = {names.lake for names in tables}
    graph = context.repository_def.asset_graph if context.repository_def is not None else None
    keys = graph.asset_check_keys if graph is not None else ()
    return sorted(key for key in keys if key.asset_key in assets and key.name != lag.NAME)


def stale(instance: dg.DagsterInstance, tables: Sequence[TableAssets]) -> tuple[Stale, ...]:
    """The lake tables that Dagster's freshness policies call not fresh."""
    states = instance.get_freshness_state_records([names.lake for names in tables])
    found = []
    for names in tables:
        record = states.get(names.lake)
        if record is None or record.freshness_state not in (
            FreshnessState.WARN,
            FreshnessState.FAIL,
        ):
            continue
        failed = record.freshness_state == FreshnessState.FAIL
        severity = "fail" if failed else "warn"
        found.append(Stale(names.lake_table_name, severity, record.updated_at))  # type: ignore[arg-type]
    return tuple(found)


def failed_runs(instance: dg.DagsterInstance, config: SourceConfig) -> tuple[FailedRun, ...]:
    """What failed when it last ran: by kind of work, and by table for copies.

    Only what sensors and schedules ask for: who starts a run by hand looks at it.
    """
    records = instance.get_run_records(
        dg.RunsFilter(tags={SOURCE_TAG: config.name}, statuses=_FINISHED), limit=_RUNS
    )

    def name(record: dg.RunRecord) -> str:
        tags: Mapping[str, str] = record.dagster_run.tags
        return " of ".join(filter(None, (tags.get(WORK_TAG), tags.get(TABLE_TAG))))

    found = []
    # A stable sort: those of one name stay newest first.
    for kind, group in groupby(sorted(records, key=name), key=name):
        newest, in_a_row, began = None, 0, None
        if not kind:
            continue
        for record in group:
            if record.dagster_run.status != dg.DagsterRunStatus.FAILURE:
                break
            newest, in_a_row, began = newest or record, in_a_row + 1, record.end_time
        if newest is not None:
            since = datetime.fromtimestamp(began, UTC) if began else None
            found.append(FailedRun(kind, newest.dagster_run.run_id, in_a_row, since))
    return tuple(found)


def failed_checks(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]
) -> tuple[FailedCheck, ...]:
    """The checks among ``keys`` whose last evaluation failed."""
    if not keys:
        return ()
    last = instance.event_log_storage.get_latest_asset_check_execution_by_key(list(keys))
    found = []
    for key, record in last.items():
        evaluation = record.evaluation
        if record.status != AssetCheckExecutionRecordStatus.FAILED or evaluation is None:
            continue
        fails = evaluation.severity == dg.AssetCheckSeverity.ERROR
        found.append(
            FailedCheck(
                key.asset_key.to_user_string(),
                key.name,
                "fail" if fails else "warn",
                evaluation.description or "it said nothing",
                values.REMEDY if key.name == values.NAME else None,
            )
        )
    return tuple(found)


def _sentence(memory: Memory, told: int, problems: Sequence[str]) -> str:
    grades = [known.grade for known in memory.known.values()]
    parts = [f"{grades.count('fail')} failures and {grades.count('warn')} warnings"]
    if told:
        parts.append(f"{told} changes told")
    return "; ".join([*parts, *problems]) + "."
