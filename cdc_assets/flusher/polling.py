"""A session of query mode: polls the source, stages what it finds, and registers it.

It has the flusher's turn, and is supervised and reported as a session that streams is. One
connection reads the source. A poll's rows are registered in one transaction with the bounds that
the next poll begins at (``poller``); of a poll that finds more than ``staging.flush_bytes``, all
but the last ones are registered before, which only has them read again if it doesn't end.

Invariants 1 and 2 hold as for a stream: the source keeps nothing for us, but what ``flushed_lsn``
and the bounds have passed isn't asked for again. While a table can't be read, ``flushed_lsn`` stays
where all tables are in the log; how far each of the others is is recorded beside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime

import pyarrow as pa

from cdc_assets.errors import ReplicationLost
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.stage.staging import ReadyRows, Staging, WrittenRows
from cdc_assets.log.asked.wishes import refuse_if_dropped
from cdc_assets.log.backfills import request_deletes
from cdc_assets.log.staged.storage import Storage
from cdc_assets.messages.texts import bounded
from cdc_assets.pipeline import Pipeline
from cdc_assets.poller.poller import Part, Poll, Poller
from cdc_assets.poller.source import POLLS, position
from cdc_assets.postgres.horizon import secured
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation
from cdc_assets.postgres.session.connect import Connection

logger = logging.getLogger(__name__)

# How soon it is seen that somebody waits for the log to be level with the source; and that the
# session, which has the turn, is lost.
_LOOK_SECONDS = 0.5
# Between two polls at least, however many wait.
_LEAST_SECONDS = 0.2
# How long a registration waits for synchronous standbys to have what was read.
_SECURED_SECONDS = 30.0
# How often is looked whether deletes are due to be looked for.
_DELETES_SECONDS = 30.0
# In Progress.troubles: tables that the last poll couldn't read.
_TROUBLE = "queries"


class _Stalled(Exception):
    """A file can't be stored while rows are being read."""


class Polling:
    """Polls until told to stop, until ``until`` is registered, or an error."""

    def __init__(
        self,
        pipeline: Pipeline,
        flushed: Lsn,
        progress: Progress,
        *,
        stop: threading.Event,
        until: Lsn | None = None,
    ) -> None:
        assert pipeline.config.query is not None
        self._every = pipeline.config.query.every.total_seconds()
        self._config, self._store = pipeline.config, pipeline.store
        self._pipeline = pipeline
        self._flushed = flushed
        self._progress = progress
        self._stop = stop
        self._until = until
        self._deletes_at = time.monotonic()
        self._is_reading = False
        self._staging = Staging(
            self._config.staging_uri,
            self._config.name,
            Storage.of(self._config.s3),
            self._retrying,
        )

    def run(self) -> None:
        """Raises psycopg.OperationalError or ReplicationLost (worth a new session), or CdcError."""
        poller = Poller(self._config, self._store)
        try:
            with self.connect() as source:
                self._progress.sessions += 1
                self._progress.enter("streaming")
                due = time.monotonic()
                while not self._stop.is_set():
                    began = time.monotonic()
                    is_whole = began >= due
                    if is_whole:
                        due = began + self._every
                    self.poll(poller, source, whole=is_whole)
                    if self._reached:
                        return
                    if self._rest(began, due, poller.again_at):
                        due = time.monotonic()
        finally:
            self._staging.close()

    def connect(self) -> Connection:
        """A session that polls; the caller closes it."""
        source = self._pipeline.connect_source("poll")
        source.execute(POLLS)
        return source

    def _rest(self, began: float, due: float, again_at: float) -> bool:
        """Until the next poll is due, of all tables or of one that couldn't be read.

        True if somebody waits for the log to be level with the source sooner; while a table can't
        be read, it won't be.
        """
        least = began + _LEAST_SECONDS if again_at == float("inf") else again_at
        while not self._stop.is_set() and (left := min(due, again_at) - time.monotonic()) > 0:
            self._progress.beat = time.monotonic()
            awaited = self._store.awaited_lsn()  # fails if the session, with the turn, is lost
            if max(awaited, self._until or Lsn.ZERO) > self._flushed and time.monotonic() > least:
                return True
            self._stop.wait(min(left, _LOOK_SECONDS))
        return False

    def poll(self, poller: Poller, source: Connection, *, whole: bool = True) -> bool:
        """Whether all tables were read; unless ``whole``, only those are tried that are due again.

        These come last, when what the others have is registered. Raises SourceMismatch if the
        source was dropped.
        """
        refuse_if_dropped(self._store)
        if whole:
            is_all = self._poll(poller, source, whole=True)
            if poller.again_at > time.monotonic():
                return is_all
        return self._poll(poller, source, whole=False)

    def _poll(self, poller: Poller, source: Connection, *, whole: bool) -> bool:
        """``whole``: see :meth:`Poller.note`."""
        began = self._progress.beat = time.monotonic()
        poll = poller.note(source, whole=whole)
        self._progress.received = poll.at.lsn
        self._park(poll)
        waiting, staged = list[Part](), list[WrittenRows]()
        size = 0
        with closing(poll.read(source)) as reading:
            for part in reading:
                self._progress.beat = time.monotonic()
                if self._stop.is_set():
                    return False  # what isn't registered is read again
                if part is None:  # no statement is under way
                    if staged:
                        self._register(poller, source, poll, staged, began)
                        staged = []
                    continue
                waiting.append(part)
                size += part.rows.nbytes
                if size >= self._config.staging.flush_bytes:
                    try:
                        staged += self._stage(waiting, is_reading=True)
                    except _Stalled:
                        # Nobody at the source is to wait for our lock as long as this takes.
                        reading.close()
                        self._stage(waiting)
                        return self._poll(poller, source, whole=whole)
                    waiting, size = [], 0
        staged += self._stage(waiting)
        self._register(poller, source, poll, staged, began, is_over=True)
        self._tell(poll)
        self._ask_for_deletes()
        if whole and poll.is_cut:  # one of them is among the troubles now
            return self._poll(poller, source, whole=True)
        return not poll.troubles

    def _ask_for_deletes(self) -> None:
        """Deletes show in no query: the lake's keys are looked up, by a backfill."""
        assert self._config.query is not None
        every = self._config.query.deletes.every
        if every is not None and time.monotonic() - self._deletes_at > _DELETES_SECONDS:
            self._deletes_at = time.monotonic()
            request_deletes(self._store, every.total_seconds())

    def _stage(self, waiting: Sequence[Part], *, is_reading: bool = False) -> list[WrittenRows]:
        """Write files; durable when this returns, and in no log yet.

        It waits however long that takes; while a statement ``is_reading``, it raises _Stalled.
        """
        self._is_reading = is_reading
        rows = dict[tuple[TableId, Relation], list[pa.Table]]()
        for part in waiting:
            rows.setdefault((part.table, part.relation), []).append(part.rows)
        return self._staging.write_rows(ReadyRows(*of, found) for of, found in rows.items())

    def _register(
        self,
        poller: Poller,
        source: Connection,
        poll: Poll,
        staged: Sequence[WrittenRows],
        began: float,
        *,
        is_over: bool = False,
    ) -> None:
        """Register files in one transaction; of a poll that ``is_over`` with what it leaves."""
        if staged and not poll.at.in_recovery and not secured(source, _SECURED_SECONDS):
            raise ReplicationLost(
                "what was read isn't on the synchronous standbys yet.",
                "It is read again once a COMMIT at the source doesn't wait for them any more.",
            )
        ending = poller.ending(poll, read := position(source))
        level = max(ending.level, self._flushed) if is_over else self._flushed
        with self._store.connection.transaction():
            if staged:
                at = datetime.fromtimestamp(poll.at.clock.server / 10**6, UTC)
                self._store.register(staged, read, level, at)
            else:
                self._store.advance(level)
            if is_over:
                poller.register(ending)
            else:
                poller.registered_some(ending)
        if is_over:
            poller.over(poll, ending)
        if staged:
            self._progress.count(staged, time.monotonic() - began)
        self._flushed = level
        self._progress.flushed = self._progress.level = self._flushed

    def _tell(self, poll: Poll) -> None:
        self._progress.enter("streaming")
        trouble = "; ".join(f"{table} wasn't read: {why}" for table, why in poll.troubles.items())
        self._progress.note(_TROUBLE, bounded(trouble, 1_000) if trouble else None)
        if trouble:
            logger.warning("%s; it is tried again", trouble)
        rows = sum(found.rows for found in poll.found.values())
        if rows:
            logger.debug("a poll of %d tables found %d rows", len(poll.found), rows)

    def _park(self, poll: Poll) -> None:
        for table, problem in poll.problems.items():
            logger.error("parked: %s", problem)
            self._store.park(table, problem.reason, poll.rows[table].epoch)

    def _retrying(self, reason: str) -> None:
        self._progress.staging_retries += 1
        self._progress.enter("retrying staging", reason)
        if self._is_reading:
            raise _Stalled(reason)

    @property
    def _reached(self) -> bool:
        return self._until is not None and self._flushed >= self._until
