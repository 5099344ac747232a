"""Carrying out a backfill: its chunks are read by some threads, and applied by one.

Killed at any moment, it is carried out again from the chunks that aren't applied. Others may ask
for a pause or its end meanwhile: nothing is held then, and what is applied stays.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event

import psycopg
from pyspark.sql import SparkSession

from cdc_assets.backfill.apply import Looked
from cdc_assets.backfill.horizons import Horizons
from cdc_assets.backfill.planning import planned
from cdc_assets.backfill.reader import (
    PART_BYTES,
    Again,
    End,
    Part,
    Plan,
    Readers,
    Rewritten,
    TooLong,
)
from cdc_assets.backfill.request import refuse_masked_key
from cdc_assets.backfill.round import KEYS, ROUNDS, Chunk, Round, together
from cdc_assets.backfill.surplus import Surplus
from cdc_assets.errors import CdcError, Fenced, TablePaused, TableProblem, first_line
from cdc_assets.flusher.reach import LogBehind
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log import backfills as record
from cdc_assets.log.backfills import Backfill
from cdc_assets.materializer.actions.keys import has_bounds
from cdc_assets.materializer.corrections import refuse_uncorrectable
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.schema.ahead import look
from cdc_assets.messages.texts import counted
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.session.waits import writers
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.verify.point import FlushTo
from cdc_assets.verify.rows import comparable

# Parts that are applied in one commit, at most: of text. Of a table that changes it is one part,
# unless each commit has to read all of the lake table.
_GROUP_BYTES = 3 * PART_BYTES
# How long a backfill waits after each group of a table that changes, in times that the group took:
# merges, of which its readers wait, share Spark with it.
_WAITS = 1.0
_LOOK_SECONDS = 0.5
# How long parts wait for more of them: each commit costs a merge.
_GROUP_SECONDS = 10.0
# Rows whose changes left values out are read at such intervals: whoever goes on later searches the
# log from the first of them that wasn't.
_HEALED_SECONDS = 60.0
# Keys with more than one row that are mended at a time.
_MOST_DOUBLED = 50_000
# How long it waits before it tries what didn't work, and how often in a row.
_AGAIN_SECONDS, _TRIES = 2.0, 30
# How long a horizon takes before it is told who holds it up.
_TOLD_SECONDS = 4.0


class _Other(Exception):
    """Somebody asked for another state."""


def backfill_lock(number: int) -> str:
    """The lock of the process that carries a backfill out."""
    return f"backfill:{number}"


def carry_out(
    pipeline: Pipeline,
    session: SparkSession,
    number: int,
    flush_to: FlushTo,
    on_progress: Callable[[str], None] = lambda _: None,
    stop: Event | None = None,
) -> Backfill:
    """Carry out a backfill, until it ends, is paused, or ``stop`` is set; as it is then.

    It is left alone if another process carries it out, or it isn't to be. Raises CdcError if it
    fails, which its row says, too. If the Spark server ends under it once chunks were applied here,
    that is raised, but it goes on where it is carried out next; without any it had better not: it
    may be what ended the server.
    """
    store = pipeline.store
    if not store.try_lock(backfill_lock(number)):
        return record.backfill(store, number)
    try:
        if not record.become(store, number, "running"):
            return record.backfill(store, number)
        begun = record.backfill(store, number)
        before = begun.chunks_done
        work = _Backfilling(pipeline, session, begun, flush_to, on_progress, stop or Event())
        try:
            work.run()
        except _Other:
            pass
        except Exception as problem:
            reason = first_line(explained(problem, pipeline.config))
            if lost_server(problem) and record.backfill(store, number).chunks_done > before:
                record.note(store, number, reason)
            else:
                record.become(store, number, "failed", reason)
            raise
        return record.backfill(store, number)
    finally:
        store.unlock(backfill_lock(number))


@dataclass
class _Backfilling:
    pipeline: Pipeline
    session: SparkSession
    backfill: Backfill
    flush_to: FlushTo
    on_progress: Callable[[str], None]
    stop: Event
    _looked_at: float = field(default=0.0, init=False)
    _work: Round | None = field(default=None, init=False)
    """The last one: who goes on here knows how far it had searched the log."""
    _healed_at: float = field(default_factory=time.monotonic, init=False)
    _live: bool = field(default=True, init=False)
    """Whether changes of the table came while the last group was applied, if there was one."""
    _scans: bool = field(default=False, init=False)
    """Whether an index was thought to serve the condition, and it took too long."""

    def run(self) -> None:
        store, number = self.pipeline.store, self.backfill.number
        failures = 0
        while True:
            self._look()
            before = len(record.planned(store, number))
            try:
                self._carry_out()
                return
            except TablePaused as paused:
                record.note(store, number, first_line(paused))
                self.stop.wait(_AGAIN_SECONDS)
            except (Again, Fenced, LogBehind, psycopg.OperationalError) as again:
                if isinstance(again, Rewritten):
                    self._scans = self._scans or isinstance(again, TooLong)
                    self._work = None
                    record.plan(store, number, 0, "", [], 0)
                moved = len(record.planned(store, number)) < before
                failures = 1 if moved else failures + 1
                if failures > _TRIES:
                    raise
                record.note(store, number, first_line(again))
                self.on_progress(f"{first_line(again)}; it goes on in a moment")
                self.stop.wait(_AGAIN_SECONDS)
                with suppress(CdcError, psycopg.OperationalError):
                    self._follow()

    def _carry_out(self) -> None:
        store, number, lake = self.pipeline.store, self.backfill.number, self._lake()
        horizons, first = self._horizons(lake)
        plan = planned(self.pipeline, self.backfill, lake, first, scans=self._scans)
        with self.pipeline.connect_source("backfill") as witness:
            last = self._work
            work = self._work = Round(
                *(self.pipeline, self.session, lake, horizons, self.flush_to, witness),
                last.searched if last is not None else record.searched_from(store, number),
                last.partial if last is not None else {},
            )
            self._rows(work, plan)
            while not work.catch_up():
                record.search_from(store, number, work.searched_from)
                self._look()
            reasons = [work.healed(partial(self._written, work), partial(self._await, horizons))]
            if self.backfill.replaces:
                reasons += [self._surplus(work), work.nameless()]
        reason = "; ".join(filter(None, reasons)) or None
        record.become(store, number, "done", reason)

    def _follow(self) -> None:
        """Have the lake altered as the source was: on a quiet table no change may do that."""
        table = self.backfill.table
        if (seen := look(self.pipeline, table)) is not None:
            self.flush_to(seen.lsn)
            drain(self.pipeline, self.session, table, below=seen.lsn, look=seen)

    # --- before it reads ---

    def _look(self) -> None:
        """Raise _Other if somebody asked for another state, or this process is to end."""
        if self.stop.is_set():
            raise _Other
        if time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            if record.backfill(self.pipeline.store, self.backfill.number).state != "running":
                raise _Other

    def _lake(self) -> LakeTable:
        table = self.backfill.table
        lake = comparable(self.pipeline, table)
        refuse_uncorrectable(lake)
        if self.backfill.replaces:
            refuse_masked_key(lake)
        begun = record.backfill(self.pipeline.store, self.backfill.number)
        if begun.epoch and begun.epoch != lake.row.epoch:
            raise TableProblem(
                table, "it was copied anew since the backfill began, which has nothing to add"
            )
        return lake

    def _horizons(self, lake: LakeTable) -> tuple[Horizons, int]:
        """Wait for the first one. Whatever it doesn't cover is in the log from the offset on."""
        cursor = self.pipeline.store.cursor(lake.row.table)
        offset = cursor.offset if cursor else 0
        horizons = Horizons(offset, of_commits=self.pipeline.config.publishes)
        self._await(horizons, 0)
        return horizons, offset

    def _await(self, horizons: Horizons, offset: int) -> bool:
        """Wait for one above all that the log has before ``offset``."""
        began, told = time.monotonic(), False
        with self.pipeline.connect_source("backfill") as source:
            while not horizons.cover(source, offset):
                if not told and time.monotonic() - began > _TOLD_SECONDS:
                    told = True
                    who = "; ".join(writers(source)) or "nobody any more"
                    reason = f"it waits for transactions that have written: {who}"
                    record.note(self.pipeline.store, self.backfill.number, reason)
                    self.on_progress(reason)
                self._look()
                self.stop.wait(0.1)
        record.note(self.pipeline.store, self.backfill.number, None)
        return True

    # --- its rows ---

    def _rows(self, work: Round, plan: Plan) -> None:
        """Read and apply the chunks that are left."""
        if not plan.chunks:
            return
        group, ended, since = list[Part](), list[int](), time.monotonic()
        of = defaultdict[int, Chunk](Chunk)
        self.on_progress(f"{self.backfill.table}: {counted(len(plan.chunks), 'chunk')} to be read")
        readers = min(self.pipeline.config.backfills.readers, len(plan.chunks))
        with Readers(self.pipeline, plan, work.horizons, readers) as reading:
            for found in reading.read(_LOOK_SECONDS):
                self._look()
                if not group and not ended:
                    since = time.monotonic()
                if isinstance(found, Part):
                    group.append(found)
                elif isinstance(found, End):
                    ended.append(found.chunk)
                size = sum(part.data.nbytes for part in group)
                few = self._live and has_bounds(work.lake)
                most = min(PART_BYTES, _GROUP_BYTES) if few else _GROUP_BYTES
                if size >= most or time.monotonic() - since > _GROUP_SECONDS:
                    self._in_turn(work, group, ended, of)
                    group, ended = [], []
        self._apply(work, group, ended, of)

    def _in_turn(
        self, work: Round, group: list[Part], ended: list[int], of: defaultdict[int, Chunk]
    ) -> None:
        """:meth:`_apply`, and leave Spark to the merges for a while if there are any."""
        began, before = time.monotonic(), work.searched
        self._apply(work, group, ended, of)
        self._live = work.searched > before
        if self._live:
            self._rest(_WAITS * (time.monotonic() - began))

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.stop.wait(min(left, _LOOK_SECONDS))
            self._look()

    def _apply(
        self, work: Round, group: list[Part], ended: list[int], of: defaultdict[int, Chunk]
    ) -> None:
        """Apply parts in one commit; the chunks that have ended are applied then."""
        store, number = self.pipeline.store, self.backfill.number
        if any(part.keys for part in group):
            self._write(work, together([part for part in group if part.keys]), reads=True)
        for part in group:
            of[part.chunk].add(part)
        if len(work.partial) > KEYS or time.monotonic() - self._healed_at > _HEALED_SECONDS:
            work.heal(partial(self._written, work), work.is_proven)
            self._healed_at = time.monotonic()
        record.search_from(store, number, work.searched_from)
        for chunk in ended:
            record.chunk_applied(store, number, of.pop(chunk).applied(chunk))
        if group or ended:
            self._told()

    def _write(self, work: Round, some: Looked, *, reads: bool = False) -> None:
        done = work.apply(some)
        record.count(
            self.pipeline.store,
            self.backfill.number,
            read=len(some.rows) if reads else 0,
            applied=done.applied,
            differed=done.differed,
            superseded=done.superseded if reads else 0,
            removed=done.removed,
        )

    def _written(self, work: Round, some: Looked) -> None:
        """Of rows that are read by key, which aren't counted as read."""
        self._look()
        self._write(work, some)

    def _surplus(self, work: Round) -> str | None:
        """Take away the rows that only the lake has.

        A key that only it had may have come since: then it has two rows, of which one goes.
        """
        for some in Surplus(work).looked(self._look):
            self._write(work, some)
            self._told()
        work.catch_up()
        doubled = list[Key]()
        for _ in range(ROUNDS):
            for some in work.by_key(doubled):
                self._written(work, some)
            if not (doubled := work.doubled(_MOST_DOUBLED)):
                return None
        return f"at least {len(doubled):,} keys have more than one row in its lake table"

    def _told(self) -> None:
        now = record.backfill(self.pipeline.store, self.backfill.number)
        removed = f", {now.removed:,} removed" if now.removed else ""
        self.on_progress(
            f"{now.table}: {now.chunks_done} of {now.chunks} chunks, {now.read:,} rows read,"
            f" {now.applied:,} applied ({now.differed:,} differed), {now.superseded:,} left to the"
            f" stream{removed}"
        )
