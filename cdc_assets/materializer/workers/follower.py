"""A worker that goes on for ever: ``materialize --follow``, on any number of machines.

A table with a problem is logged, given away and tried again with growing delay; the others flow on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import psycopg
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import TablePaused, TableProblem
from cdc_assets.log.wishes import paused
from cdc_assets.materializer.schema.ahead import Altered
from cdc_assets.materializer.workers.turns import Turn, Turns
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.backoff import Backoff
from cdc_assets.process.traces import noted

logger = logging.getLogger(__name__)

# How soon a registered change is seen; the look costs a millisecond or two.
_LOOK_SECONDS = 0.5
_BACKOFF = Backoff(first_seconds=10.0, cap_seconds=600.0)


class Follower:
    """Merges this worker's share of ``tables`` until ``stop``; remembers tables that failed."""

    def __init__(
        self, tables: Sequence[TableId], stop: threading.Event, on_merge: Callable[[str], None]
    ) -> None:
        self._tables = tables
        self._stop = stop
        self._on_merge = on_merge
        self._failures: dict[TableId, int] = {}
        self._again_at: dict[TableId, float] = {}

    def work(self, pipeline: Pipeline, session: SparkSession) -> None:
        """Be a worker until ``stop``. Raises errors that need another session or connection."""
        with (
            Worker(pipeline, self._tables) as worker,
            Turns(pipeline, session, worker, self._on_merge) as turns,
        ):
            altered = Altered(pipeline, self._tables)
            while not self._stop.is_set():
                now = time.monotonic()
                able = {t for t in self._tables if self._again_at.get(t, 0.0) <= now}
                wants = able - set(paused(pipeline.store))
                for table in turns.pending(wants, also=altered.tables()):
                    if not turns.start(table):
                        break
                    altered.tried(table)
                for turn in turns.wait(_LOOK_SECONDS):
                    self._take(turn)
            while turns.busy:
                for turn in turns.wait(_LOOK_SECONDS):
                    self._take(turn)

    def _take(self, turn: Turn) -> None:
        if turn.error is None or isinstance(turn.error, TablePaused):
            self._failures.pop(turn.table, None)
            return
        if isinstance(turn.error, TableProblem):
            self._failed(turn.table, str(turn.error))
            return
        if isinstance(turn.error, psycopg.ProgrammingError):  # this table's: a right, a function
            self._failed(turn.table, noted(turn.error))
            return
        if not isinstance(turn.error, psycopg.Error):
            self._failed(turn.table, noted(turn.error))
        if isinstance(turn.error, (psycopg.Error, PySparkException)):
            raise turn.error  # it may be the connection, or the session

    def _failed(self, table: TableId, why: str) -> None:
        self._failures[table] = self._failures.get(table, 0) + 1
        delay = _BACKOFF.delay_seconds(self._failures[table])
        self._again_at[table] = time.monotonic() + delay
        logger.error("%s can't go on, tried again in %.0f s: %s", table, delay, why)
