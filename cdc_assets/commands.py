"""What the commands do, without the command line: snapshot, materialize, sync, maintain, verify.

Each works whether or not a flusher and other runs are active; what somebody else is doing already
is awaited, never repeated.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from typing import Self

import psycopg
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.config import SourceConfig
from cdc_assets.errors import (
    CdcError,
    CopyRestarted,
    Fenced,
    SlotBusy,
    SnapshotLost,
    SparkProblem,
    TableProblem,
    TablesFailed,
    first_line,
)
from cdc_assets.flusher.child import flusher_child
from cdc_assets.flusher.reach import reach
from cdc_assets.log.pauses import resume as resume_pauses
from cdc_assets.log.progress import restart_copy
from cdc_assets.log.tables import TableRow
from cdc_assets.maintenance import run as maintenance
from cdc_assets.maintenance.run import Maintained
from cdc_assets.materializer.drain import Drained, Look, drain, look, outstanding
from cdc_assets.materializer.follow import Follower
from cdc_assets.materializer.workers import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.drop import take_up_again
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pins import Pins
from cdc_assets.postgres.replication import current_lsn
from cdc_assets.process import Backoff, Child
from cdc_assets.readiness import admitted
from cdc_assets.snapshot.copy import copy_tables
from cdc_assets.snapshot.table_copy import CopyProgress
from cdc_assets.spark.session import open_session, server, spark_problem
from cdc_assets.traces import noted
from cdc_assets.verify.compare import Comparison, verify

logger = logging.getLogger(__name__)

# Pinning waits for the transactions that run at the source; slot creation itself gives up earlier.
_PIN_PATIENCE_SECONDS = 180
_PIN_LOOK_SECONDS = 2.0
# A table that is truncated more often than this while it is copied has to be left in peace.
_COPY_TRIES = 5
# How often one writer after the other may come between a merge and its commit.
_FENCED_TRIES = 10
# A worker whose databases or Spark can't be reached.
_BACKOFF = Backoff(cap_seconds=30.0)
_ANEW = (CopyRestarted, SnapshotLost, Fenced)


class Spark:
    """Spark for one command: reached or started at first use, stopped if it was started here."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._local = None if config.spark.remote else server(config)
        self._used = False

    def begin(self) -> None:
        """Let a local server start while something else is done."""
        if self._local is not None and self._local.url() is None:
            self._used = True
            self._local.start()

    @contextmanager
    def session(self) -> Iterator[SparkSession]:
        """A session of its own, whose settings nobody else changes."""
        self._used = True
        if self._local is None and (problem := spark_problem(self._config)) is not None:
            # The client would try for minutes.
            raise SparkProblem(
                f"Spark Connect can't be reached: {problem}.", "Start it, or correct spark.remote."
            )
        url = self._local.ensure() if self._local is not None else self._config.spark.remote
        session = open_session(self._config, url)
        try:
            yield session
        finally:
            session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._local is not None and self._used:
            self._local.stop()


def snapshot(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_progress: Callable[[CopyProgress], None],
    *,
    streams: bool = False,
) -> None:
    """Pin and copy what isn't copied yet. Raises TablesFailed naming the tables that can't be.

    A table whose copy has to begin anew (it was truncated, its pin was lost) gets some more tries.
    While tables are copied somebody has to stream, or WAL would pile up at the source: a flusher is
    started unless one is active, or the caller says that it has one (``streams``).
    """
    pins = Pins(pipeline)
    beside = ExitStack()
    try:
        pins.prepare()
        problems: list[TableProblem] = []
        again = list(tables)
        for last in [False] * _COPY_TRIES + [True]:
            to_copy = []
            for table, row in _pinned(pipeline, pins, again).items():
                if row.state == "waiting":
                    problems.append(_not_pinned(table, row.reason))
                elif row.state == "parked":
                    problems.append(TableProblem(table, row.reason or "it is parked"))
                elif row.state == "copying":
                    to_copy.append(table)
            follows = pipeline.config.snapshot.mode != "snapshot_only"
            streams = streams or pipeline.store.is_locked(f"flusher:{pipeline.config.name}")
            if to_copy and follows and not streams:
                beside.enter_context(flushing(pipeline.config))
                streams = True
            failed = _copy_all(pipeline, spark, to_copy, pins, on_progress) if to_copy else {}
            again = [table for table, error in failed.items() if isinstance(error, _ANEW)]
            problems += [
                error
                if isinstance(error, TableProblem)
                else TableProblem(table, error.what, error.remedy)
                for table, error in failed.items()
                if last or table not in again
            ]
            if not again:
                break
        with suppress(SlotBusy):
            pins.tick()
        if problems:
            raise TablesFailed(problems)
    finally:
        beside.close()
        pins.close()


def resync(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_progress: Callable[[CopyProgress], None],
) -> None:
    """Copy ``tables`` anew while the others flow; readers see the old rows until it is complete.

    Whatever state a table is in, that is the way out: the source's description of it is taken anew
    too. Raises like :func:`snapshot`.
    """
    mark_for_copy(pipeline, tables)
    snapshot(pipeline, spark, tables, on_progress)


def mark_for_copy(pipeline: Pipeline, tables: Sequence[TableId]) -> None:
    """Have ``tables`` copied anew by whoever copies: a command, or Dagster's sensors."""
    for table in tables:
        row = pipeline.store.table(table)
        if row is not None:  # else it is described with the first start
            restart_copy(pipeline.store, row)


def resume(pipeline: Pipeline) -> bool:
    """End the source's pause, or take it up again after it was dropped (True)."""
    resume_pauses(pipeline.store)
    return take_up_again(pipeline.store)


def _pinned(pipeline: Pipeline, pins: Pins, tables: Sequence[TableId]) -> dict[TableId, TableRow]:
    """The tables' rows once none of them waits for a pin any longer, or none will get one soon."""
    deadline = time.monotonic() + _PIN_PATIENCE_SECONDS
    while True:
        busy = False
        try:
            pins.tick()
        except SlotBusy as error:
            logger.warning("%s", error)
            busy = True
        rows = {row.table: row for row in pipeline.store.tables()}
        found = {table: rows[table] for table in tables}  # prepare() registered all of them
        waits = any(row.state == "waiting" for row in found.values())
        if not waits or busy or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _not_pinned(table: TableId, reason: str | None) -> TableProblem:
    return TableProblem(
        table,
        f"it still waits for its pin{f' ({reason})' if reason else ''}.",
        "A long transaction at the source holds up slot creation (see pg_stat_activity), or the"
        " flusher that streams doesn't get on (see its log).",
    )


def _copy_all(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    pins: Pins,
    on_progress: Callable[[CopyProgress], None],
) -> dict[TableId, CdcError]:
    """Copy ``tables``; what went wrong, by table."""
    with spark.session() as session, Pipeline.open(pipeline.config) as own:
        with ThreadPoolExecutor(1) as coordinator:
            stop = threading.Event()
            copied = coordinator.submit(
                copy_tables, own, session, tables, on_progress=on_progress, stop=stop
            )
            try:
                while not wait([copied], timeout=_PIN_LOOK_SECONDS).done:
                    # Holds the pins, if no flusher does, and has what lost its pin pinned again.
                    with suppress(SlotBusy):  # somebody else's table waits
                        pins.tick()
            except BaseException:
                stop.set()
                session.interruptAll()
                raise
        try:
            return copied.result()
        except (PySparkException, psycopg.Error) as error:
            told = noted(error)
            return {table: TableProblem(table, told) for table in tables}


def materialize(pipeline: Pipeline, spark: Spark, tables: Sequence[TableId]) -> list[Drained]:
    """Apply what is registered now, and schema changes that no row of the log has told.

    Raises TablesFailed naming the tables that can't go on, NotReady if nothing can begin.
    """
    done: list[Drained] = []
    problems: list[TableProblem] = []
    ends: dict[TableId, int] = {}
    looks: dict[TableId, Look] = {}
    for table in tables:
        with suppress(TableProblem):  # what is gone from the source may be applied all the same
            if (seen := look(pipeline, table)) is not None:
                looks[table] = seen
    if looks:
        reach(pipeline, max(seen.lsn for seen in looks.values()))
    for table in tables:
        try:
            end = outstanding(pipeline, table)
            if end is not None or table in looks:
                ends[table] = end or 0
        except TableProblem as problem:
            problems.append(problem)
    if ends:
        with ExitStack() as stack:
            session = admitted(pipeline.config, lambda: stack.enter_context(spark.session()))
            worker = stack.enter_context(Worker(pipeline, tables=ends))
            for table in _own_first(worker, ends):
                end = ends[table]
                try:
                    seen = looks.get(table)
                    done.append(_drained(pipeline, session, table, end, seen, worker))
                except TableProblem as problem:
                    problems.append(problem)
                except Exception as error:  # noqa: BLE001 - one table's: the others go on
                    problems.append(TableProblem(table, noted(error)))
    if problems:
        raise TablesFailed(problems)
    return done


def _own_first(worker: Worker, tables: Mapping[TableId, int]) -> Iterator[TableId]:
    """This worker's share of ``tables``, as it is by then; after it what others left undone."""
    left = dict(tables)
    while left:
        share = worker.share(left)
        table = next((table for table in left if table in share), next(iter(left)))
        del left[table]
        yield table


def _drained(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    end: int,
    seen: Look | None,
    worker: Worker,
) -> Drained:
    tries = _FENCED_TRIES
    while True:
        try:
            done = drain(pipeline, session, table, until_offset=end, look=seen, worker=worker.id)
        except Fenced as fenced:
            tries -= 1
            if not tries:
                raise TableProblem(table, fenced.what, fenced.remedy) from fenced
            done = None
        if done is not None:
            return done
        copy = pipeline.store.copy_state(table)
        if copy is None or copy.state != "streaming":
            raise TableProblem(
                table, "its copy was begun anew", "Its log is applied once that is complete."
            )
        time.sleep(0.5)  # another worker is at it; what it leaves is ours


def follow(
    config: SourceConfig,
    tables: Sequence[TableId],
    stop: threading.Event,
    on_merge: Callable[[str], None],
) -> None:
    """Look after this worker's share of ``tables`` until ``stop``: one of any number of workers.

    What goes wrong is logged and tried again, later and later; a table that can't go on doesn't
    stop the others.
    """
    with Spark(config) as spark:
        follower = Follower(tables, stop, on_merge)
        failures = 0
        while not stop.is_set():
            began = time.monotonic()
            try:
                with ExitStack() as stack:
                    session = admitted(config, lambda: stack.enter_context(spark.session()))
                    follower.work(stack.enter_context(Pipeline.open(config)), session)
            except (PySparkException, psycopg.Error, CdcError) as error:
                logger.warning("begins anew: %s", first_line(error))
                failures = _BACKOFF.failures(failures, time.monotonic() - began)
                stop.wait(_BACKOFF.delay_seconds(failures))


@contextmanager
def flushing(config: SourceConfig) -> Iterator[None]:
    """A flusher in a child process while it lasts: WAL doesn't pile up while tables are copied.

    If another flusher is active, the child waits behind it and does nothing.
    """
    child = Child.start(flusher_child(config))
    try:
        yield
    finally:
        child.stop()


def sync(
    pipeline: Pipeline,
    tables: Sequence[TableId],
    on_progress: Callable[[CopyProgress], None],
    on_phase: Callable[[str], None],
) -> list[Drained]:
    """Snapshot, flush up to now, materialize: the lake then equals the source as of the start."""
    config = pipeline.config
    if config.snapshot.mode == "snapshot_only":
        with Spark(config) as spark:
            on_phase("copying")
            snapshot(pipeline, spark, tables, on_progress)
        return []
    with pipeline.connect_source("sync") as source:
        target = current_lsn(source)
    problems: list[TableProblem] = []
    states = {row.table: row.state for row in pipeline.store.tables()}
    with Spark(config) as spark:
        fresh = any(states.get(table) != "streaming" for table in tables)
        if fresh:
            spark.begin()
            on_phase("copying")
        with flushing(config) if fresh else nullcontext():
            try:
                snapshot(pipeline, spark, tables, on_progress, streams=fresh)
            except TablesFailed as failed:
                problems += failed.problems
            # A copy that was resumed is whole only where its last snapshot stands.
            target = max(
                target,
                *(
                    row.complete_lsn or Lsn.ZERO
                    for row in pipeline.store.tables()
                    if row.table in tables
                ),
            )
            on_phase(f"flushing to {target}")
            reach(pipeline, target)
        bad = {problem.table for problem in problems}
        on_phase("materializing")
        done: list[Drained] = []
        try:
            done = materialize(pipeline, spark, [t for t in tables if t not in bad])
        except TablesFailed as failed:
            problems += failed.problems
    if problems:
        raise TablesFailed(problems)
    return done


def maintain(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_table: Callable[[Maintained], None],
) -> None:
    """Compact, expire and remove what nobody needs. Raises TablesFailed naming what failed."""
    problems: list[TableProblem] = []
    with ExitStack() as stack:
        opened = cache(lambda: stack.enter_context(spark.session()))
        for done in maintenance.maintain(pipeline, opened, tables):
            on_table(done)
            if done.problem is not None:
                problems.append(done.problem)
    if problems:
        raise TablesFailed(problems)


def verify_tables(
    pipeline: Pipeline,
    tables: Sequence[TableId],
    on_progress: Callable[[str], None],
    *,
    show_keys: bool = False,
) -> list[Comparison]:
    """Compare source and lake; see :mod:`cdc_assets.verify.compare`."""
    with Spark(pipeline.config) as spark, spark.session() as session:
        return verify(
            pipeline,
            session,
            tables,
            lambda lsn: reach(pipeline, lsn),
            on_progress=on_progress,
            show_keys=show_keys,
        )
