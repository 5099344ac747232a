"""Copying one table: workers claim chunks and write files, a coordinator lands them.

Keeps invariants 6, 9 and 10. ``copy_table`` is the coordinator: it starts a Spark job whose tasks
(``snapshot.worker``) claim and read chunks under the table's pin, and every few seconds it commits
what they wrote (``snapshot.landing``). There may be any number of coordinators, of any number of
processes: they share the chunks by claims, and the one that holds the table's writer lock commits
what all of them wrote. One that dies costs nothing but the chunks its tasks were reading.

Which snapshot a chunk is read under is the pin's business (``postgres.pins``). If a pin is lost,
what was copied stays where the table has a key: the log is applied from the first pin on, and what
the later snapshot shows twice or not at all is put right by it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

from psycopg import sql
from pyspark.sql import SparkSession

from cdc_assets.errors import CopyRestarted, Fenced, SnapshotLost, TableProblem
from cdc_assets.log.claims import ClaimScope
from cdc_assets.log.progress import ChunkProgress, chunks, claimable, restart_copy
from cdc_assets.log.store import TableRow
from cdc_assets.pipeline import Pipeline, coordination_dsn
from cdc_assets.postgres.catalog import describe
from cdc_assets.postgres.connect import conninfo, uri
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pins import join_pin, pin_point
from cdc_assets.postgres.types import select_expression
from cdc_assets.snapshot.landing import Landing
from cdc_assets.snapshot.worker import OUTCOME_SCHEMA, CopyTask, copy_worker

logger = logging.getLogger(__name__)

# Chunks a claim, and a file, at most: with 16 MB chunks a crash costs 128 MB of reading a task, and
# a table of 2,000 chunks gets 250 files.
CLAIM_CHUNKS = 8
# How often a coordinator looks, and how long what is written may wait for its commit.
LOOK_SECONDS = 0.25
COMMIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How far a table's copy is; ``landed`` are the chunks that landed since the last report."""

    table: TableId
    landed: tuple[ChunkProgress, ...]
    chunks_done: int
    chunks_total: int
    rows: int
    bytes: int
    seconds: float

    @property
    def sentence(self) -> str:
        """For a run's log: percent, rate and the time that remains."""
        rate = self.rows / self.seconds if self.seconds else 0.0
        left = self.chunks_total - self.chunks_done
        done_here = max(1, self.chunks_done)
        return (
            f"{self.table}: {self.chunks_done}/{self.chunks_total} chunks"
            f" ({100 * self.chunks_done / max(1, self.chunks_total):.0f} %), {self.rows:,} rows,"
            f" {self.bytes / 1e6:,.1f} MB, {rate:,.0f} rows/s,"
            f" about {self.seconds / done_here * left:,.0f} s left"
        )


def copy_table(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    *,
    only: Iterable[str] | None = None,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
) -> list[ChunkProgress]:
    """Land the outstanding chunks of ``table`` (``only``: of these keys) and return the whole plan.

    Returns once they have landed, whoever copied them; a table that is complete already is left
    alone. Raises TableProblem when the table isn't pinned yet or can't be copied, SnapshotLost when
    its pin is gone, Fenced when its copy was started anew meanwhile.
    """
    store = pipeline.store
    row = store.table(table)
    if row is None or row.state == "waiting":
        raise TableProblem(
            table,
            "it has no pinned snapshot yet",
            "The flusher pins it within seconds of its start: see the sensor"
            f" flusher_{pipeline.config.name}, or run cdc-assets snapshot.",
        )
    if row.state == "parked":
        raise TableProblem(table, row.reason or "it is parked")
    if row.state == "copying":
        wanted = frozenset(only) if only is not None else None
        _Coordinator(pipeline, session, row, wanted, on_progress).run()
    return chunks(store, table, row.epoch)


class _Coordinator:
    def __init__(
        self,
        pipeline: Pipeline,
        session: SparkSession,
        row: TableRow,
        only: frozenset[str] | None,
        on_progress: Callable[[CopyProgress], None],
    ) -> None:
        self._pipeline = pipeline
        self._session = session
        self._row = row
        self._only = only
        self._on_progress = on_progress
        self._store = pipeline.store
        self._lock = f"write:{row.table}"
        self._worker = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._landing = Landing(pipeline.config, pipeline.store, row)
        self._began = self._committed_at = time.monotonic()
        self._reported: set[str] = set()
        self._here: list[ChunkProgress] = []

    def run(self) -> None:
        self._store.lock(self._lock)
        try:
            self._landing.open(self._session)
        finally:
            self._store.unlock(self._lock)
        plan = self._chunks()
        self._reported = {c.key for c in plan if c.state == "landed"}
        with ExitStack() as cleanup:
            pool = cleanup.enter_context(ThreadPoolExecutor(1))
            if any(c.state in ("planned", "claimed") for c in self._wanted(plan)):
                assert self._row.pin is not None
                holder = cleanup.enter_context(
                    join_pin(self._store, self._pipeline.source_dsn, self._row.pin)
                )
                task, tasks = self._task(holder.snapshot_name, len(self._wanted(plan)))
                self._drive(lambda: pool.submit(self._job, task, tasks))
            else:
                self._drive(None)
        self._finish()

    # --- the loop ---

    def _drive(self, start: Callable[[], Future[list[tuple[str, str]]]] | None) -> None:
        """Until every wanted chunk has landed."""
        job: Future[list[tuple[str, str]]] | None = None
        try:
            while not self._over():
                if job is not None and job.done():
                    self._judge(job.result())
                    job = None
                plan = self._chunks()
                self._land(plan, at_once=job is None)
                left = [c for c in self._wanted(self._report()) if c.state != "landed"]
                if not left:
                    return
                if job is None and start is not None and self._claimable():
                    job = start()
                time.sleep(LOOK_SECONDS)
        except BaseException:
            if job is not None and not job.done():
                self._session.interruptAll()
            raise

    def _over(self) -> bool:
        """Whether somebody else finished the copy. Raises Fenced if it is another one now."""
        now = self._store.table(self._row.table)
        if now is None or now.epoch != self._row.epoch:
            raise Fenced(
                f"{self._row.table}: its copy was started again elsewhere; this run stops."
            )
        if now.state == "parked":
            raise TableProblem(self._row.table, now.reason or "it is parked")
        if now.state != "copying":
            return now.state != "waiting" or self._lost()
        return now.pin != self._row.pin and self._lost()

    def _lost(self) -> NoReturn:
        raise SnapshotLost(f"{self._row.table}: its pin was lost; the rest waits for another one.")

    def _claimable(self) -> bool:
        return claimable(self._store, self._row, self._only) > 0

    def _land(self, plan: list[ChunkProgress], *, at_once: bool) -> None:
        written = [c for c in plan if c.state == "written"]
        due = at_once or time.monotonic() - self._committed_at >= COMMIT_SECONDS
        if not written or not due or not self._store.try_lock(self._lock):
            return
        try:
            self._landing.land([c for c in self._chunks() if c.state == "written"])
        except Fenced as fenced:
            logger.info("%s", fenced)  # what it wrote is looked at again
        finally:
            self._store.unlock(self._lock)
        self._committed_at = time.monotonic()

    def _report(self) -> list[ChunkProgress]:
        """Tell about what has landed since the last time; returns the plan as it is."""
        plan = self._chunks()
        landed = [c for c in plan if c.state == "landed"]
        news = tuple(c for c in landed if c.key not in self._reported)
        if news:
            self._reported.update(c.key for c in news)
            self._here.extend(news)
            self._on_progress(
                CopyProgress(
                    self._row.table,
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
        return chunks(self._store, self._row.table, self._row.epoch)

    def _wanted(self, plan: list[ChunkProgress]) -> list[ChunkProgress]:
        return [c for c in plan if self._only is None or c.key in self._only]

    # --- the workers ---

    def _job(self, task: CopyTask, tasks: int) -> list[tuple[str, str]]:
        frame = self._session.range(0, tasks, 1, tasks)
        outcomes = frame.mapInArrow(copy_worker(task), OUTCOME_SCHEMA).collect()
        return [(row.outcome, row.detail) for row in outcomes]

    def _judge(self, outcomes: list[tuple[str, str]]) -> None:
        """What the job's tasks say of their end; one of them is enough."""
        table, found = self._row.table, dict(outcomes)
        if "lost" in found:
            self._lost()
        if "rewritten" in found or "changed" in found:
            why = found.get("rewritten") or found["changed"]
            with self._pipeline.connect_source("copy") as source:
                try:
                    describe(source, table)
                except TableProblem as problem:
                    self._store.park(table, str(problem))
                    raise
            restart_copy(self._store, self._row)
            raise CopyRestarted(f"{table}: {why}; its copy begins anew.")
        if "unfit" in found:
            raise TableProblem(
                table,
                found["unfit"],
                "Set columns.unrepresentable to null or clamp, or columns.types to string.",
            )
        if "failed" in found:
            raise TableProblem(table, f"a chunk can't be copied: {found['failed']}")

    def _task(self, snapshot_name: str, wanted: int) -> tuple[CopyTask, int]:
        """What each task of the job is told, and how many tasks there are."""
        config, row = self._pipeline.config, self._row
        rules = config.table(row.table).columns
        listed = sql.SQL(", ").join(
            select_expression(c.source, rules.types.get(c.name), c.policy)
            for c in self._landing.lake.columns
        )
        location, io = self._landing.place()
        workers = config.snapshot.max_parallel_chunks
        # A small table is shared too: every worker gets two turns at least.
        claim_chunks = max(1, min(CLAIM_CHUNKS, wanted // (2 * workers)))
        task = CopyTask(
            source_uri=uri(self._pipeline.source_dsn, f"cdc_assets {config.name} copy"),
            snapshot_name=snapshot_name,
            columns=listed.as_string(self._store.connection),
            fields=self._landing.fields(),
            scope=ClaimScope(
                conninfo(coordination_dsn(config), f"cdc_assets {config.name} claims"),
                config.state.schema_,
                config.name,
                str(row.table),
                row.epoch,
                row.pin or "",
                tuple(sorted(self._only)) if self._only is not None else None,
            ),
            worker=self._worker,
            claim_chunks=claim_chunks,
            location=location,
            io=tuple(sorted(io.items())),
        )
        return task, min(workers, -(-wanted // claim_chunks))

    def _finish(self) -> None:
        """Once every chunk of the plan has landed: publish the target, and let the log flow."""
        self._store.lock(self._lock)
        try:
            if self._over() or not self._landing.complete():
                return
            self._landing.publish(self._session)
            assert self._row.pin is not None
            # No chunk was read later than the last pin's consistent point (invariant 10).
            self._store.finish_copy(
                self._row.table,
                self._row.epoch,
                pin_point(self._store, self._row.pin),
                streams=self._pipeline.config.snapshot.mode != "snapshot_only",
            )
        finally:
            self._store.unlock(self._lock)
