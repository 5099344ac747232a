"""One table's copy as one coordinator sees it: what to claim, what has landed, how it ended.

Keeps invariant 10: a table is complete when its target holds every chunk of the plan, and counts as
such only once the log is applied past the point of the last pin that a chunk was read under.

The pin decides the snapshot that a chunk is read under (``pins.pins``). If a pin is lost, the
copied chunks of a mirror with a key stay: the log is applied from the first pin on, and corrects
rows that the later snapshot shows twice or not at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import psycopg
from psycopg import sql
from pyiceberg.transforms import parse_transform
from pyiceberg.types import StringType
from pyspark.sql import SparkSession

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.config.layout import parse_part
from cdc_assets.errors import CopyRestarted, Fenced, SnapshotLost, TableProblem
from cdc_assets.log.batch import Window, facts, outline
from cdc_assets.log.copies.chunks import (
    ChunkProgress,
    chunks,
    claimable,
    read_until,
    restart_copy,
    void_copy,
)
from cdc_assets.log.copies.claims import ClaimScope
from cdc_assets.log.copies.looks import CopyLook
from cdc_assets.log.locks import write_lock
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.texts import command
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe, heaps
from cdc_assets.postgres.session.connect import conninfo, uri
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.postgres.types import select_expression
from cdc_assets.readiness.source.enrolment import refuse_made_otherwise
from cdc_assets.readiness.source.planning import refuse_unplannable
from cdc_assets.snapshot.landing import Landing
from cdc_assets.snapshot.numbers import numbers_there, publication_there
from cdc_assets.snapshot.planned import CopyTask
from cdc_assets.snapshot.progress import CopyProgress

logger = logging.getLogger(__name__)

# Chunks of a claim, and of a file, at most: with 16 MB chunks a crash costs each task 128 MB of
# reading, and a table of 2,000 chunks gets 250 files.
CLAIM_CHUNKS = 8
# How long written chunks may wait for their commit.
COMMIT_SECONDS = 5.0
# How long the log may take to show that a table was truncated.
_LOG_SECONDS = 30.0


class TableCopy:
    """One table's copy as one coordinator sees it."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: SparkSession,
        row: TableRow,
        only: frozenset[str] | None,
        on_progress: Callable[[CopyProgress], None],
    ) -> None:
        assert row.pin is not None  # it is copying
        self.table = row.table
        self.pin = row.pin
        self._pipeline = pipeline
        self._session = session
        self._row = row
        self._only = only
        self._on_progress = on_progress
        self._store = pipeline.store
        self._lock = write_lock(row.table)
        self._landing = Landing(pipeline.config, pipeline.store, row)
        self._began = self._committed_at = time.monotonic()
        self._reported: set[str] = set()
        self._here: list[ChunkProgress] = []
        self._io: Mapping[str, str] = {}  # of the last task
        self._left = 2**31  # chunks, when a job was cut last

    def open(self) -> None:
        """Make the target of the copy. Raises TableProblem."""
        refuse_made_otherwise(self._store, self._row, self._pipeline.config)
        with self._store.locked(self._lock):
            self._landing.open()
        self._reported = {c.key for c in self._chunks() if c.state == "landed"}

    def outstanding(self) -> int:
        """How many of the wanted chunks haven't landed."""
        return sum(c.state != "landed" for c in self._wanted(self._chunks()))

    def claimable(self) -> bool:
        return claimable(self._store, self._row, self._only) > 0

    def rests(self, look: CopyLook | None, *, at_once: bool) -> bool:
        """Whether there is nothing yet for :meth:`step`, by a look at many tables together.

        Written chunks wait for COMMIT_SECONDS, or until no wanted one is unread. ``at_once``: not.
        """
        here = self._row.epoch, TableState.COPYING, self.pin
        if look is None or (look.epoch, look.state, look.pin) != here:
            return False
        if not (self._here or look.claimed or look.written):
            self._began = time.monotonic()  # its turn hasn't come
        due = at_once or time.monotonic() - self._committed_at >= COMMIT_SECONDS
        return look.unread > 0 and not (look.written and due)

    def step(self) -> bool:
        """Land written chunks; True once the copy is over or the wanted ones landed.

        Raises Fenced or SnapshotLost if its copy goes on elsewhere, or anew.
        """
        if self._over():
            return True
        plan = self._chunks()
        if any(c.state == "written" for c in plan) and self._store.try_lock(self._lock):
            try:
                if self._over():
                    return True
                self._landing.land([c for c in self._chunks() if c.state == "written"])
            except Fenced as fenced:
                logger.info("%s", fenced)  # the written chunks are looked at again
            finally:
                self._store.unlock(self._lock)
            self._committed_at = time.monotonic()
            plan = self._report()
        if any(c.state != "landed" for c in self._wanted(plan)):
            return False
        self._report()  # what others landed
        self._finish()
        return True

    def judge(self, outcomes: Mapping[str, str]) -> bool:
        """Act on the outcomes of the job's tasks; the worst one decides. Raises."""
        if "lost" in outcomes:
            self._lost()
        if "rewritten" in outcomes and self._voided():
            return False
        if "rewritten" in outcomes or "changed" in outcomes:
            why = outcomes.get("rewritten") or outcomes["changed"]
            with self._pipeline.connect_source("copy") as source:
                try:
                    found = describe(source, self.table)
                    with suppress(psycopg.errors.LockNotAvailable):  # another session alters it
                        named = [heap.id for heap in heaps(source, self.table, found.oid)]
                        refuse_unplannable(source, found, named)
                except TableProblem as problem:
                    self._store.park(self.table, problem.reason, self._row.epoch)
                    raise
            restart_copy(self._store, self._row, of_pin=self.pin)
            raise CopyRestarted(f"{self.table}: {why}; its copy begins anew.")
        if "unfit" in outcomes:
            self._unfit(outcomes["unfit"])
        lent = "cut" in outcomes and self._landing.place()[1] != self._io
        if lent and (left := self.outstanding()) < self._left:  # it gets on
            self._left = left  # the next job has what the catalog lends now
            logger.info("%s: its catalog's keys are over: %s", self.table, outcomes["cut"])
        elif failed := outcomes.get("failed") or outcomes.get("cut"):
            raise TableProblem(self.table, f"a chunk can't be copied: {failed}")
        return False

    def _row_filter(self) -> str | None:
        config, row = self._pipeline.config, self._row
        if row.row_filter is None and self.table not in config.row_filters:
            return None  # as all others, without a look at the source
        with self._pipeline.connect_source("copy") as source:
            return row_filter(source, config, row)

    def task(self, snapshot_name: str | None, worker: str) -> CopyTask:
        """This table's task of a job; without a snapshot, it reads in short transactions."""
        config, row = self._pipeline.config, self._row
        columns = (
            select_expression(c.source, c.mapping, c.policy, is_key=c.is_key)
            for c in self._landing.lake.columns
        )
        listed = sql.SQL(", ").join([*columns, *self._landing.extra_values()])
        location, self._io = self._landing.place()
        oid, numbers = numbers_there(self._pipeline, row, self._landing.lake.columns)
        return CopyTask(
            table=self.table,
            oid=oid,
            names=tuple(c.source.name for c in self._landing.lake.columns),
            numbers=numbers,
            source_uri=uri(self._pipeline.copy_dsn, f"cdc_assets {config.name} copy"),
            snapshot_name=snapshot_name,
            hold_at_most=config.snapshot.hold_at_most.total_seconds(),
            columns=listed.as_string(self._store.connection),
            row_filter=self._row_filter(),
            publication=publication_there(config, row),
            fields=self._landing.fields(),
            scope=ClaimScope(
                conninfo(coordination_dsn(config), f"cdc_assets {config.name} claims"),
                config.state.schema_,
                config.name,
                str(row.table),
                row.epoch,
                self.pin,
                tuple(sorted(self._only)) if self._only is not None else None,
                CLAIM_CHUNKS,
                config.snapshot.max_parallel_chunks,
            ),
            worker=worker,
            chunks=self.outstanding(),
            location=location,
            io=tuple(sorted(self._io.items())),
        )

    # --- parts ---

    def _unfit(self, name: str) -> NoReturn:
        """Raise: a value of column ``name`` has no form in the lake, and its policy is fail."""
        column = next(c for c in self._landing.lake.columns if name in (c.name, c.source.name))
        what = f"column {name} has a value that the lake's {column.mapping.lake} can't hold"
        if not column.is_key:
            raise TableProblem(
                self.table,
                what,
                "Set columns.unrepresentable to null or clamp, or columns.types to string.",
            )
        for part in map(parse_part, self._landing.lake.table.partition_by):
            transform = parse_transform(part.transform)
            if part.column == column.name and not transform.can_transform(StringType()):
                raise TableProblem(
                    self.table,
                    f"{what}, belongs to its key, and can't be kept as text because partition_by"
                    f" has {part.sql}",
                    f"Partition by something else, and: {command('resync', self.table)}",
                )
        self._store.keep_as_text(self.table, {column.source.number})
        restart_copy(self._store, self._row, of_pin=self.pin)
        raise CopyRestarted(
            f"{self.table}: {what}, and belongs to its key: it is kept as text, and the copy"
            " begins anew."
        )

    def _voided(self) -> bool:
        """Whether the log truncates the table after the pin: then no row of the copy counts.

        Otherwise, a table that is truncated every other moment would never be copied. VACUUM FULL
        and its like are in no log: their rows count, in other places. Where history is kept,
        truncated rows count, too: such a copy begins anew.
        """
        config, point = self._pipeline.config, self._row.snapshot_lsn
        if point is None or self._row.mode != "mirror":
            return False
        if not self._store.has_flusher():
            return False
        with self._pipeline.connect_source("copy") as source:
            now = current_lsn(source)
        if not self._store.await_flushed(now, _LOG_SECONDS):
            return False
        window, key = Window(0, point), [c.source.name for c in self._landing.lake.key]
        entries = [e for e in self._store.entries(self.table, 0) if e.flushable_lsn > point]
        storage = Storage.of(config.s3)
        if facts((outline(e, storage) for e in entries), window, key).truncate is None:
            return False
        pin = void_copy(self._store, replace(self._row, pin=self.pin), now)
        if pin is not None:
            logger.info("%s was truncated: its log has all that counts", self.table)
            self.pin = pin
        return pin is not None

    def _over(self) -> bool:
        """Whether another coordinator finished the copy. Raises Fenced if it began anew."""
        now = self._store.copy_state(self.table)
        if now is None or now.epoch != self._row.epoch:
            raise Fenced(f"{self.table}: its copy was started anew elsewhere; this run stops.")
        if now.state == TableState.PARKED:
            raise TableProblem(self.table, now.reason or "it is parked")
        if now.state == TableState.WAITING or (
            now.state == TableState.COPYING and now.pin != self.pin
        ):
            self._lost()
        return now.state != TableState.COPYING

    def _lost(self) -> NoReturn:
        raise SnapshotLost(f"{self.table}: its pin was lost; the rest waits for another one.")

    def _report(self) -> list[ChunkProgress]:
        """Report the chunks that landed since the last report; returns the plan as it is."""
        plan = self._chunks()
        landed = [c for c in plan if c.state == "landed"]
        news = tuple(c for c in landed if c.key not in self._reported)
        if news:
            self._reported.update(c.key for c in news)
            self._here.extend(news)
            self._on_progress(
                CopyProgress(
                    self.table,
                    news,
                    len(landed),
                    len(plan),
                    sum(c.rows or 0 for c in self._here),
                    sum(c.bytes or 0 for c in self._here),
                    time.monotonic() - self._began,
                )
            )
        return plan

    def _chunks(self) -> list[ChunkProgress]:
        return chunks(self._store, self.table, self._row.epoch)

    def _wanted(self, plan: list[ChunkProgress]) -> list[ChunkProgress]:
        return [c for c in plan if self._only is None or c.key in self._only]

    def _finish(self) -> None:
        """Once every chunk of the plan has landed, publish the target and have the log applied."""
        with self._store.locked(self._lock):
            if self._over() or not self._landing.complete():
                return
            self._landing.publish(self._session)
            self._store.finish_copy(
                self.table,
                self._row.epoch,
                read_until(self._store, self._row, self.pin),
                streams=self._pipeline.config.streams,
            )
