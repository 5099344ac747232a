"""Going round the tables that a worker looks after, one turn after the other.

The oldest change goes first, and a turn ends where the log ended when it began, or after
TURN_SECONDS: so a busy table can't starve the others. Before each turn the worker gives and takes
what makes shares fair. What a problem of a table means is the caller's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced
from cdc_assets.materializer.batch import BATCH_BYTES
from cdc_assets.materializer.drain import Drained, drain
from cdc_assets.materializer.workers import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId

logger = logging.getLogger(__name__)

# One table's share of a long backlog before the others have their turn.
TURN_SECONDS = 20.0
# A table that somebody else writes (a comparison, compaction) is looked at again after it.
BUSY_SECONDS = 5.0
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


class Turns:
    """One worker's turns."""

    def __init__(self, pipeline: Pipeline, session: SparkSession, worker: Worker) -> None:
        self._pipeline = pipeline
        self._session = session
        self._worker = worker
        self._busy_until: dict[TableId, float] = {}
        self.mine: frozenset[TableId] = frozenset()
        """What this worker looks after, as of the last :meth:`pending`."""
        self.offsets: Mapping[TableId, int] = {}
        """Up to where every table's log is applied, whoever did it, as of then."""

    def pending(self, wants: Collection[TableId], also: Collection[TableId] = ()) -> list[TableId]:
        """What of this worker's share of ``wants`` has something to apply, the oldest first.

        ``also``: tables that want a turn in any case. Raises Fenced.
        """
        backlogs = [b for b in self._pipeline.store.backlogs() if b.table in wants]
        self.offsets = {backlog.table: backlog.offset for backlog in backlogs}
        heavy = {backlog.table for backlog in backlogs if backlog.bytes > BATCH_BYTES}
        self.mine = self._worker.share(wants, heavy)
        now = time.monotonic()
        waiting = [
            (backlog.oldest_commit or _LONG_AGO, backlog.table)
            for backlog in backlogs
            if backlog.table in self.mine
            and self._busy_until.get(backlog.table, 0.0) <= now
            and (backlog.rows or backlog.table in also)
        ]
        return [table for _, table in sorted(waiting)]

    @property
    def relieved(self) -> bool:
        """Whether a worker that came later would look after all that this one does."""
        return self._worker.relieved

    def turn(self, table: TableId, on_merge: Callable[[str], None]) -> Drained | None:
        """Apply what is registered now; None if another one is at it, or came between.

        Raises what :func:`drain` raises.
        """
        try:
            drained = drain(
                self._pipeline,
                self._session,
                table,
                until_offset=self._pipeline.store.log_end(table),
                budget_seconds=TURN_SECONDS,
                worker=self._worker.id,
                on_merge=on_merge,
            )
        except Fenced as fenced:
            logger.warning("%s", fenced)
            drained = None
        if drained is None:
            self._busy_until[table] = time.monotonic() + BUSY_SECONDS
        return drained
