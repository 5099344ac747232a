"""Draining a table's log into the lake, one bounded merge after the other.

Keeps invariants 4, 7 and 9. The cursor is read from the Iceberg table, never from its cache; the
table's writer lock is held from that read to the commit. A worker that lost the lock meanwhile
can't commit (``workers.worker``). A merge's rows are of one relation: the table is altered between
two merges.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import psycopg
from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced, TablePaused, TableProblem
from cdc_assets.lake.comments import annotate
from cdc_assets.lake.layout import arrange
from cdc_assets.lake.standing import begin, is_begun, pending, standing
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.batch import Window, facts, outlines, take
from cdc_assets.log.relation import alike
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import Claim, Cursor
from cdc_assets.log.tables import TableRow
from cdc_assets.log.wishes import paused
from cdc_assets.materializer.events import events
from cdc_assets.materializer.lethal import merging
from cdc_assets.materializer.merge import merge
from cdc_assets.materializer.reread import rereader
from cdc_assets.materializer.schema.ahead import Look, relation_ahead
from cdc_assets.materializer.schema.alter import current, follow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.comments import comments
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of draining a table. ``pending_entries`` were registered but not applied."""

    table: TableId
    merges: int
    changes: int
    upserted: int
    deleted: int
    repaired: int
    pending_entries: int
    cursor: Cursor
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Limits:
    below: Lsn | None
    until_offset: int | None
    budget_seconds: float | None
    batch_bytes: int
    look: Look | None
    claim: Claim | None

    def reached(self, cursor: Cursor, seconds: float) -> bool:
        return (self.until_offset is not None and cursor.offset >= self.until_offset) or (
            self.budget_seconds is not None and seconds > self.budget_seconds
        )


def drain(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    *,
    below: Lsn | None = None,
    until_offset: int | None = None,
    budget_seconds: float | None = None,
    batch_bytes: int | None = None,
    look: Look | None = None,
    worker: uuid.UUID | None = None,
    on_merge: Callable[[str], None] = logger.info,
) -> Drained | None:
    """Apply the registered log of ``table``, until nothing is pending or the budget is over.

    ``until_offset`` ends it once that much of the log is applied, so that constant writes don't
    keep it busy for ever. ``below`` applies only transactions that committed below that LSN, and
    waits for the table's lock; without it, None is returned when another worker has the lock. None
    is returned, too, when the copy isn't complete. ``worker`` takes the claim to the table. Raises
    TableProblem when the table is parked or its lake table is gone, Fenced when another worker came
    between.

    A schema change is applied with the first row change that follows it. If none has followed yet,
    it is applied at the end of the log, provided that ``look`` (or a look taken then) found it.
    """
    store, claim = pipeline.store, None
    lock = f"write:{table}"
    if below is not None:
        store.lock(lock)
    elif worker is not None:
        claim = store.claim(table, lock, worker)
        if claim is None:
            return None
    elif not store.try_lock(lock):
        return None
    try:
        most = batch_bytes or pipeline.config.lake.merge_bytes
        limits = _Limits(below, until_offset, budget_seconds, most, look, claim)
        return _drain(pipeline, session, table, limits, on_merge)
    finally:
        with suppress(psycopg.OperationalError):  # a session that is gone has no locks
            store.unlock(lock)


def _annotate(pipeline: Pipeline, session: SparkSession, lake: LakeTable) -> None:
    """Give a new table the source's comments; maintenance follows them when they change."""
    try:
        with pipeline.connect_source("comments") as source:
            told = comments(source, lake.row.oid)
    except psycopg.OperationalError:  # a merge doesn't depend on comments
        return
    annotate(session, lake, told)


def _drain(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    limits: _Limits,
    on_merge: Callable[[str], None],
) -> Drained | None:
    below = limits.below
    store, began = pipeline.store, time.monotonic()
    row = store.table(table)
    if row is not None and row.state == "parked":
        raise TableProblem(table, row.reason or "it is parked")
    if row is None or row.state != "streaming" or row.snapshot_lsn is None:
        return None
    if (since := paused(store).get(table)) is not None:
        raise TablePaused(table, since)
    lake = LakeTable(pipeline.config, pipeline.config.table(table), row)
    if (mode := lake.table.mode) not in (None, row.mode):
        problem = TableProblem(
            table,
            f"its mode is {mode} now, and its lake table was made for {row.mode}",
            f"Copy it anew: cdc-assets resync {table}; or set the mode back, and resync.",
        )
        store.park(table, str(problem), row.epoch)
        raise problem
    begin(store, session, lake)
    # A comparison has to find foreign writes, so they don't stop it.
    state, cursor = standing(store, lake, whatever_others_wrote=below is not None)
    lake, altering = current(pipeline, session, lake, state)
    state = _unmoved(lake, state)
    if store.cursor(table) is None:
        _annotate(pipeline, session, lake)
    storage, whole = Storage.of(pipeline.config.s3), _whole_from(row)
    merges = changes = upserted = deleted = repaired = 0
    while True:
        entries, cursor = pending(store, lake, cursor)
        # Read after the entries: a copy begun meanwhile has a later pin, and they are older.
        if (copy := store.copy_state(table)) is None or copy.epoch != row.epoch:
            raise Fenced(f"{table}: its copy was begun anew.")
        # A turn merges at least once, however short the budget is.
        over = limits.reached(cursor, time.monotonic() - began if merges else 0.0)
        if not entries:
            ahead = (
                None
                if over and limits.look is None
                else relation_ahead(pipeline, lake, limits.look)
            )
            if ahead is not None and store.entries(table, cursor.offset):
                continue  # entries registered meanwhile may be of the relation before
            if ahead is not None:
                lake = follow(pipeline, session, lake, state, ahead)
                state = _unmoved(lake, state)
            break
        if over:
            break
        outlined, told = alike(outlines(take(entries, limits.batch_bytes), storage))
        batch = [one.entry for one in outlined]
        window = Window(cursor.offset, row.snapshot_lsn, below)
        key = told.key(lake.row.key_columns)
        found = facts(outlined, window, key)
        if lake.row.mode == "soft_delete" and (first := found.first_truncate) is not None:
            # A truncate marks the rows that exist at that point: it is a batch of its own.
            until = first if first > cursor.offset else first + 1
            window = replace(window, until=until)
            found = facts(outlined, window, key)
        if found.end_offset <= cursor.offset:
            # The next rows committed at or above the cut.
            if limits.look and (ahead := relation_ahead(pipeline, lake, limits.look)) is not None:
                lake = follow(pipeline, session, lake, state, ahead)
                state = _unmoved(lake, state)
            break
        last = batch[-1]
        applied = last.flushable_lsn if below is None else min(below, last.flushable_lsn)
        if window.until is not None and found.end_offset < last.end_offset:
            applied = cursor.applied_lsn
        reached = Cursor(found.end_offset, applied, last.commit_time)
        if found.rows:  # else the copy already has all of it, and no commit is needed
            at = time.monotonic()
            if not merges:
                arrange(session, lake, lake.upgrade(session))
            if altering or not told.same(lake.row):
                lake, altering = follow(pipeline, session, lake, state, told), False
                state = _unmoved(lake, state)
            frame = events(
                session,
                batch,
                window,
                storage,
                pipeline.config.spark.cores,
                whole=row.mode != "mirror",
            )
            mixed = found.first_commit is not None and found.first_commit < whole
            with merging(store, session, lake, cursor.offset):
                reread = rereader(pipeline, lake)
                done = merge(session, lake, state, frame, found, reached, reread, mixed=mixed)
            if done.repaired:
                whole = _whole_from(store.table(table))
            state = _unmoved(lake, replace(state, cursor=reached))
            merges, changes = merges + 1, changes + found.rows
            upserted, deleted = upserted + done.upserted, deleted + done.deleted
            repaired += done.repaired
            on_merge(
                f"{table}: {found.rows:,} changes merged as {done.upserted:,} upserts and"
                f" {done.deleted:,} deletes in {time.monotonic() - at:.1f} s"
                f" (log applied to {applied}, {len(entries) - len(batch)} files wait)"
            )
        cursor = reached
        store.set_cursor(table, cursor, limits.claim)
    store.set_cursor(table, cursor, limits.claim)
    return Drained(
        table,
        merges,
        changes,
        upserted,
        deleted,
        repaired,
        len(entries),
        cursor,
        state.total_rows,
        time.monotonic() - began,
    )


def _whole_from(row: TableRow | None) -> Lsn:
    """The LSN from which on the lake's rows are of one moment; zero if they always were."""
    if row is None or row.complete_lsn is None or row.complete_lsn == row.snapshot_lsn:
        return Lsn.ZERO
    return row.complete_lsn


def _unmoved(lake: LakeTable, state: LakeState) -> LakeState:
    """The table's state now. Raises Fenced unless its cursor is still that of ``state``."""
    now = lake.state()
    if state.cursor is None or now.cursor is None or now.cursor.offset != state.cursor.offset:
        raise Fenced(f"{lake.row.table}: another writer moved the lake table; try again.")
    return now


def outstanding(pipeline: Pipeline, table: TableId) -> int | None:
    """The end of the log that is registered for ``table`` now, None if all of it is applied.

    Reads the table's own snapshots, without Spark. While another writer has the table, the answer
    is the log's end. Raises TableProblem when the table is parked, its copy isn't complete, or its
    log can't be applied.
    """
    store = pipeline.store
    row = store.table(table)
    if row is not None and row.state == "parked":
        raise TableProblem(table, row.reason or "it is parked")
    if row is None or row.state != "streaming" or row.snapshot_lsn is None:
        raise TableProblem(table, "its copy isn't complete", "Run cdc-assets snapshot first.")
    lake = LakeTable(pipeline.config, pipeline.config.table(table), row)
    if not store.try_lock(lock := f"write:{table}"):
        return store.log_end(table)
    try:
        if not is_begun(store, lake):
            return store.log_end(table)
        _, cursor = standing(store, lake)
        entries, reached = pending(store, lake, cursor)
        if not entries:
            store.set_cursor(table, reached)
    finally:
        store.unlock(lock)
    return entries[-1].end_offset if entries else None
