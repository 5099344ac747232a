"""Copying tables: workers claim chunks and write files, a coordinator lands them.

Keeps invariants 6, 9 and 10. ``copy_tables`` is the coordinator: it starts one Spark job whose
tasks (``snapshot.worker``) claim and read chunks of one table after the other under their pins, and
every few seconds it commits what they wrote (``snapshot.landing``). There may be any number of
coordinators, of any number of processes: they share the chunks by claims, and the one that holds a
table's writer lock commits what all of them wrote. One that dies costs nothing but the chunks its
tasks were reading.

Which snapshot a chunk is read under is the pin's business (``postgres.pins``). If a pin is lost,
what was copied stays where the table has a key: the log is applied from the first pin on, and what
the later snapshot shows twice or not at all is put right by it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

from psycopg import sql
from pyspark.sql import SparkSession

from cdc_assets.errors import (
    CdcError,
    CopyRestarted,
    Fenced,
    SnapshotLost,
    TableProblem,
    first_line,
)
from cdc_assets.log.claims import ClaimScope
from cdc_assets.log.files import Storage
from cdc_assets.log.progress import (
    ChunkProgress,
    chunks,
    claimable,
    restart_copy,
    void_copy,
)
from cdc_assets.log.store import TableRow
from cdc_assets.materializer.batch import Window, facts
from cdc_assets.pipeline import Pipeline, coordination_dsn
from cdc_assets.postgres.catalog import describe
from cdc_assets.postgres.connect import conninfo, uri
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pins import Holder, join_pin, pin_point
from cdc_assets.postgres.replication import current_lsn
from cdc_assets.postgres.types import select_expression
from cdc_assets.snapshot.landing import Landing
from cdc_assets.snapshot.worker import OUTCOME_SCHEMA, CopyTask, copy_worker

logger = logging.getLogger(__name__)

# Chunks a claim, and a file, at most: with 16 MB chunks a crash costs 128 MB of reading a task, and
# a table of 2,000 chunks gets 250 files.
CLAIM_CHUNKS = 8
# How often a coordinator looks, and how long what is written may wait for its commit.
LOOK_SECONDS = 0.5
COMMIT_SECONDS = 5.0
# How long the log may take to tell that a table was truncated.
_LOG_SECONDS = 30.0


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

    Raises what :func:`copy_tables` returns.
    """
    failed = copy_tables(pipeline, session, [table], only=only, on_progress=on_progress)
    if table in failed:
        raise failed[table]
    row = pipeline.store.table(table)
    assert row is not None
    return chunks(pipeline.store, table, row.epoch)


def copy_tables(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Iterable[TableId],
    *,
    only: Iterable[str] | None = None,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> dict[TableId, CdcError]:
    """Land the outstanding chunks of ``tables`` (``only``: of these keys), whoever copies them.

    A table that is complete already is left alone. Returns the tables that failed with the reason:
    TableProblem when it isn't pinned yet or can't be copied, SnapshotLost when its pin is gone,
    CopyRestarted or Fenced when its copy begins anew. Raises what Spark or Postgres raises. Once
    ``stop`` is set it returns without the rest.
    """
    wanted = frozenset(only) if only is not None else None
    failed: dict[TableId, CdcError] = {}
    copies = []
    for table in tables:
        try:
            row = _ready(pipeline, table)
            if row.state == "copying":
                copy = _Copy(pipeline, session, row, wanted, on_progress)
                copy.open()
                copies.append(copy)
        except CdcError as error:
            failed[table] = error
        except (ValueError, NotImplementedError) as error:  # what pyiceberg can't do
            failed[table] = TableProblem(table, f"its copy can't begin: {first_line(error)}")
    # The largest first: what is left for the end then is small, and shared evenly.
    copies.sort(key=lambda copy: -copy.outstanding())
    return failed | _Coordinator(pipeline, session, copies, stop or threading.Event()).run()


def _ready(pipeline: Pipeline, table: TableId) -> TableRow:
    row = pipeline.store.table(table)
    if row is None or row.state == "waiting":
        raise TableProblem(
            table,
            "it has no pinned snapshot yet",
            "The flusher pins it within seconds of its start: see the sensor"
            f" flusher_{pipeline.config.name}, or run cdc-assets snapshot.",
        )
    if row.state == "parked":
        raise TableProblem(table, row.reason or "it is parked")
    return row


class _Coordinator:
    """Keeps one job running while there is something to claim, and lands what is written."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: SparkSession,
        copies: Sequence[_Copy],
        stop: threading.Event,
    ) -> None:
        self._stop = stop
        self._pipeline = pipeline
        self._session = session
        self._copies = list(copies)
        self._failed: dict[TableId, CdcError] = {}
        self._holders: dict[str, Holder] = {}
        self._worker = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"

    def run(self) -> dict[TableId, CdcError]:
        """Until each table is complete (or what was asked for of it has landed), or failed."""
        job: Future[list[tuple[str, str, str]]] | None = None
        with ExitStack() as cleanup:
            pool = cleanup.enter_context(ThreadPoolExecutor(1))
            cleanup.callback(self._let_go)
            try:
                while self._copies and not self._stop.is_set():
                    if job is not None and job.done():
                        self._judge(job.result())
                        job = None
                    self._each(lambda copy: copy.step(at_once=job is None))  # noqa: B023
                    if job is None and (tasks := self._tasks()):
                        job = pool.submit(self._job, tasks)
                    if job is not None:
                        wait([job], timeout=LOOK_SECONDS)
                    elif self._copies:  # others are at what is left
                        time.sleep(LOOK_SECONDS)
            except BaseException:
                if job is not None and not job.done():
                    self._session.interruptTag(self._worker)
                raise
        return self._failed

    def _each(self, do: Callable[[_Copy], bool]) -> None:
        """``do`` it to every table; one that says that it is over, or fails, is out."""
        for copy in list(self._copies):
            try:
                if do(copy):
                    self._copies.remove(copy)
            except CdcError as error:
                self._failed[copy.table] = error
                self._copies.remove(copy)

    def _tasks(self) -> list[CopyTask]:
        """What a job could do now. The pins are held as long as this lasts."""
        tasks: list[CopyTask] = []

        def prepare(copy: _Copy) -> bool:
            if copy.claimable():
                if copy.pin not in self._holders:
                    self._holders[copy.pin] = join_pin(
                        self._pipeline.store, self._pipeline.source_dsn, copy.pin
                    )
                tasks.append(copy.task(self._holders[copy.pin].snapshot_name, self._worker))
            return False

        self._each(prepare)
        return tasks

    def _let_go(self) -> None:
        for holder in self._holders.values():
            holder.close()

    def _job(self, tasks: Sequence[CopyTask]) -> list[tuple[str, str, str]]:
        parallel = self._pipeline.config.snapshot
        number = min(
            parallel.max_parallel_chunks * min(parallel.max_parallel_tables, len(tasks)),
            sum(task.chunks for task in tasks),
        )
        self._session.addTag(self._worker)  # of this thread's operations
        frame = self._session.range(0, number, 1, number)
        outcomes = frame.mapInArrow(copy_worker(tuple(tasks)), OUTCOME_SCHEMA).collect()
        return [(row.table_name, row.outcome, row.detail) for row in outcomes]

    def _judge(self, outcomes: Sequence[tuple[str, str, str]]) -> None:
        found: dict[str, dict[str, str]] = {}
        for table, outcome, detail in outcomes:
            found.setdefault(table, {})[outcome] = detail
        self._each(lambda copy: copy.judge(found.get(str(copy.table), {})))


class _Copy:
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
        self._lock = f"write:{row.table}"
        self._landing = Landing(pipeline.config, pipeline.store, row)
        self._began = self._committed_at = time.monotonic()
        self._reported: set[str] = set()
        self._here: list[ChunkProgress] = []

    def open(self) -> None:
        """Make the target of the copy. Raises TableProblem."""
        with self._writing():
            self._landing.open()
        self._reported = {c.key for c in self._chunks() if c.state == "landed"}

    def outstanding(self) -> int:
        """How many of the wanted chunks haven't landed."""
        return sum(c.state != "landed" for c in self._wanted(self._chunks()))

    def claimable(self) -> bool:
        return claimable(self._store, self._row, self._only) > 0

    def step(self, *, at_once: bool) -> bool:
        """Land what is written, if it is time; True once the table is complete, or all is done.

        Raises Fenced or SnapshotLost if its copy goes on elsewhere, or anew.
        """
        if self._over():
            return True
        plan = self._chunks()
        if not self._here and all(c.state in ("planned", "landed") for c in plan):
            self._began = time.monotonic()  # its turn hasn't come
        written = [c for c in plan if c.state == "written"]
        due = at_once or time.monotonic() - self._committed_at >= COMMIT_SECONDS
        if all(c.state in ("written", "landed") for c in self._wanted(plan)):
            due = True
        if written and due and self._store.try_lock(self._lock):
            try:
                if self._over():
                    return True
                self._landing.land([c for c in self._chunks() if c.state == "written"])
            except Fenced as fenced:
                logger.info("%s", fenced)  # what it wrote is looked at again
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
        """What the job's tasks say of their end; the worst of them is enough. Raises."""
        if "lost" in outcomes:
            self._lost()
        if "rewritten" in outcomes and self._voided():
            return False
        if "rewritten" in outcomes or "changed" in outcomes:
            why = outcomes.get("rewritten") or outcomes["changed"]
            with self._pipeline.connect_source("copy") as source:
                try:
                    describe(source, self.table)
                except TableProblem as problem:
                    self._store.park(self.table, str(problem))
                    raise
            restart_copy(self._store, self._row, of_pin=self.pin)
            raise CopyRestarted(f"{self.table}: {why}; its copy begins anew.")
        if "unfit" in outcomes:
            raise TableProblem(
                self.table,
                outcomes["unfit"],
                "Set columns.unrepresentable to null or clamp, or columns.types to string.",
            )
        if "failed" in outcomes:
            raise TableProblem(self.table, f"a chunk can't be copied: {outcomes['failed']}")
        return False

    def task(self, snapshot_name: str, worker: str) -> CopyTask:
        """What the tasks of a job are told."""
        config, row = self._pipeline.config, self._row
        rules = config.table(row.table).columns
        listed = sql.SQL(", ").join(
            select_expression(c.source, rules.types.get(c.name), c.policy)
            for c in self._landing.lake.columns
        )
        location, io = self._landing.place()
        return CopyTask(
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
                self.pin,
                tuple(sorted(self._only)) if self._only is not None else None,
                CLAIM_CHUNKS,
                config.snapshot.max_parallel_chunks,
            ),
            worker=worker,
            chunks=self.outstanding(),
            location=location,
            io=tuple(sorted(io.items())),
        )

    # --- parts ---

    def _voided(self) -> bool:
        """Whether the log truncates the table after the pin: then no row of the copy counts.

        A table that is truncated every other moment would never be copied otherwise. VACUUM FULL
        and its like are in no log: they leave rows that count, in other places.
        """
        config, point = self._pipeline.config, self._row.snapshot_lsn
        if point is None or not self._store.is_locked(f"flusher:{config.name}"):
            return False
        with self._pipeline.connect_source("copy") as source:
            now = current_lsn(source)
        deadline = time.monotonic() + _LOG_SECONDS
        while (flushed := self._store.flushed_lsn()) is None or flushed < now:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        window, key = Window(0, point), [c.name for c in self._landing.lake.key]
        entries = [e for e in self._store.entries(self.table, 0) if e.flushable_lsn > point]
        if facts(entries, window, Storage.of(config.s3), key).truncate is None:
            return False
        pin = void_copy(self._store, replace(self._row, pin=self.pin), now)
        if pin is not None:
            logger.info("%s was truncated: its log has all that counts", self.table)
            self.pin = pin
        return pin is not None

    def _over(self) -> bool:
        """Whether somebody else finished the copy. Raises Fenced if it is another one now."""
        now = self._store.copy_state(self.table)
        if now is None or now.epoch != self._row.epoch:
            raise Fenced(f"{self.table}: its copy was started anew elsewhere; this run stops.")
        if now.state == "parked":
            raise TableProblem(self.table, now.reason or "it is parked")
        if now.state == "waiting" or (now.state == "copying" and now.pin != self.pin):
            self._lost()
        return now.state != "copying"

    def _lost(self) -> NoReturn:
        raise SnapshotLost(f"{self.table}: its pin was lost; the rest waits for another one.")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._store.lock(self._lock)
        try:
            yield
        finally:
            self._store.unlock(self._lock)

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
        """Once every chunk of the plan has landed: publish the target, and let the log flow."""
        with self._writing():
            if self._over() or not self._landing.complete():
                return
            self._landing.publish(self._session)
            # No chunk was read later than the last pin's consistent point (invariant 10).
            self._store.finish_copy(
                self.table,
                self._row.epoch,
                pin_point(self._store, self.pin),
                streams=self._pipeline.config.snapshot.mode != "snapshot_only",
            )
