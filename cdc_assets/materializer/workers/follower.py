"""A worker that goes on for ever: ``materialize --follow``, on any number of machines.

A table with a problem is tried again with growing delay, and the problem told where ``status`` and
the alerts find it; the others flow on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psycopg
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import EnvironmentProblem, TablePaused, TableProblem
from cdc_assets.log.asked.marks import marked_tables
from cdc_assets.log.asked.wishes import paused
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
# While nothing waits: a look at hundreds of tables takes milliseconds. What comes has its time, of
# which a look may take this share.
_QUIET_LOOK_SECONDS, _SHARE = 1.0, 0.2
_BACKOFF = Backoff(first_seconds=10.0, cap_seconds=600.0)


@dataclass(frozen=True, slots=True)
class _Failure:
    """``offset``: up to where the table's log was applied when it failed so many times in a row."""

    times: int
    again_at: float
    offset: int | None


class Listener:
    """Hears what a follower does, in the follower's thread; its errors would be the follower's."""

    def __init__(self, on_merge: Callable[[str], None]) -> None:
        self.merged = on_merge

    def over(self, turn: Turn) -> None:
        """A turn is over."""

    def looked(self, turns: Turns) -> None:
        """The log was looked at, some times a second while turns end, else each second at least."""


class Follower:
    """Merges this worker's share of ``tables`` until ``stop``; remembers tables that failed."""

    def __init__(
        self, tables: Sequence[TableId], stop: threading.Event, listener: Listener
    ) -> None:
        self._tables = tables
        self._stop = stop
        self._listener = listener
        self._failures: dict[TableId, _Failure] = {}
        self._quiet_seconds = _LOOK_SECONDS

    def work(self, pipeline: Pipeline, session: SparkSession) -> None:
        """Be a worker until ``stop``. Raises errors that need another session or connection."""
        target = min(table.freshness.target.total_seconds() for table in pipeline.config.tables)
        self._quiet_seconds = max(_LOOK_SECONDS, min(_QUIET_LOOK_SECONDS, _SHARE * target))
        with (
            Worker(pipeline, self._tables) as worker,
            Turns(pipeline, session, worker, self._listener.merged) as turns,
        ):
            altered = Altered(pipeline, self._tables)
            while not self._stop.is_set():
                now = time.monotonic()
                failing = {t for t, failure in self._failures.items() if failure.again_at > now}
                wants = set(self._tables) - failing - set(paused(pipeline.store))
                marked = marked_tables(pipeline.store)
                for table in turns.pending(wants, also=altered.tables(), asked=marked):
                    if not turns.start(table, altered.look(table)):
                        break
                    altered.tried(table)
                self._forget_mended(turns)
                self._take(turns)
                self._listener.looked(turns)
            turns.end()
            while turns.busy:
                self._take(turns)

    def _take(self, turns: Turns) -> None:
        quiet = not (turns.busy or turns.waits)
        done = turns.wait(self._quiet_seconds if quiet else _LOOK_SECONDS)
        for turn in done:
            self._listener.over(turn)
        for turn in done:
            self._judge(turn, turns)

    def _judge(self, turn: Turn, turns: Turns) -> None:
        if turn.error is None or isinstance(turn.error, TablePaused):
            self._failures.pop(turn.table, None)
            return
        # Not the table's own: the connection, the catalog. A missing right or a value is.
        gone = psycopg.OperationalError | psycopg.InterfaceError | EnvironmentProblem
        # States of class 25 are the session's: it may only read, or took too long.
        state = turn.error.sqlstate if isinstance(turn.error, psycopg.Error) else None
        lost = isinstance(turn.error, gone) or (state or "").startswith("25")
        if lost or (isinstance(turn.error, PySparkException) and not turns.usable):
            raise turn.error
        problem = turn.error
        if not isinstance(problem, TableProblem):
            problem = TableProblem(turn.table, noted(problem))
        before = self._failures.get(turn.table)
        times = 1 if before is None else before.times + 1
        delay, offset = _BACKOFF.delay_seconds(times), turns.offsets.get(turn.table)
        self._failures[turn.table] = _Failure(times, time.monotonic() + delay, offset)
        logger.error("tried again in %.0f s: %s", delay, problem)
        turns.tell(turn.table, str(problem))

    def _forget_mended(self, turns: Turns) -> None:
        """A failing table that somebody else merged, or that is copied anew, waits no longer."""
        for table, failure in list(self._failures.items()):
            at = turns.others.get(table, turns.offsets.get(table))
            if at != failure.offset:
                del self._failures[table]
