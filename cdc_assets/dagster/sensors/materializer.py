"""The sensor that has the log applied, and reports idle tables as fresh once proven.

With ``materializer: follow`` it keeps the follower running. Else it is level-triggered: a table
with a backlog and no active run gets a run; nothing can be missed, because nothing is remembered.

Dagster's freshness knows only the time since the last materialization, so an idle table gets a
heartbeat, but only when it is *proven* to equal the source: the log has since been flushed beyond
where the source's WAL ended at an earlier tick, and nothing of the table's log is pending.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from sqlalchemy.exc import SQLAlchemyError

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster import follower
from cdc_assets.dagster.assets.lake import relief_seconds
from cdc_assets.dagster.assets.reports import heartbeat_seconds
from cdc_assets.dagster.history import HEARTBEAT, forget_heartbeats
from cdc_assets.dagster.metadata import DATA_VERSION_TAG, ROW_COUNT, STANDING, data_version
from cdc_assets.dagster.names import (
    TableAssets,
    all_tables,
    job_name,
    of_source,
    run_tags,
)
from cdc_assets.dagster.sensors import runs
from cdc_assets.dagster.sensors.pace import PACE_SECONDS, NotYet, patient, reachable
from cdc_assets.dagster.sensors.proof import level_tables, reaches, source_end
from cdc_assets.dagster.sensors.services import spark_address
from cdc_assets.dagster.sensors.sessions import session, status_of
from cdc_assets.errors import FollowerProblem
from cdc_assets.log.asked.marks import marked_tables
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import DESCRIPTION, bounded
from cdc_assets.observe.status import SourceStatus, TableStatus
from cdc_assets.postgres.lsn import Lsn


@dataclass(frozen=True, slots=True)
class Look:
    """What a tick knows of one table.

    ``reported_seconds`` is the age of its last event; ``wait_seconds`` are left until a run may
    have it again, after one in which it failed. ``marked``: a mark waits for it.
    """

    names: TableAssets
    status: TableStatus
    reported_seconds: float | None
    wait_seconds: float = 0.0
    marked: bool = False

    @property
    def is_able(self) -> bool:
        """Whether a run may be given the table: its log can be applied, or soon."""
        able = self.status.state in (TableState.COPYING, TableState.STREAMING)
        return able and not self.wait_seconds and self.status.paused_since is None

    def wants(self, *, proven: bool) -> bool:
        """Whether there is something to be done with the table's log."""
        return self.status.state == TableState.STREAMING and bool(
            self.status.pending_rows
            or self.marked
            # A table without any event has just been copied: its first run reports it in full.
            or self.reported_seconds is None
            # No row carries the schema change: it can be applied once nothing older is to come.
            or (self.status.altered and proven)
        )


def due(looks: Sequence[Look], *, proven: bool) -> list[Look]:
    """The idle tables that are to be reported as fresh; ``proven`` as in :func:`to_merge`."""
    return [
        look
        for look in looks
        if proven
        and look.status.state == TableState.STREAMING
        and look.status.paused_since is None
        and not (look.status.pending_rows or look.status.altered or look.status.problem)
        and look.reported_seconds is not None
        and look.reported_seconds >= heartbeat_seconds(look.names.config.table(look.names.table))
    ]


def to_merge(looks: Sequence[Look], *, active: bool, proven: bool) -> tuple[TableAssets, ...]:
    """The tables of the run that is to be asked for; none if there is nothing to do.

    ``active``: a run is at work that needs no relief yet. ``proven``: the log shows the source as
    of a moment ago. A run is given every table that may go on, not only those with a backlog: it
    serves what becomes pending while it lasts, and what is copied meanwhile.
    """
    able = [look for look in looks if look.is_able]
    # For a quiet table a run would find nothing due, and the next tick would ask for another.
    to_do = [look for look in able if look.wants(proven=proven) and not look.names.is_quiet]
    wanted = not active and bool(to_do)
    return tuple(look.names for look in able) if wanted else ()


# By source, where the source's WAL ended at a tick, and when that was (monotonic). It is kept until
# the log has reached it: if each tick moved it on, the log of a quiet source, which moves every ten
# seconds, would hardly ever reach it. After PROOF_SECONDS it proves nothing of now: a tick may be
# late by as much as its pace.
_ends: dict[str, tuple[Lsn, float]] = {}
PROOF_SECONDS = 3.0 * PACE_SECONDS


def materializer_job(
    config: SourceConfig, tables: Sequence[TableAssets]
) -> dg.UnresolvedAssetJobDefinition:
    """Drains the log of every lake table, or of those a run asks for; checks have their own job."""
    return dg.define_asset_job(
        job_name(config.name, "materialize"),
        selection=dg.AssetSelection.assets(*(names.lake for names in tables)).without_checks(),
        description=f"Applies the log of {config.name} to its lake tables.",
        executor_def=dg.in_process_executor,
    )


@dataclass(frozen=True, slots=True)
class Tick:
    """What a tick has found, and what it needs to have the log applied."""

    config: SourceConfig
    instance: dg.DagsterInstance
    store: LogStore
    found: SourceStatus
    looks: Sequence[Look]
    proven: bool


def materializer_sensor(
    config: SourceConfig, job: dg.UnresolvedAssetJobDefinition
) -> dg.SensorDefinition:
    """``materializer_<source>``."""
    tables = all_tables(config)
    merge = _keep_follower if config.materializer == "follow" else _ask_for_run

    @dg.sensor(
        **of_source(config, "materializer"),
        job=job,
        minimum_interval_seconds=PACE_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Has the log applied where it is ahead of the lake; vouches for quiet tables.",
    )
    @patient
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        with reachable(config), session(config, "materializer sensor") as pipeline:
            found = status_of(pipeline, "materializer")
            if all(status.state != TableState.STREAMING for status in found.tables):
                raise NotYet("No table is copied yet; there is nothing to apply the log to.")
            proven = _is_proven(config, found)
            last = _last_events(context.instance, config, tables)
            looks = _looks(tables, found, last)
            end, _ = _ends.get(config.name, (None, 0.0))
            level = level_tables(config, found, end)
            quiet = due([one for one in looks if proven or one.status.name in level], proven=True)
            events = [_heartbeat(look, last[look.names.lake]) for look in quiet]
            seen = Tick(config, context.instance, pipeline.store, found, looks, proven)
            try:
                request, said = merge(seen)
            except NotYet as missing:
                if not events:
                    raise
                # The tables that are level are fresh all the same.
                request, said = None, str(missing)
            except FollowerProblem:
                for event in events:
                    context.instance.report_runless_asset_event(event)
                raise
        with suppress(SQLAlchemyError):  # Dagster's database is busy: the next tick's are more
            forget_heartbeats(context.instance, config, [look.names.lake for look in quiet])
        return dg.SensorResult(
            run_requests=[] if request is None else [request],
            skip_reason=said if request is None else None,
            asset_events=events,
        )

    return tick


def _is_proven(config: SourceConfig, found: SourceStatus) -> bool:
    """Whether the log shows the source as of a moment ago; in query mode, as of the last poll."""
    end, since = _ends.get(config.name, (None, 0.0))
    every = config.query.every.total_seconds() if config.query is not None else 0.0
    recent = time.monotonic() - since < PROOF_SECONDS + every
    proven = recent and reaches(found.flusher.flushed_lsn, end)
    now = source_end(found)
    if now is not None and (proven or not recent):
        _ends[config.name] = now, time.monotonic()
    return proven


def _ask_for_run(tick: Tick) -> tuple[dg.RunRequest | None, str]:
    """A run if one is due, and what there is to be said of the log."""
    instance, tags = tick.instance, run_tags(tick.config, "materialize")
    past, now = runs.past_runs(instance, tags), datetime.now(UTC)
    looks = [
        replace(look, wait_seconds=runs.wait_seconds(past, now, look.names)) for look in tick.looks
    ]
    marked = marked_tables(tick.store)
    looks = [replace(look, marked=look.names.table in marked) for look in looks]
    wanting = {look.names.lake for look in looks if look.is_able and look.wants(proven=tick.proven)}
    active = not runs.relief_is_due(
        instance,
        runs.active_runs(instance, tick.store, tags),
        lambda run: relief_seconds(soon=runs.is_awaited(run, wanting)),
    )
    run = to_merge(looks, active=active, proven=tick.proven)
    waits = bool(run) and spark_address(tick.config) is None
    said = _sentence(looks, active, waits, tick.proven)
    if waits:
        raise NotYet(said)
    if not run:
        return None, said
    keys = [names.lake for names in run]
    return dg.RunRequest(asset_selection=keys, asset_check_keys=[], tags=tags), said


# By configuration, the newest event of each lake table that this code server knows.
_known: dict[str, dict[dg.AssetKey, dg.EventLogEntry]] = {}


def _last_events(
    instance: dg.DagsterInstance, config: SourceConfig, tables: Sequence[TableAssets]
) -> Mapping[dg.AssetKey, dg.EventLogEntry | None]:
    """An event of each lake table, the newest one wherever a heartbeat may be due.

    Dagster reads an event in half a millisecond, so it isn't asked for those of all tables at each
    tick: while the event that is known is younger than a heartbeat, a newer one changes nothing.
    """
    known, now = _known.setdefault(config.dump(), {}), time.time()
    due = [
        names.lake
        for names in tables
        if (event := known.get(names.lake)) is None
        or now - event.timestamp >= heartbeat_seconds(config.table(names.table))
    ]
    asked = instance.get_latest_materialization_events(due) if due else {}
    for key in due:
        if (event := asked.get(key)) is None:
            known.pop(key, None)
        else:
            known[key] = event
    return known


def _looks(
    tables: Sequence[TableAssets],
    found: SourceStatus,
    last: Mapping[dg.AssetKey, dg.EventLogEntry | None],
) -> list[Look]:
    now = time.time()
    by_name = {status.name: status for status in found.tables}
    looks = []
    for names in tables:
        event = last.get(names.lake)
        age = None if event is None else now - event.timestamp
        looks.append(Look(names, by_name[str(names.table)], age))
    return looks


def _heartbeat(look: Look, last: dg.EventLogEntry | None) -> dg.AssetMaterialization:
    """A heartbeat: nothing happened, and that is proven. It repeats the standing metadata.

    The number of rows is left out if others applied changes since: a worker, or a comparison.
    """
    before = last.asset_materialization if last is not None else None
    standing: dict[str, Any] = {
        key: value for key, value in (before.metadata if before else {}).items() if key in STANDING
    }
    version = data_version(look.status.epoch, look.status.applied_offset)
    if before is None or (before.tags or {}).get(DATA_VERSION_TAG) != version:
        standing.pop(ROW_COUNT, None)
    return dg.AssetMaterialization(
        look.names.lake,
        tags={DATA_VERSION_TAG: version},
        description="Nothing to apply: the table equals the source.",
        metadata={**standing, "changes": 0, HEARTBEAT: True},
    )


def _keep_follower(tick: Tick) -> tuple[None, str]:
    """Keep the follower running; what it is doing. Raises FollowerProblem if it ended by itself."""
    if not follower.is_running(tick.config) and spark_address(tick.config) is None:
        raise NotYet("Waiting for Spark to start.")
    # Runs of an earlier setting, or of an earlier version, whose processes are gone.
    runs.active_runs(tick.instance, tick.store, run_tags(tick.config, "materialize"))
    said = follower.keep(tick.config, tick.instance, tick.found.workers)
    if (rest := _at_rest(tick.looks)) is not None:
        return None, rest
    rows = sum(table.pending_rows for table in tick.found.tables)
    failing = [table.problem for table in tick.found.tables if table.problem is not None]
    return None, bounded(" ".join([said, f"{rows:,} changes wait.", *failing]), DESCRIPTION)


def _sentence(looks: Sequence[Look], active: bool, waits: bool, proven: bool) -> str:
    pending = [look for look in looks if look.status.pending_rows]
    rows = sum(look.status.pending_rows for look in pending)
    if (rest := _at_rest(looks)) is not None:
        return rest
    if active:
        return f"A run is at it; {rows:,} changes of {len(pending)} tables wait."
    if waits:
        return f"Waiting for Spark to start; {rows:,} changes of {len(pending)} tables wait."
    failing = [look for look in looks if look.wait_seconds > 0]
    if failing:
        return "; ".join(
            f"{look.names.table} failed and is tried again in {look.wait_seconds:.0f} s"
            for look in failing
        )
    if held_up := [str(look.status.problem) for look in looks if look.status.problem]:
        return "; ".join(held_up)
    if not proven:
        return f"Nothing to apply to {len(_streaming(looks))} tables; the flusher isn't level yet."
    return f"All {len(_streaming(looks))} copied tables equal the source."


def _streaming(looks: Sequence[Look]) -> list[Look]:
    return [look for look in looks if look.status.state == TableState.STREAMING]


def _at_rest(looks: Sequence[Look]) -> str | None:
    """What there is to be said if all tables are paused."""
    resting = [look for look in looks if look.status.paused_since is not None]
    if not resting or len(resting) < len(_streaming(looks)):
        return None
    rows = sum(look.status.pending_rows for look in looks)
    return f"All {len(resting)} copied tables are paused; {rows:,} changes wait."
