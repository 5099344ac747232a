"""Merging what the log has: once (``materialize``), or for ever (``materialize --follow``)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress

import psycopg
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, Fenced, TableProblem, TablesFailed, first_line
from cdc_assets.flusher.reach import reach
from cdc_assets.log.states import TableState
from cdc_assets.materializer.drain import Drained, drain
from cdc_assets.materializer.outstanding import outstanding
from cdc_assets.materializer.schema.ahead import Look, look
from cdc_assets.materializer.workers.follower import Follower, Listener
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.operations.running import Spark
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.backoff import Backoff
from cdc_assets.process.traces import noted
from cdc_assets.readiness.surroundings import admitted

logger = logging.getLogger(__name__)


# How often other writers may come between a merge and its commit.
_FENCED_TRIES = 10
# A worker whose databases or Spark can't be reached.
_BACKOFF = Backoff(cap_seconds=30.0)


def materialize(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_table: Callable[[Drained], None] = lambda _: None,
) -> list[Drained]:
    """Apply what is registered now, and schema changes that no row of the log carries.

    ``on_table`` is called after each table, so that those are told of that others fail beside.
    Raises TablesFailed naming the tables that can't go on, NotReady if nothing can begin.
    """
    done: list[Drained] = []
    problems: list[TableProblem] = []
    ends: dict[TableId, int] = {}
    looks: dict[TableId, Look] = {}
    for table in tables:
        with suppress(TableProblem):  # gone from the source: its log may still be applied
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
                    on_table(done[-1])
                except TableProblem as problem:
                    problems.append(problem)
                except Exception as error:  # noqa: BLE001 - one table's: the others go on
                    problems.append(TableProblem(table, noted(error)))
    if problems:
        raise TablesFailed(problems)
    return done


def _own_first(worker: Worker, tables: Mapping[TableId, int]) -> Iterator[TableId]:
    """This worker's share of ``tables`` first, as it is by then; then what others left undone."""
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
        if copy is None or copy.state != TableState.STREAMING:
            raise TableProblem(
                table, "its copy was begun anew", "Its log is applied once that is complete."
            )
        time.sleep(0.5)  # another worker merges it; what is left is merged here


def follow(
    config: SourceConfig,
    tables: Sequence[TableId],
    stop: threading.Event,
    listener: Listener,
    sessions: Callable[[], AbstractContextManager[SparkSession]],
) -> None:
    """Merge this worker's share of ``tables`` until ``stop``; any number of workers may do so.

    ``sessions`` opens one of Spark. Errors are logged and retried, with growing delays; a table
    that can't go on doesn't stop the others.
    """
    follower = Follower(tables, stop, listener)
    failures = 0
    while not stop.is_set():
        began = time.monotonic()
        try:
            with ExitStack() as stack:
                session = admitted(config, lambda: stack.enter_context(sessions()))
                follower.work(stack.enter_context(Pipeline.open(config)), session)
        except (PySparkException, psycopg.Error, CdcError) as error:
            logger.warning("begins anew: %s", first_line(error))
            failures = _BACKOFF.failures(failures, time.monotonic() - began)
            stop.wait(_BACKOFF.delay_seconds(failures))
