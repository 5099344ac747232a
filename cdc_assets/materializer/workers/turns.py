"""A worker's turns at its tables, several at once.

Of the tables whose turn is due (``workers.cadence``) the least recently served one goes first, and
a turn ends where the log ended when it began, or after TURN_SECONDS: so a hot table can't starve
the others, however long its backlog is. Before a turn the worker gives and takes tables to make
shares fair. The caller handles a table's problems.

A hand is one thread with its own log connection, which has the locks, and its own Spark session,
whose commits carry the table's cursor. One of them is left for the tiny files that merges leave, so
that no table waits for those of another. Everything else happens in the caller's thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Self

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced, first_line
from cdc_assets.lake.spark.beside import leave, sessions_beside
from cdc_assets.lake.spark.session import ask, is_unreachable, is_usable, lost_server
from cdc_assets.log.cursors import Backlog
from cdc_assets.maintenance.crowds import Crowds
from cdc_assets.materializer.drain import Drained, drain
from cdc_assets.materializer.schema.ahead import Look
from cdc_assets.materializer.workers.cadence import Cadence
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.backoff import Backoff
from cdc_assets.process.memory import keep_freed, release_freed

logger = logging.getLogger(__name__)

# How long a table with a long backlog is served before the others have their turn.
TURN_SECONDS = 20.0
# When a table that another writer has (a comparison, a backfill, compaction) is tried again.
_BUSY = Backoff(first_seconds=0.5, cap_seconds=5.0)
# A table whose turn is as near as this isn't waited for.
_AT_ONCE_SECONDS = 0.2
# What the batches of a merge take of this process.
_KEPT_BYTES = 256 * 2**20
# Without any turn for so long, what its merges have freed goes back.
_IDLE_SECONDS = 30.0
# How often the sessions that merge nothing are used: a server forgets them after an hour.
_ASK_SECONDS = 600.0
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Hand:
    pipeline: Pipeline
    session: SparkSession


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is over; nothing drained and no error: another writer has the table."""

    table: TableId
    drained: Drained | None
    error: Exception | None


class Turns:
    """One worker's turns; a context manager, for the thread that uses ``pipeline``."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: SparkSession,
        worker: Worker,
        on_merge: Callable[[str], None],
    ) -> None:
        self._pipeline = pipeline
        self._worker = worker
        self._on_merge = on_merge
        self._told = SimpleQueue[str]()
        self._busy: dict[TableId, tuple[int, float]] = {}  # tries in a row, and until when
        self._at_work: dict[TableId, tuple[_Hand, Future[Drained | None]]] = {}
        self._thinned = set[TableId]()  # of those at work: their files are put together
        self._turns = 0
        self._last_turn: dict[TableId, int] = {}
        self._cadence = Cadence(pipeline.config)
        self._crowds = Crowds()
        self._lost: PySparkException | None = None  # of a Spark server that ended beside the merges
        self._ends = False
        self._ask_at = time.monotonic() + _ASK_SECONDS  # whether free sessions are usable
        self._next_due = math.inf  # monotonic; of the tables whose turn wasn't due
        self._cleanup = ExitStack()
        keep_freed(_KEPT_BYTES)
        self._worked_at: float | None = None  # since freed memory went back; monotonic
        self._free = self._hands(session)
        self._pool = ThreadPoolExecutor(len(self._free), "hand")
        # One hand is for what merges leave behind.
        self._side_by_side = max(1, len(self._free) - 1)
        self.mine: frozenset[TableId] = frozenset()
        """This worker's tables, as of the last :meth:`pending`."""
        self.offsets: Mapping[TableId, int] = {}
        """The offset up to which each wanted table's log is applied, by any worker, as of then."""
        self.others: Mapping[TableId, int] = {}
        """The same of the tables that stream and weren't wanted."""
        self.waits = False
        """Whether a table of this worker had something to apply then, and its turn wasn't due."""

    @property
    def busy(self) -> bool:
        return bool(self._at_work)

    @property
    def usable(self) -> bool:
        """Whether the server knows the sessions that merge nothing now."""
        return all(is_usable(hand.session) for hand in self._free)

    @property
    def relieved(self) -> bool:
        """Whether a later worker wants all of this one's tables."""
        return self._worker.relieved

    def end(self) -> None:
        """Begin nothing more: what is at work is waited for."""
        self._ends = True

    def tell(self, table: TableId, problem: str) -> None:
        """Say why the log of a table of this worker can't be applied."""
        self._worker.tell(table, problem)

    def pending(
        self,
        wants: Collection[TableId],
        also: Collection[TableId] = (),
        asked: Collection[TableId] = (),
    ) -> list[TableId]:
        """Tables of this worker's share of ``wants`` whose turn is due, the next one first.

        Among tables without a turn yet, the one with the oldest change comes first. Tables that are
        at work are left out. ``also``: tables that want a turn in any case, but for quiet times;
        ``asked``: those that a person wants merged now, or a mark waits for. Raises Fenced.
        """
        config = self._pipeline.config
        found = self._pipeline.store.backlogs()
        backlogs = [b for b in found if b.table in wants]
        self.offsets = {b.table: b.offset for b in backlogs}
        self.others = {b.table: b.offset for b in found if b.table not in wants}
        heavy = {b.table for b in backlogs if b.bytes > config.lake.merge_bytes}
        self.mine = self._worker.share(wants, heavy, keep=self._at_work)
        now = time.monotonic()
        waiting = [
            backlog
            for backlog in backlogs
            if backlog.table in self.mine
            and backlog.table not in self._at_work
            and self._busy.get(backlog.table, (0, 0.0))[1] <= now
            and (backlog.rows or backlog.table in also or backlog.table in asked)
        ]
        at = self._pipeline.store.server_now() if waiting else _LONG_AGO
        quiet = {b.table for b in waiting if config.table(b.table).freshness.quiet_seconds(at)}
        also = ({*also} - quiet) | {*asked}
        due, self.waits, self._next_due = list[Backlog](), False, math.inf
        timed = [backlog for backlog in waiting if backlog.table not in also]
        begins = self._cadence.begin_seconds(timed, at, self._side_by_side)
        for backlog in waiting:
            soon = 0.0 if backlog.table in also else begins[backlog.table]
            if soon <= _AT_ONCE_SECONDS:
                due.append(backlog)
            else:
                # Nobody waits for the end of a quiet time.
                self.waits = self.waits or backlog.table not in quiet
                self._next_due = min(self._next_due, now + soon)
        due.sort(
            key=lambda b: (self._last_turn.get(b.table, 0), b.oldest_commit or _LONG_AGO, b.table)
        )
        return [backlog.table for backlog in due]

    def start(self, table: TableId, look: Look | None = None) -> bool:
        """Begin to apply the log that is registered now; False if no hand is free.

        ``look``: at a schema change that no row may have; it is applied with the log.

        Raises PySparkException if the Spark server is known to be lost.
        """
        if self._lost is not None:
            if self._at_work:
                return False  # wait() tells what is over first
            raise self._lost
        if not self._free or len(self._at_work) - len(self._thinned) >= self._side_by_side:
            return False
        self._turns += 1
        self._last_turn[table] = self._turns
        until = self._pipeline.store.log_end(table)
        hand = self._free.pop()
        self._at_work[table] = hand, self._pool.submit(self._apply, hand, table, until, look)
        return True

    def wait(self, seconds: float) -> list[Turn]:
        """The turns that are over by now; waits for one, or until another table's is due.

        Waits no longer than ``seconds``. Raises PySparkException if an idle session was lost, or
        the server while nothing was merged.
        """
        if not self._ends and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_SECONDS
            self._ask()
        seconds = max(0.0, min(seconds, self._next_due - time.monotonic()))
        self._next_due = math.inf  # who waits again without a look waits for what is at work
        futures = [future for _, future in self._at_work.values()]
        now = time.monotonic()
        if futures:
            self._worked_at = now
            wait(futures, seconds, FIRST_COMPLETED)
        else:
            if self._worked_at is not None and now - self._worked_at >= _IDLE_SECONDS:
                self._worked_at = None
                release_freed()
            time.sleep(seconds)
        while not self._told.empty():
            self._on_merge(self._told.get())
        done = [table for table, (_, future) in self._at_work.items() if future.done()]
        turns = [turn for table in done if (turn := self._over(table)) is not None]
        # What is over is told first.
        if self._lost is not None and not self._ends and not turns:
            raise self._lost
        return turns

    def _ask(self) -> None:
        try:
            for hand in self._free:
                ask(hand.session)
        except PySparkException as error:
            if is_unreachable(error):  # else only the session may be lost
                self._lost = error
            what = "a session of Spark was lost while nothing was merged"
            raise PySparkException(f"{what}: {first_line(error)}") from error

    def _over(self, table: TableId) -> Turn | None:
        hand, future = self._at_work.pop(table)
        self._free.append(hand)
        error = future.exception()
        if table in self._thinned:
            self._thinned.remove(table)
            if isinstance(error, PySparkException):
                self._lost = error
            elif error is not None:
                raise error
            return None
        if error is not None and not isinstance(error, Fenced):
            if not isinstance(error, Exception):
                raise error
            return Turn(table, None, error)
        if error is not None:
            logger.warning("%s", error)
        drained = future.result() if error is None else None
        if drained is None:
            times = self._busy.get(table, (0, 0.0))[0] + 1
            self._busy[table] = times, time.monotonic() + _BUSY.delay_seconds(times)
            return Turn(table, None, None)
        self._busy.pop(table, None)
        if drained.merges:
            self._cadence.took(table, drained.seconds / drained.merges)
            self._thin_out(table, drained)
        return Turn(table, drained, None)

    def _thin_out(self, table: TableId, drained: Drained) -> None:
        """Begin to put the table's tiny files together if they are a crowd, now after its turn.

        A merge of it that is due meanwhile waits, so no other table is taken beside it.
        """
        is_kept = self._pipeline.config.maintenance.every is not None
        crowd = is_kept and self._crowds.is_crowd(table, drained.data_files, drained.merges)
        if not crowd or self._thinned or self._ends or not self._free:
            return
        hand = self._free.pop()
        self._thinned.add(table)
        self._at_work[table] = hand, self._pool.submit(self._put_together, hand, table)

    def _put_together(self, hand: _Hand, table: TableId) -> None:
        if not self._ends:
            self._crowds.thin_out(hand.pipeline, hand.session, table)

    def _apply(self, hand: _Hand, table: TableId, until: int, look: Look | None) -> Drained | None:
        return drain(
            hand.pipeline,
            hand.session,
            table,
            until_offset=until,
            budget_seconds=TURN_SECONDS,
            look=look,
            worker=self._worker.id,
            on_merge=self._told.put,
        )

    def _hands(self, session: SparkSession) -> list[_Hand]:
        """As many as are configured, and one."""
        config = self._pipeline.config
        beside = sessions_beside(session, config, config.lake.max_parallel_tables + 1)
        sessions = self._cleanup.enter_context(beside)
        hands = []
        for each in sessions:
            pipeline = self._cleanup.enter_context(Pipeline.open(self._pipeline.config))
            self._worker.adopt(pipeline.store)
            hands.append(_Hand(pipeline, each))
        return hands

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object
    ) -> None:
        self.end()
        if any(one is not None and lost_server(one) for one in (error, self._lost)):
            for hand in [*self._free, *(hand for hand, _ in self._at_work.values())]:
                leave(hand.session)
        elif error is not None:
            for hand, _ in self._at_work.values():
                with suppress(PySparkException):  # of a session that is lost
                    hand.session.interruptAll()
        self._pool.shutdown()
        self._cleanup.close()
