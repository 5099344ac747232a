"""The sensor that has tables copied: partitions for the chunks, and runs.

A large table has a run of its own. Tables of one chunk share one, which is mostly its start; but
one that failed twice doesn't: what it does to its run is no other table's harm then.

Level-triggered: as long as a chunk hasn't landed and no run of its table is active, a run is asked
for. Chunks whose run died before it marked them (or that the command line copied) are marked here.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.metadata import chunk_metadata
from cdc_assets.dagster.names import (
    RANGE_END_TAG,
    RANGE_START_TAG,
    SEVERAL,
    TABLE_TAG,
    TableAssets,
    all_tables,
    of_source,
    run_tags,
)
from cdc_assets.dagster.sensors.location import in_one_process
from cdc_assets.dagster.sensors.pace import PACE_SECONDS, NotYet, UnderWay, patient, reachable
from cdc_assets.dagster.sensors.runs import (
    active_runs,
    failures_in_a_row,
    past_runs,
    wait_seconds,
)
from cdc_assets.dagster.sensors.services import begin_spark
from cdc_assets.dagster.sensors.sessions import session
from cdc_assets.log.copies.chunks import ChunkProgress, chunks
from cdc_assets.log.states import TableState
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# A run over a range of partitions instead of one: https://docs.dagster.io/guides/build/partitions-and-backfills
# Some 44 ms an event on SQLite: a tick stays below its 2 seconds.
MARKS_A_TICK = 20
# Tables that share a run, which costs 5 s of CPU to launch and some 0.2 s a table.
TABLES_A_RUN = 128
# A run of several small tables that lasts for longer is held up, perhaps by a lock on one of them,
# which has no end. The others are then given to another run; whoever copies a chunk claims it.
HELD_UP_SECONDS = 180.0
# By source and table, the snapshot's LSN of a copy that is over and known to Dagster in full: with
# hundreds of tables Dagster can't be asked at every tick. A new code server asks once more.
_settled: dict[tuple[str, TableId], Lsn | None] = {}


@dataclass(frozen=True, slots=True)
class Copy:
    """What a tick knows of one table: its plan, and what Dagster knows of it."""

    names: TableAssets
    state: str
    plan: tuple[ChunkProgress, ...]
    known: frozenset[str]
    marked: frozenset[str]
    active: bool
    wait_seconds: float
    snapshot_lsn: Lsn | None = None
    failed: bool = False

    @property
    def shares(self) -> bool:
        """Whether it is copied by a run that copies others, too."""
        return len(self.plan) == 1 and not self.failed


@dataclass(frozen=True, slots=True)
class Decision:
    """What a tick does for one table; ``run`` are the first and the last chunk to be copied."""

    add: tuple[str, ...]
    delete: tuple[str, ...]
    mark: tuple[ChunkProgress, ...]
    run: tuple[str, str] | None


NOTHING = Decision((), (), (), None)


def decide(copy: Copy, *, may_run: bool) -> Decision:
    """Reconcile Dagster's partitions and runs with the plan of one table."""
    keys = [chunk.key for chunk in copy.plan]
    # Without a plan (a new epoch waits for its pin) the old partitions stay until there is one.
    delete = sorted(copy.known - set(keys)) if keys else []
    outstanding = [chunk.key for chunk in copy.plan if chunk.state != "landed"]
    mark = [c for c in copy.plan if c.state == "landed" and c.key not in copy.marked]
    run = (
        may_run and not copy.active and copy.wait_seconds <= 0 and copy.state == TableState.COPYING
    )
    if run and not outstanding and keys:
        outstanding = keys[-1:]  # all landed, but no run lived to finish the copy
    return Decision(
        tuple(key for key in keys if key not in copy.known),
        tuple(delete),
        # A run that is active marks its own.
        () if copy.active else tuple(mark),
        (outstanding[0], outstanding[-1]) if run and outstanding else None,
    )


def snapshot_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``snapshot_<source>``."""
    tables = all_tables(config)

    @dg.sensor(
        **of_source(config, "snapshot"),
        # Not a job: one job can't hold assets that are partitioned in different ways.
        asset_selection=dg.AssetSelection.assets(*(names.snapshot for names in tables)),
        minimum_interval_seconds=PACE_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Has every chunk copied that hasn't landed yet: a run for each large table, and"
        " one for several small ones.",
    )
    @patient
    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        copies, at_work = _look(context.instance, config, tables)
        if any(copy.state == TableState.COPYING for copy in copies):
            begin_spark(config)
        return in_one_process(context, _result(config, copies, at_work))

    return tick


def _look(
    instance: dg.DagsterInstance, config: SourceConfig, tables: Sequence[TableAssets]
) -> tuple[list[Copy], int]:
    """What there is to copy, and how many runs are at it."""
    now = datetime.now(UTC)
    with reachable(config), session(config, "snapshot sensor") as pipeline:
        runs = active_runs(instance, pipeline.store, run_tags(config, "snapshot"))
        rows = {row.table: row for row in pipeline.store.tables()}
        plans = [
            (names, row, tuple(chunks(pipeline.store, names.table, row.epoch)))
            for names in tables
            if (row := rows.get(names.table)) is not None
            and row.state in (TableState.COPYING, TableState.STREAMING, TableState.COPIED)
            and (row.state == TableState.COPYING or not _is_settled(names, row.snapshot_lsn))
        ]
    if not plans:
        return [], len(runs)
    claimed = {
        names.snapshot
        for names, _, plan in plans
        if any(chunk.state == "claimed" for chunk in plan)
    }
    active = at_work(runs, _held_up(instance, runs), claimed)
    shared = past_runs(instance, {**run_tags(config, "snapshot"), TABLE_TAG: SEVERAL})
    copies = []
    for names, row, plan in plans:
        known = frozenset(instance.get_dynamic_partitions(names.partitions_name))
        past = past_runs(instance, run_tags(config, "snapshot", names.table))
        past += [run for run in shared if run.concerns(names)]
        past.sort(key=lambda run: run.ended_at, reverse=True)
        copies.append(
            Copy(
                names,
                row.state,
                plan,
                known,
                frozenset(instance.get_materialized_partitions(names.snapshot)),
                names.snapshot in active,
                wait_seconds(past, now, names),
                row.snapshot_lsn,
                failures_in_a_row(past, str(names.table)) > 1,
            )
        )
    return copies, len(runs)


def at_work(
    runs: Iterable[dg.DagsterRun], held_up: Collection[str], claimed: Collection[dg.AssetKey]
) -> set[dg.AssetKey]:
    """The tables that ``runs`` copy; of a run in ``held_up``, those with a chunk in ``claimed``."""
    return {
        key
        for run in runs
        for key in run.asset_selection or ()
        if run.run_id not in held_up or key in claimed
    }


def _held_up(instance: dg.DagsterInstance, runs: Sequence[dg.DagsterRun]) -> set[str]:
    """The runs of several tables that take so long that one of the tables is surely locked."""
    shared = [run.run_id for run in runs if run.tags.get(TABLE_TAG) == SEVERAL]
    records = instance.get_run_records(dg.RunsFilter(run_ids=shared)) if shared else ()
    before = time.time() - HELD_UP_SECONDS
    return {r.dagster_run.run_id for r in records if r.start_time and r.start_time < before}


def _is_settled(names: TableAssets, snapshot_lsn: Lsn | None) -> bool:
    key = names.config.name, names.table
    return key in _settled and _settled[key] == snapshot_lsn


def _result(config: SourceConfig, copies: Sequence[Copy], at_work: int) -> dg.SensorResult:
    pinned = {copy.names.table for copy in copies}
    pinned |= {table for source, table in _settled if source == config.name}
    if not pinned:
        raise NotYet(
            "Waiting for the flusher to pin the tables: nothing can be copied before that."
        )
    places = config.snapshot.max_parallel_tables - at_work
    marks = MARKS_A_TICK
    requests: list[dg.RunRequest] = []
    shared: list[TableAssets] = []
    partitions: list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest] = []
    events: list[dg.AssetMaterialization] = []
    for copy in copies:
        joins = copy.shares and len(shared) % TABLES_A_RUN > 0
        names, decision = copy.names, decide(copy, may_run=joins or places > 0)
        if copy.state != TableState.COPYING and decision == NOTHING and not copy.active:
            _settled[config.name, names.table] = copy.snapshot_lsn
        if decision.delete:
            partitions.append(names.partitions.build_delete_request(list(decision.delete)))
        if decision.add:
            partitions.append(names.partitions.build_add_request(list(decision.add)))
        for chunk in decision.mark[: max(0, marks)]:
            marks -= 1
            events.append(
                dg.AssetMaterialization(
                    names.snapshot, partition=chunk.key, metadata=chunk_metadata(chunk)
                )
            )
        if decision.run is not None:
            places -= not joins
            if copy.shares:
                shared.append(names)
            else:
                requests.append(_request(config, names, decision.run))
    requests += [
        _shared_request(config, shared[first : first + TABLES_A_RUN])
        for first in range(0, len(shared), TABLES_A_RUN)
    ]
    if any(copy.state == TableState.COPYING for copy in copies) and not (
        requests or partitions or events
    ):
        # A run that dies is followed by the next one in a moment, as is one that was waited for.
        raise UnderWay(_sentence(copies, len(pinned)))
    return dg.SensorResult(
        run_requests=requests,
        skip_reason=None if requests else _sentence(copies, len(pinned)),
        dynamic_partitions_requests=partitions,
        asset_events=events,
    )


def _request(config: SourceConfig, names: TableAssets, run: tuple[str, str]) -> dg.RunRequest:
    return dg.RunRequest(
        asset_selection=[names.snapshot],
        tags={
            **run_tags(config, "snapshot", names.table),
            RANGE_START_TAG: run[0],
            RANGE_END_TAG: run[1],
        },
    )


def _shared_request(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.RunRequest:
    """Whole tables, whose partitions have nothing in common: it has no partition range."""
    return dg.RunRequest(
        asset_selection=[names.snapshot for names in tables],
        tags={**run_tags(config, "snapshot"), TABLE_TAG: SEVERAL},
    )


def _sentence(copies: Sequence[Copy], pinned: int) -> str:
    copying = [copy for copy in copies if copy.state == TableState.COPYING]
    if not copying:
        return f"All {pinned} pinned tables are copied."
    parts = []
    for copy in copying:
        landed = sum(chunk.state == "landed" for chunk in copy.plan)
        doing = "a run is at it" if copy.active else "its turn comes"
        if copy.wait_seconds > 0:
            doing = f"it failed and is tried again in {copy.wait_seconds:.0f} s"
        parts.append(f"{copy.names.table}: {landed}/{len(copy.plan)} chunks, {doing}")
    return "; ".join(parts)
