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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psycopg
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced, TablePaused, TableProblem
from cdc_assets.lake.adopted.taking import take_over
from cdc_assets.lake.comments import annotate
from cdc_assets.lake.layout import arrange
from cdc_assets.lake.lost_reply import healing
from cdc_assets.lake.publish import clocks_blamed
from cdc_assets.lake.standing import begin, may_hold_others, pending, standing
from cdc_assets.lake.state import LakeState, lake_state
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked.marks import pending_mark
from cdc_assets.log.asked.wishes import paused
from cdc_assets.log.cursors import Claim, Cursor
from cdc_assets.log.figures.work import NO_WORK, Work, failures_counted
from cdc_assets.log.locks import write_lock
from cdc_assets.log.relation import Told
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry
from cdc_assets.materializer.actions.commit import Change, Merged
from cdc_assets.materializer.events import Batch
from cdc_assets.materializer.lethal import merging
from cdc_assets.materializer.marking import tag
from cdc_assets.materializer.merge import merge
from cdc_assets.materializer.outstanding import streaming, whole_from
from cdc_assets.materializer.reread import await_visible, rereader
from cdc_assets.materializer.schema.ahead import Look, relation_ahead
from cdc_assets.materializer.schema.alter import current, follow
from cdc_assets.materializer.window import NextWindow, next_window
from cdc_assets.messages.texts import command
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
    data_files: int = 0
    """Of the table, by then."""
    moved: bool = True
    """Whether any of the log was applied, or the table altered."""


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
    lock = write_lock(table)
    if below is not None:
        store.lock(lock)
    elif worker is not None:
        claim = store.claim(table, worker)
        if claim is None:
            return None
    elif not store.try_lock(lock):
        return None
    try:
        row = streaming(store, table)
        if row is None:
            return None
        if (since := paused(store).get(table)) is not None:
            raise TablePaused(table, since)
        most = batch_bytes or pipeline.config.lake.merge_bytes
        limits = _Limits(below, until_offset, budget_seconds, most, look, claim)
        lake = LakeTable(pipeline.config, pipeline.config.table(table), row)
        told = failures_counted(store.connection, store.source, "merge", Fenced)
        with told, clocks_blamed(lake), healing(store, session, lake):  # to begin may write
            lake = replace(lake, row=take_over(store, session, lake))
            return _Drain(pipeline, session, lake, limits, on_merge).run()
    finally:
        with suppress(psycopg.OperationalError):  # a session that is gone has no locks
            store.unlock(lock)


class _Drain:
    """One table, opened by the holder of its writer lock: as its own snapshots and columns say.

    Each round takes the next window of the log, applies it, and records the cursor.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        session: SparkSession,
        lake: LakeTable,
        limits: _Limits,
        on_merge: Callable[[str], None],
    ) -> None:
        self._pipeline = pipeline
        self._store = pipeline.store
        self._session = session
        self._table = lake.row.table
        self._limits = limits
        self._on_merge = on_merge
        self._began = time.monotonic()
        self._storage = Storage.of(pipeline.config.s3)
        self._lake = lake
        self._refuse_another_mode()
        loaded = begin(self._store, session, self._lake)
        self._state = lake_state(loaded)
        # A comparison has to find foreign writes, so they don't stop it.
        self._cursor = standing(
            self._store, self._lake, self._state, whatever_others_wrote=limits.below is not None
        )
        self._lake, self._altering, self._loaded = current(
            pipeline, session, self._lake, self._state, loaded
        )
        if self._loaded is not loaded:
            self._now(self._loaded, self._state)
        if self._store.cursor(self._table) is None:
            self._annotate()
        self._whole_from = whole_from(self._store, self._table)
        self._merges = self._changes = 0
        self._moved = self._loaded is not loaded
        self._before = self._cursor
        self._done = Merged(0, 0, 0)

    def run(self) -> Drained:
        while True:
            entries, self._cursor = pending(self._store, self._lake, self._cursor)
            self._refuse_another_copy()
            # Read after the entries, else it could pass one: see log.asked.marks.
            if (mark := pending_mark(self._store, self._table)) is not None:
                entries = [entry for entry in entries if entry.end_offset <= mark.offset]
                if not entries:
                    tag(self._store, self._session, self._lake, self._state, self._cursor, mark)
                    continue
            # A turn merges at least once, however short the budget is.
            seconds = time.monotonic() - self._began if self._merges else 0.0
            over = self._limits.reached(self._cursor, seconds)
            found = None if over or not entries else self._next_window(entries)
            if found is not None:
                waiting = len(entries) - len(found.entries)
                # Without rows the copy already has all of it: no commit is needed.
                work = self._apply(found, waiting) if found.facts.rows else NO_WORK
                self._record(found.reached, work)
            elif (over and entries) or not self._follow_catalog(over=over, cut=bool(entries)):
                break
        self._record(self._cursor)
        return Drained(
            self._table,
            self._merges,
            self._changes,
            self._done.upserted,
            self._done.deleted,
            self._done.repaired,
            len(entries),
            self._cursor,
            self._state.total_rows,
            time.monotonic() - self._began,
            self._state.data_files,
            self._moved or self._cursor.offset != self._before.offset,
        )

    # --- a round ---

    def _next_window(self, entries: Sequence[LogEntry]) -> NextWindow | None:
        return next_window(
            self._lake.row,
            self._cursor,
            entries,
            self._storage,
            below=self._limits.below,
            batch_bytes=self._limits.batch_bytes,
        )

    def _apply(self, found: NextWindow, waiting: int) -> Work:
        """Merge the window's rows in one commit, into a table that has their relation."""
        at, session, facts = time.monotonic(), self._session, found.facts
        if not self._merges:
            self._lake.upgrade(session, self._loaded)
            arrange(session, self._lake, self._loaded)
        batch = Batch(found.entries, found.window, self._storage)
        if self._altering or not found.relation.same(self._lake.row):
            # Only a transaction that altered the table has rows of its columns before others see
            # them; the catalog would have the columns of before.
            with self._pipeline.connect_source("schema") as source:
                await_visible(source, self._lake, batch.transactions())
            self._alter(found.relation)
            self._altering = False
        lake = self._lake
        mixed = facts.first_commit is not None and facts.first_commit < self._whole_from
        reread = rereader(self._pipeline, lake, batch.transactions)
        change = Change(
            session,
            lake,
            self._state,
            self._loaded,
            batch,
            self._pipeline.config.spark.cores,
            facts,
            found.reached,
            found.lsn,
            reread,
            mixed=mixed,
            inserts_add=lambda: (
                found.relation.keys_are_unique
                and not mixed
                and not may_hold_others(self._store, lake, self._state, self._loaded)
            ),
        )
        with merging(self._store, session, lake, self._cursor.offset):
            done = merge(change)
        if done.repaired:
            self._whole_from = whole_from(self._store, self._table)
        self._now(lake.load(), replace(self._state, cursor=found.reached))
        self._merges, self._changes = self._merges + 1, self._changes + facts.rows
        self._done += done
        seconds, read = time.monotonic() - at, sum(e.rows.byte_size for e in found.entries)
        self._on_merge(
            f"{self._table}: {facts.rows:,} changes merged as {done.upserted:,} upserts and"
            f" {done.deleted:,} deletes in {seconds:.1f} s"
            f" (log applied to {found.reached.applied_lsn}, {waiting} files wait)"
        )
        return Work("merge", rows=facts.rows, bytes=read, seconds=seconds)

    def _record(self, reached: Cursor, work: Work = NO_WORK) -> None:
        self._cursor = reached
        self._store.set_cursor(self._table, reached, self._limits.claim, work)

    def _follow_catalog(self, *, over: bool, cut: bool) -> bool:
        """Alter the table as the catalog has it, where no row of another relation is to come.

        ``cut``: the rows that wait committed at or above ``below``; ``over``: a limit is reached.
        Nothing but the caller's look is used then. True if rows came meanwhile that may be of the
        relation before.
        """
        if self._limits.look is None and (over or cut):
            return False
        ahead = relation_ahead(self._pipeline, self._lake, self._limits.look)
        if ahead is None:
            return False
        if not cut and self._store.entries(self._table, self._cursor.offset):
            return True
        self._alter(ahead)
        return False

    # --- parts ---

    def _alter(self, relation: Told) -> None:
        self._lake = follow(self._pipeline, self._session, self._lake, self._state, relation)
        self._whole_from = whole_from(self._store, self._table)
        self._moved = True
        self._now(self._lake.load(), self._state)

    def _now(self, loaded: Table | None, expected: LakeState) -> None:
        """Go on with the table as it is; raises Fenced unless its cursor is the expected one."""
        state = lake_state(loaded)
        cursor, wanted = state.cursor, expected.cursor
        if loaded is None or cursor is None or wanted is None or cursor.offset != wanted.offset:
            raise Fenced(f"{self._table}: another writer moved the lake table; try again.")
        self._state, self._loaded = state, loaded

    def _annotate(self) -> None:
        """Give a new table the source's comments; maintenance follows them when they change."""
        try:
            with self._pipeline.connect_source("comments") as source:
                told = comments(source, self._lake.row.oid)
        except psycopg.OperationalError:  # a merge doesn't depend on comments
            return
        annotate(self._session, self._lake, told)

    def _refuse_another_mode(self) -> None:
        row = self._lake.row
        if (mode := self._lake.table.mode) in (None, row.mode):
            return
        problem = TableProblem(
            row.table,
            f"its mode is {mode} now, and its lake table was made for {row.mode}",
            f"Set the mode back if it should stay; in any case: {command('resync', row.table)}",
        )
        self._store.park(row.table, problem.reason, row.epoch)
        raise problem

    def _refuse_another_copy(self) -> None:
        """Called once the entries are read: a copy begun meanwhile has a later pin than they."""
        copy = self._store.copy_state(self._table)
        if copy is None or copy.epoch != self._lake.row.epoch:
            raise Fenced(f"{self._table}: its copy was begun anew.")
