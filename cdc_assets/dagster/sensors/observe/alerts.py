"""The sensor that alerts people: what is wrong, what became worse or better, what is well again.

It collects what Dagster knows (freshness, runs, checks), has the engine add the rest, and delivers.
Its cursor has what was reported and what waits to be delivered, so that a new code server reports
nothing twice, and a database that can't be reached is reported, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.checks import lag, sample, tables, values
from cdc_assets.dagster.internals import (
    AssetCheckExecutionRecord,
    AssetCheckExecutionRecordStatus,
    FreshnessState,
)
from cdc_assets.dagster.names import (
    TABLE_TAG,
    WORK_TAG,
    WORKS,
    TableAssets,
    all_tables,
    of_source,
    run_tags,
)
from cdc_assets.dagster.sensors.sessions import LOOK_SECONDS, keep_instance, session, status_of
from cdc_assets.log.states import TableState
from cdc_assets.messages.texts import counted, of_markdown
from cdc_assets.observe.conditions import conditions, unknown
from cdc_assets.observe.facts import FailedCheck, FailedRun, Stale, Unchecked, facts, unreachable
from cdc_assets.observe.notices import Memory, due, observe
from cdc_assets.observe.outbox import deliver, undelivered
from cdc_assets.observe.status import SourceStatus

TICK_SECONDS = 15
# How old what is known of the checks may be.
EVALUATIONS_SECONDS = 60.0
# For each kind of work: enough for the last runs of each table that is copied.
_RUNS = 200
_EVALUATED = {
    AssetCheckExecutionRecordStatus.SUCCEEDED,
    AssetCheckExecutionRecordStatus.FAILED,
}
# Descriptions of checks end with one of them, or with none.
_REMEDIES = (values.REMEDY, sample.REMEDY, tables.LOOKED_AT_AGAIN)
_FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE]


def alerts_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``cdc_alerts_<source>``."""
    tables = all_tables(config)

    @dg.sensor(
        **of_source(config, "cdc_alerts"),
        minimum_interval_seconds=TICK_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells of problems, of what becomes worse or better, and of recoveries: to"
        f" {', '.join(sink.type for sink in config.alerts.sinks)}.",
    )
    def tick(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        keep_instance(context)
        try:
            with session(config, "alerts sensor") as pipeline:
                found = facts(pipeline, status_of(pipeline, "alerts", within_seconds=LOOK_SECONDS))
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody has to be told
            found = unreachable(config, error)
        keys = _checks(context, tables)
        known = _recent_evaluations(context.instance, config, keys)
        found = replace(
            found,
            stale=stale(context.instance, tables),
            failed_runs=failed_runs(context.instance, config),
            failed_checks=failed_checks(known),
            unchecked=unchecked(known, _due(config, tables, keys, found.status)),
        )
        known_before = Memory.load(context.cursor)
        wrong = [*conditions(found, config), *undelivered(known_before)]
        memory = observe(known_before, wrong, found.now, lambda key: unknown(key, found))
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
    """Every check of a lake table but the lag's: the alerts take lag from the source's status."""
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
    """Work whose last run failed: by kind of work, and by table for copies.

    Only runs of sensors and schedules count: a person who starts a run by hand looks at it.
    """
    records = [
        record
        for work in WORKS
        for record in instance.get_run_records(
            dg.RunsFilter(tags=run_tags(config, work), statuses=_FINISHED), limit=_RUNS
        )
    ]

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


# By configuration: when the evaluations of its checks were read (monotonic), and what they are.
_evaluations: dict[str, tuple[float, Mapping[dg.AssetCheckKey, AssetCheckExecutionRecord]]] = {}


def _recent_evaluations(
    instance: dg.DagsterInstance, config: SourceConfig, keys: Sequence[dg.AssetCheckKey]
) -> Mapping[dg.AssetCheckKey, AssetCheckExecutionRecord]:
    """:func:`evaluations` as of a moment ago: checks come minutes apart, and all are read."""
    at, known = _evaluations.get(config.dump(), (-math.inf, {}))
    if time.monotonic() - at >= EVALUATIONS_SECONDS:
        known = evaluations(instance, keys)
        _evaluations[config.dump()] = time.monotonic(), known
    return known


def evaluations(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]
) -> dict[dg.AssetCheckKey, AssetCheckExecutionRecord]:
    """The last evaluation of each check that has one; runs that are planned, or died, are none."""
    storage, found = instance.event_log_storage, {}
    last = storage.get_latest_asset_check_execution_by_key(list(keys)) if keys else {}
    for key, newest in last.items():
        record: AssetCheckExecutionRecord | None = newest
        if newest.status not in _EVALUATED:
            before = storage.get_asset_check_execution_history(key, limit=1, status=_EVALUATED)
            record = next(iter(before), None)
        if record is not None and record.evaluation is not None:
            found[key] = record
    return found


def failed_checks(
    known: Mapping[dg.AssetCheckKey, AssetCheckExecutionRecord],
) -> tuple[FailedCheck, ...]:
    """The checks whose last evaluation failed."""
    found = []
    for key, record in known.items():
        evaluation = record.evaluation
        if record.status != AssetCheckExecutionRecordStatus.FAILED or evaluation is None:
            continue
        fails = evaluation.severity == dg.AssetCheckSeverity.ERROR
        said = of_markdown(evaluation.description or "it said nothing")
        # An alert has a line of its own for what is to be done.
        remedy = next((known for known in _REMEDIES if said.endswith(known)), None)
        found.append(
            FailedCheck(
                key.asset_key.to_user_string(),
                key.name,
                "fail" if fails else "warn",
                said.removesuffix(remedy or "").rstrip(),
                remedy,
            )
        )
    return tuple(found)


def _due(
    config: SourceConfig,
    tables: Sequence[TableAssets],
    keys: Sequence[dg.AssetCheckKey],
    status: SourceStatus | None,
) -> list[dg.AssetCheckKey]:
    """The checks that have to be run again and again: of tables that stream."""
    states = {table.name: table.state for table in status.tables} if status is not None else {}
    streaming = {n.lake for n in tables if states.get(str(n.table)) == TableState.STREAMING}
    return [
        key
        for key in keys
        if key.asset_key in streaming
        and (key.name != sample.NAME or (config.verify.every and config.publishes))
    ]


def unchecked(
    known: Mapping[dg.AssetCheckKey, AssetCheckExecutionRecord], keys: Sequence[dg.AssetCheckKey]
) -> tuple[Unchecked, ...]:
    """By check: how many tables were checked, and the oldest time; and how many never were."""
    found = []
    for name in sorted({key.name for key in keys}):
        mine = [key for key in keys if key.name == name]
        at = [known[key].create_timestamp for key in mine if key in known]
        if at:
            found.append(Unchecked(name, len(at), datetime.fromtimestamp(min(at), UTC)))
        if len(at) < len(mine):
            found.append(Unchecked(name, len(mine) - len(at), None))
    return tuple(found)


def _sentence(memory: Memory, told: int, problems: Sequence[str]) -> str:
    grades = [known.grade for known in memory.known.values()]
    many = [counted(grades.count("fail"), "failure"), counted(grades.count("warn"), "warning")]
    parts = [" and ".join(many)]
    if told:
        parts.append(f"{counted(told, 'change')} told")
    return "; ".join([*parts, *problems]) + "."
