"""What the commands do, without the command line: snapshot, materialize, sync, verify.

Each works whether or not a flusher and other runs are active; what somebody else is doing already is
awaited, never repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.config import CONFIG_VARIABLE, SourceConfig, home
from cdc_assets.errors import (
    CdcError,
    ReplicationProblem,
    TableProblem,
    TablesFailed,
    first_line,
)
from cdc_assets.flusher.reach import reach
from cdc_assets.log.store import TableRow
from cdc_assets.materializer.drain import Drained, drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pins import Pins
from cdc_assets.postgres.replication import current_lsn
from cdc_assets.process import Child, ChildSpec
from cdc_assets.snapshot.copy import CopyProgress, copy_table
from cdc_assets.spark.session import open_session, server
from cdc_assets.verify.compare import Comparison, verify

logger = logging.getLogger(__name__)

# Pinning waits for the transactions that run at the source; slot creation itself gives up earlier.
_PIN_PATIENCE_SECONDS = 180


@contextmanager
def spark_session(config: SourceConfig) -> Iterator[SparkSession]:
    """A session; a local server that was started for it is stopped again."""
    local = None if config.spark.remote else server(config)
    session = open_session(config, local.ensure() if local else None)
    try:
        yield session
    finally:
        session.stop()
        if local is not None:
            local.stop()


def snapshot(
    pipeline: Pipeline,
    tables: Sequence[TableId],
    on_progress: Callable[[CopyProgress], None],
) -> None:
    """Pin and copy what isn't copied yet. Raises TablesFailed naming the tables that can't be."""
    pins = Pins(pipeline)
    try:
        pins.prepare()
        pins.tick()
        problems = []
        outstanding = []
        for table in tables:
            row = _pinned(pipeline, pins, table)
            if row.state == "parked":
                problems.append(TableProblem(table, row.reason or "it is parked"))
            elif row.state == "copying":
                outstanding.append(table)
        if outstanding:
            problems += _copy_all(pipeline, outstanding, on_progress)
        pins.tick()
        if problems:
            raise TablesFailed(problems)
    finally:
        pins.close()


def _pinned(pipeline: Pipeline, pins: Pins, table: TableId) -> TableRow:
    """The table's row once it doesn't wait for a pin any longer."""
    deadline = time.monotonic() + _PIN_PATIENCE_SECONDS
    while True:
        row = pipeline.store.table(table)
        assert row is not None  # prepare() registered every configured table
        if row.state != "waiting":
            return row
        if time.monotonic() > deadline:
            raise ReplicationProblem(
                f"{table} has waited {_PIN_PATIENCE_SECONDS} s for its pin.",
                "A long transaction at the source holds up slot creation; see pg_stat_activity.",
            )
        pins.tick()
        time.sleep(0.2)


def _copy_all(
    pipeline: Pipeline, tables: Sequence[TableId], on_progress: Callable[[CopyProgress], None]
) -> list[TableProblem]:
    config = pipeline.config

    def copy(table: TableId, url: str) -> TableProblem | None:
        session = open_session(config, url)
        try:
            with Pipeline.open(config) as own:
                copy_table(own, session, table, on_progress=on_progress)
            return None
        except TableProblem as problem:
            return problem
        except CdcError as error:
            return TableProblem(table, error.what, error.remedy)
        except (PySparkException, psycopg.Error) as error:
            logger.exception("copying %s", table)
            return TableProblem(
                table, first_line(error), "Run it again with -v for the whole story."
            )
        finally:
            session.stop()

    local = None if config.spark.remote else server(config)
    url = config.spark.remote or (local.ensure() if local else "")
    try:
        with ThreadPoolExecutor(config.snapshot.max_parallel_tables) as workers:
            found = workers.map(lambda table: copy(table, url), tables)
            return [problem for problem in found if problem is not None]
    finally:
        if local is not None:
            local.stop()


def materialize(
    pipeline: Pipeline, session: SparkSession, tables: Sequence[TableId]
) -> list[Drained]:
    """Apply what is registered now. Raises TablesFailed naming the tables that can't go on."""
    done: list[Drained] = []
    problems: list[TableProblem] = []
    store = pipeline.store
    for table in tables:
        end = store.log_end(table)
        try:
            while True:
                row = store.table(table)
                if row is None or row.state in ("waiting", "copying"):
                    raise TableProblem(
                        table, "its copy isn't complete", "Run cdc-assets snapshot first."
                    )
                drained = drain(pipeline, session, table, until_offset=end)
                if drained is not None:
                    done.append(drained)
                    break
                time.sleep(0.5)  # another worker is at it; what it leaves is ours
        except TableProblem as problem:
            problems.append(problem)
        except (PySparkException, psycopg.Error) as error:
            logger.exception("materializing %s", table)
            problems.append(TableProblem(table, first_line(error)))
    if problems:
        raise TablesFailed(problems)
    return done


@contextmanager
def flushing(config: SourceConfig) -> Iterator[None]:
    """A flusher in a child process while it lasts: WAL doesn't pile up while tables are copied.

    If another flusher is active, the child waits behind it and does nothing.
    """
    child = Child.start(
        ChildSpec(
            "cdc_assets.flusher.main",
            log=home() / config.name / "flusher.log",
            environment={CONFIG_VARIABLE: config.dump()},
        )
    )
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
    with pipeline.connect_source("sync") as source:
        target = current_lsn(source)
    problems: list[TableProblem] = []
    states = {row.table: row.state for row in pipeline.store.tables()}
    fresh = [table for table in tables if states.get(table) != "streaming"]
    on_phase("copying" if fresh else "flushing")
    with flushing(config):
        try:
            snapshot(pipeline, tables, on_progress)
        except TablesFailed as failed:
            problems += failed.problems
        on_phase(f"flushing to {target}")
        reach(pipeline, target)
    bad = {problem.table for problem in problems}
    on_phase("materializing")
    done: list[Drained] = []
    with spark_session(config) as session:
        try:
            done = materialize(pipeline, session, [t for t in tables if t not in bad])
        except TablesFailed as failed:
            problems += failed.problems
    if problems:
        raise TablesFailed(problems)
    return done


def verify_tables(
    pipeline: Pipeline, tables: Sequence[TableId], on_progress: Callable[[str], None]
) -> list[Comparison]:
    """Compare source and lake; see :mod:`cdc_assets.verify.compare`."""
    with spark_session(pipeline.config) as session:
        return verify(
            pipeline, session, tables, lambda lsn: reach(pipeline, lsn), on_progress=on_progress
        )
