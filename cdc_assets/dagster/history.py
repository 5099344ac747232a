"""What Dagster remembers of a source is bounded: old runs, events, checks and ticks are removed.

Dagster keeps each run and each event for ever: hundreds of tables are a gigabyte a day. What it
shows of the present stays however old it is: the newest event of each asset and partition, the
newest evaluation of each check, and each run that has one of these. Only what this platform's own
sensors and schedules made is removed; runs that a person launched stay, and so does everything of
assets that aren't ours. Events without a run are of sensors; one that a person reported on such an
asset goes with them. Dagster's snapshots of jobs stay, one for each set of tables that a run had.

Dagster has an interface to delete a run, and none for events without a run or for evaluations;
those are deleted by statements on its tables, which are the same on SQLite, Postgres and MySQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import sqlalchemy as db

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.internals import (
    RUNLESS_RUN_ID,
    AssetCheckExecutionRecordStatus,
    AssetCheckExecutionsTable,
    AssetEventTagsTable,
    InstigatorType,
    RemoteRepositoryOrigin,
    SqlEventLogStorage,
    SqlEventLogStorageTable,
    TickStatus,
)
from cdc_assets.dagster.names import SOURCE_TAG, sensor_names

# What was done to a table is reported each minute; an hour of it shows how it goes.
REPORTS = timedelta(hours=1)
# A tick that was skipped says what there was to wait for; there are 30,000 a day, of 1.5 kB each.
SKIPPED_TICKS = timedelta(hours=6)
HEARTBEAT = "heartbeat"  # the metadata that tells one from a report
# Runs that are removed at once, about; the next maintenance goes on.
RUNS_AT_ONCE = 500
# Keys, and rows, in one statement; and how often rows are deleted, of as many keys, at once.
_KEYS, _ROWS, _TRANSACTIONS = 200, 500, 200
_FINISHED = [
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
]
_OF_ASSETS = [
    dg.DagsterEventType.ASSET_MATERIALIZATION.value,
    dg.DagsterEventType.ASSET_OBSERVATION.value,
    dg.DagsterEventType.FRESHNESS_STATE_CHANGE.value,
]
_EVALUATED = [
    AssetCheckExecutionRecordStatus.SUCCEEDED.value,
    AssetCheckExecutionRecordStatus.FAILED.value,
]
_EVENT, _LATER = SqlEventLogStorageTable.alias("e"), SqlEventLogStorageTable.alias("l")
# Where events are, in the order in which they go.
_OF_EVENTS = (
    (AssetEventTagsTable, AssetEventTagsTable.c.event_id),
    (SqlEventLogStorageTable, SqlEventLogStorageTable.c.id),
)
_IS_HEARTBEAT = _EVENT.c.event.like(f'%"label": "{HEARTBEAT}"%')
_EVENT_FOLLOWED = db.exists().where(
    _LATER.c.asset_key == _EVENT.c.asset_key,
    _LATER.c.dagster_event_type == _EVENT.c.dagster_event_type,
    _LATER.c.partition.is_not_distinct_from(_EVENT.c.partition),
    _LATER.c.id > _EVENT.c.id,
)
_CHECK, _AFTER = AssetCheckExecutionsTable.alias("c"), AssetCheckExecutionsTable.alias("a")
_CHECK_FOLLOWED = db.exists().where(
    _AFTER.c.asset_key == _CHECK.c.asset_key,
    _AFTER.c.check_name == _CHECK.c.check_name,
    _AFTER.c.id > _CHECK.c.id,
    # Not one that is only planned, or was when its run died.
    _AFTER.c.execution_status.in_(_EVALUATED),
)


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many were removed: runs, events that belong to no run, evaluations of checks."""

    runs: int = 0
    events: int = 0
    evaluations: int = 0

    @property
    def sentence(self) -> str:
        return (
            f"removed from Dagster's history: {self.runs:,} runs, {self.events:,} events without"
            f" a run, {self.evaluations:,} evaluations of checks"
        )


def prune(
    instance: dg.DagsterInstance,
    config: SourceConfig,
    assets: Sequence[dg.AssetKey],
    beating: Sequence[dg.AssetKey],
    now: datetime,
    repository: RemoteRepositoryOrigin | None = None,
) -> Pruned:
    """Remove what is older than ``maintenance.keep_history``.

    ``assets``: all of the source's, with those that sensors report every other minute, ``beating``.
    ``repository``: where the source's sensors are; without it their ticks stay.
    """
    keep = config.maintenance.keep_history
    storage = instance.event_log_storage
    if keep is None or not isinstance(storage, SqlEventLogStorage):
        return Pruned()
    runs = _prune_runs(instance, storage, config, now - keep)
    events = evaluations = 0
    for some in _parts([key.to_string() for key in assets]):
        events += _prune_events(storage, some, _EVENT.c.timestamp < _stored(now - keep))
        evaluations += _prune_evaluations(storage, some, _stored(now - keep))
    for some in _parts([key.to_string() for key in beating]):
        events += _prune_events(
            storage, some, _EVENT.c.timestamp < _stored(now - min(keep, REPORTS))
        )
    if repository is not None:
        _prune_ticks(instance, config, repository, now - min(keep, SKIPPED_TICKS))
    return Pruned(runs, events, evaluations)


def forget_heartbeats(
    instance: dg.DagsterInstance, config: SourceConfig, assets: Sequence[dg.AssetKey]
) -> None:
    """Remove the heartbeats of ``assets`` that another event followed, however young they are."""
    storage = instance.event_log_storage
    if config.maintenance.keep_history is None or not isinstance(storage, SqlEventLogStorage):
        return
    for some in _parts([key.to_string() for key in assets]):
        _prune_events(storage, some, _IS_HEARTBEAT)


def forget_partition(
    instance: dg.DagsterInstance, config: SourceConfig, asset: dg.AssetKey, partition: str
) -> None:
    """Remove the events of a partition that is gone: its run is none of the present any more."""
    storage = instance.event_log_storage
    if config.maintenance.keep_history is None or not isinstance(storage, SqlEventLogStorage):
        return
    its = db.select(_EVENT.c.id).where(
        _EVENT.c.asset_key == asset.to_string(), _EVENT.c.partition == partition
    )
    _delete(storage.index_connection, its, _OF_EVENTS)


def _stored(at: datetime) -> datetime:
    """A time as Dagster's tables have it: UTC without saying so."""
    return at.astimezone(UTC).replace(tzinfo=None)


def _prune_runs(
    instance: dg.DagsterInstance,
    storage: SqlEventLogStorage,
    config: SourceConfig,
    before: datetime,
) -> int:
    old = dg.RunsFilter(tags={SOURCE_TAG: config.name}, statuses=_FINISHED, updated_before=before)
    removed, last = 0, None
    while removed < RUNS_AT_ONCE:
        page = instance.get_run_records(old, limit=_KEYS, cursor=last, ascending=True)
        # One with a parent was executed again by a person, and has its tags.
        runs = [r.dagster_run.run_id for r in page if r.dagster_run.parent_run_id is None]
        gone = set(runs) - _of_the_present(storage, runs)
        for run in gone:
            # The run itself comes last: what is left if this is interrupted is found again.
            instance.compute_log_manager.delete_logs(prefix=[run])
            storage.delete_events(run)
            instance.run_storage.delete_run(run)
        removed += len(gone)
        if len(page) < _KEYS:
            break
        # A page begins after a run that is still there.
        stay = [r.dagster_run.run_id for r in page if r.dagster_run.run_id not in gone]
        last = stay[-1] if stay else last
    return removed


def _of_the_present(storage: SqlEventLogStorage, runs: Sequence[str]) -> set[str]:
    """Those of ``runs`` that have the newest event of an asset's partition, or of a check."""
    events = db.select(_EVENT.c.run_id).where(_EVENT.c.dagster_event_type.in_(_OF_ASSETS))
    checks = db.select(_CHECK.c.run_id)
    found = set[str]()
    with storage.index_connection() as connection:
        for some in _parts(runs):
            for query, run, followed in (
                (events, _EVENT.c.run_id, _EVENT_FOLLOWED),
                (checks, _CHECK.c.run_id, _CHECK_FOLLOWED),
            ):
                newest = query.where(run.in_(some)).where(~followed).distinct()
                found |= {row[0] for row in connection.execute(newest)}
    return found


def _prune_events(
    storage: SqlEventLogStorage, assets: Sequence[str], which: db.ColumnElement[bool]
) -> int:
    """Remove events of ``assets`` without a run, each of which a later one followed."""
    old = (
        db.select(_EVENT.c.id)
        .where(_EVENT.c.asset_key.in_(assets))
        .where(_EVENT.c.run_id == RUNLESS_RUN_ID)
        .where(_EVENT.c.dagster_event_type.in_(_OF_ASSETS))
        .where(which)
        .where(_EVENT_FOLLOWED)
    )
    removed = _delete(storage.index_connection, old, _OF_EVENTS)
    # On SQLite the events of each run, and those without one, are in a file beside the index, too.
    _delete(lambda: storage.run_connection(RUNLESS_RUN_ID), old, _OF_EVENTS)
    return removed


def _prune_ticks(
    instance: dg.DagsterInstance,
    config: SourceConfig,
    repository: RemoteRepositoryOrigin,
    before: datetime,
) -> None:
    """Remove ticks of the source's sensors that were skipped."""
    ours = sensor_names(config.name)
    for state in instance.all_instigator_state(
        repository.get_id(), repository.get_selector().selector_id, InstigatorType.SENSOR
    ):
        if state.name in ours:
            instance.purge_ticks(
                state.instigator_origin_id,
                state.selector_id,
                before.timestamp(),
                [TickStatus.SKIPPED],
            )


def _prune_evaluations(storage: SqlEventLogStorage, assets: Sequence[str], before: datetime) -> int:
    old = (
        db.select(_CHECK.c.id)
        .where(_CHECK.c.asset_key.in_(assets))
        .where(_CHECK.c.create_timestamp < before)
        .where(_CHECK_FOLLOWED)
    )
    table = AssetCheckExecutionsTable
    return _delete(storage.index_connection, old, [(table, table.c.id)])


def _delete(
    connect: Callable[[], AbstractContextManager[db.Connection]],
    old: db.Select[tuple[int]],
    tables: Iterable[tuple[db.Table, db.Column[Any]]],
) -> int:
    """Delete from ``tables`` what ``old`` finds; in short transactions, since others write, too."""
    removed = 0
    for _ in range(_TRANSACTIONS):
        with connect() as connection:
            ids = [row[0] for row in connection.execute(old.limit(_ROWS))]
            for table, column in tables:
                if ids:
                    connection.execute(table.delete().where(column.in_(ids)))
        removed += len(ids)
        if len(ids) < _ROWS:
            break
    return removed


def _parts(items: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(items), _KEYS):
        yield items[first : first + _KEYS]
