"""Copying tables: workers claim chunks and write files, a coordinator lands them.

Keeps invariants 6, 9 and 10. ``copy_tables`` is the coordinator: it starts one Spark job whose
tasks (``snapshot.worker``) claim and read chunks of one table after the other under their pins, and
every few seconds it commits what they wrote (``snapshot.landing``). There may be any number of
coordinators, of any number of processes: they share the chunks by claims, and the one that holds a
table's writer lock commits what all of them wrote. One that dies costs nothing but the chunks its
tasks were reading.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack

from pyspark.sql import SparkSession

from cdc_assets.errors import CdcError, Fenced, SnapshotLost, TableProblem, first_line
from cdc_assets.log.copies.chunks import ChunkProgress, await_another_pin, chunks, unread
from cdc_assets.log.copies.looks import looks
from cdc_assets.log.figures.work import Work, add, failures_counted
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.pins.holders import Holder, held_pins, join_pin
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.executors.clocks import refuse_clocks_apart
from cdc_assets.readiness.executors.findings import refuse_unfit
from cdc_assets.snapshot.planned import CopyTask
from cdc_assets.snapshot.progress import CopyProgress
from cdc_assets.snapshot.table_copy import TableCopy
from cdc_assets.snapshot.worker import OUTCOME_SCHEMA, copy_worker

_LOOK_SECONDS = 0.5
# A look at hundreds of thousands of chunks takes a second: it is then repeated more rarely.
_PAUSE_PER_LOOK = 10
# What pyiceberg raises where a table isn't as it takes it.
_CANT = (ValueError, NotImplementedError)


def copy_table(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    *,
    only: Iterable[str] | None = None,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
) -> list[ChunkProgress]:
    """Land the outstanding chunks of ``table`` (``only``: of these keys) and return the whole plan.

    Raises the error that :func:`copy_tables` returns for it.
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
    """Land the outstanding chunks of ``tables`` (``only``: of these keys), copied by any process.

    A table that is complete already is left alone. Raises NotReady before anything is read if
    executors have other packages than this process, or Spark another time. Returns the tables that
    failed with the reason: TableProblem when it isn't pinned yet or can't be copied, SnapshotLost
    when its pin is gone, CopyRestarted or Fenced when its copy begins anew. Passes on errors of
    Spark and Postgres. Returns early once ``stop`` is set.
    """
    wanted = frozenset(only) if only is not None else None
    failed: dict[TableId, CdcError] = {}
    copies = []
    for table in tables:
        try:
            row = _ready(pipeline.store, table)
            if row.state == TableState.COPYING:
                _refuse_of_source(pipeline, row)
                copy = TableCopy(pipeline, session, row, wanted, on_progress)
                copy.open()
                copies.append(copy)
        except CdcError as error:
            failed[table] = error
        except _CANT as error:
            failed[table] = TableProblem(table, f"its copy can't begin: {first_line(error)}")
    if copies:
        refuse_unfit(session, pipeline.config)
        refuse_clocks_apart(session)
    # The largest first: the rest at the end is then small, and shared evenly.
    copies.sort(key=lambda copy: -copy.outstanding())
    log, source = pipeline.store.connection, pipeline.store.source
    with failures_counted(log, source, "copy"):
        broken = _Coordinator(pipeline, session, copies, wanted, stop or threading.Event()).run()
    if lost := sum(not isinstance(error, Fenced) for error in broken.values()):
        add(log, source, Work("copy", "failed", lost))
    return failed | broken


def _ready(store: LogStore, table: TableId) -> TableRow:
    row = store.table(table)
    if row is None or row.state == TableState.WAITING:
        raise TableProblem(
            table,
            "it has no pinned snapshot yet",
            "The flusher pins it within seconds of its start: see the sensor"
            f" flusher_{store.source}, or run cdc-assets snapshot.",
        )
    if row.state == TableState.PARKED:
        raise TableProblem(table, row.reason or "it is parked")
    return row


def _refuse_of_source(pipeline: Pipeline, row: TableRow) -> None:
    """Have the rest wait for a pin, and raise SnapshotLost, if its reads begin at the source alone.

    ``snapshot.from`` came while it was copied in short transactions. Those show the source as of
    now, which its log goes on from; the same ones elsewhere would show any earlier moment.
    """
    store, elsewhere = pipeline.store, pipeline.config.snapshot.from_ is not None
    if elsewhere and row.pin and unread(store, [row]) and not held_pins(store, [row.pin]):
        await_another_pin(store, row)
        raise SnapshotLost(f"{row.table}: it was read at the source; the rest waits for a pin.")


class _Coordinator:
    """Keeps one job running while there is something to claim, and lands what is written."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: SparkSession,
        copies: Sequence[TableCopy],
        only: frozenset[str] | None,
        stop: threading.Event,
    ) -> None:
        self._only = only
        self._stop = stop
        self._pipeline = pipeline
        self._session = session
        self._copies = list(copies)
        self._failed: dict[TableId, CdcError] = {}
        self._holders: dict[str, Holder | None] = {}
        self._look_at = 0.0
        self._worker = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"

    def run(self) -> dict[TableId, CdcError]:
        """Run until each table is complete (or its wanted chunks have landed), or failed."""
        job: Future[list[tuple[str, str, str]]] | None = None
        with ExitStack() as cleanup:
            pool = cleanup.enter_context(ThreadPoolExecutor(1))
            cleanup.callback(self._let_go)
            try:
                while self._copies and not self._stop.is_set():
                    if job is not None and job.done():
                        self._judge(job.result())
                        job, self._look_at = None, 0.0
                    if time.monotonic() >= self._look_at:
                        self._step(at_once=job is None)
                        if job is None and (tasks := self._tasks()):
                            job = pool.submit(self._job, tasks)
                    if job is not None:
                        wait([job], timeout=_LOOK_SECONDS)
                    elif self._copies:  # others copy the rest
                        time.sleep(_LOOK_SECONDS)
                if self._stop.is_set():
                    self._end(job)
            except BaseException:
                self._end(job)
                raise
        return self._failed

    def _step(self, *, at_once: bool) -> None:
        """Step those that something has happened to: of hundreds, few at a time."""
        began, tables = time.monotonic(), [copy.table for copy in self._copies]
        seen = looks(self._pipeline.store, tables, self._only)
        self._look_at = (now := time.monotonic()) + _PAUSE_PER_LOOK * (now - began)
        self._each(
            lambda copy: not copy.rests(seen.get(copy.table), at_once=at_once) and copy.step()
        )

    def _end(self, job: Future[list[tuple[str, str, str]]] | None) -> None:
        """The pool waits for its job, and so would the end of this process: for hours, perhaps."""
        while job is not None and not job.done():
            self._session.interruptTag(self._worker)  # again: it may not have been there yet
            wait([job], timeout=_LOOK_SECONDS)

    def _each(self, do: Callable[[TableCopy], bool]) -> None:
        """Call ``do`` for every table; drop a table if it returns True, or fails."""
        for copy in list(self._copies):
            try:
                if do(copy):
                    self._copies.remove(copy)
            except CdcError as error:
                self._failed[copy.table] = error
                self._copies.remove(copy)
            except _CANT as error:
                why = f"its copy can't go on: {first_line(error)}"
                self._failed[copy.table] = TableProblem(copy.table, why)
                self._copies.remove(copy)

    def _tasks(self) -> list[CopyTask]:
        """The tasks for a job now; their pins are held while this coordinator runs."""
        tasks: list[CopyTask] = []

        def prepare(copy: TableCopy) -> bool:
            if copy.claimable():
                if copy.pin not in self._holders:
                    self._holders[copy.pin] = self._holder(copy.pin)
                holder = self._holders[copy.pin]
                snapshot = holder.snapshot_name if holder is not None else None
                tasks.append(copy.task(snapshot, self._worker))
            return False

        self._each(prepare)
        return tasks

    def _holder(self, pin: str) -> Holder | None:
        """None for a pin whose tables are read without a snapshot that has to be held."""
        store = self._pipeline.store
        held = held_pins(store, [pin])
        return join_pin(store, self._pipeline.copy_dsn, pin) if held else None

    def _let_go(self) -> None:
        for holder in self._holders.values():
            if holder is not None:
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
