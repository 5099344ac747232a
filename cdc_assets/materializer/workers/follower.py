"""A worker that goes on for ever: ``materialize --follow``, on any number of machines.

A table with a problem is tried again with growing delay, and the problem told where ``status`` and
the alerts find it; the others flow on.
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


class Listener:
    """Hears what a follower does, in the follower's thread; its errors would be the follower's."""

    def __init__(self, on_merge: Callable[[str], None]) -> None:
        self.merged = on_merge

    def over(self, turn: Turn) -> None:
        """A turn is over."""

    def looked(self, turns: Turns) -> None:
        """The log was looked at, some times a second while turns end, else each half of one."""


class Follower:
    """Merges this worker's share of ``tables`` until ``stop``; remembers tables that failed."""

    def __init__(
        self, tables: Sequence[TableId], stop: threading.Event, listener: Listener
    ) -> None:
        self._tables = tables
        self._stop = stop
        self._listener = listener
        self._failures: dict[TableId, int] = {}
        self._again_at: dict[TableId, float] = {}

    def work(self, pipeline: Pipeline, session: SparkSession) -> None:
        """Be a worker until ``stop``. Raises errors that need another session or connection."""
        with (
            Worker(pipeline, self._tables) as worker,
            Turns(pipeline, session, worker, self._listener.merged) as turns,
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
                self._take(turns)
                self._listener.looked(turns)
            while turns.busy:
                self._take(turns)

    def _take(self, turns: Turns) -> None:
        done = turns.wait(_LOOK_SECONDS)
        for turn in done:
            self._listener.over(turn)
        for turn in done:
            self._judge(turn, turns)

    def _judge(self, turn: Turn, turns: Turns) -> None:
        if turn.error is None or isinstance(turn.error, TablePaused):
            self._failures.pop(turn.table, None)
            return
        # Not the table's own: the connection. A missing right or function may be of one table.
        lost = isinstance(turn.error, psycopg.Error)
        lost = lost and not isinstance(turn.error, psycopg.ProgrammingError)
        if not lost:
            problem = turn.error
            if not isinstance(problem, TableProblem):
                problem = TableProblem(turn.table, noted(problem))
            self._failures[turn.table] = self._failures.get(turn.table, 0) + 1
            delay = _BACKOFF.delay_seconds(self._failures[turn.table])
            self._again_at[turn.table] = time.monotonic() + delay
            logger.error("tried again in %.0f s: %s", delay, problem)
            turns.tell(turn.table, str(problem))
        if lost or isinstance(turn.error, PySparkException):  # it may be the session
            raise turn.error
