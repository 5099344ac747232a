"""When a table's turn is due.

A merge costs nearly the same for one change as for a thousand, so it waits: until the oldest change
would else be older than ``freshness.target`` once it is visible, or a batch is full. Where tables
would have to wait for each other, some begin earlier. In a table's quiet times none begins.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Collection
from datetime import datetime

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.batch import BATCH_ROWS
from cdc_assets.log.cursors import Backlog
from cdc_assets.postgres.names import TableId

# How long a table's first merge is expected to take.
_FIRST_SECONDS = 1.0
# Merges of which the longest is expected again, since every tenth or so also puts manifests
# together; but not one that took more than this many times as long as most: it was the server's
# first one, or met a check.
_REMEMBERED, _ODD = 12, 2.0


class Cadence:
    """What is known of the tables' merges, to time the next ones."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._merge_seconds: dict[TableId, deque[float]] = {}
        # The offset that each backlog begins at, and when it was first seen (monotonic).
        self._seen: dict[TableId, tuple[int, float]] = {}

    def took(self, table: TableId, seconds: float) -> None:
        """Remember how long a merge of the table took."""
        self._merge_seconds.setdefault(table, deque(maxlen=_REMEMBERED)).append(seconds)

    def begin_seconds(
        self, backlogs: Collection[Backlog], now: datetime, hands: int
    ) -> dict[TableId, float]:
        """How soon the merge of each has to begin for none of them to come too late.

        Changes of many tables are flushed together, so that these are due together, and only
        ``hands`` of them are merged at once: the first ones begin before they are due, but not in
        their quiet times.
        """
        due = sorted((self.due_seconds(backlog, now), backlog.table) for backlog in backlogs)
        begins = dict[TableId, float]()
        free_until = deque([math.inf] * hands)  # of each hand, when its later merge has to begin
        for soon, table in reversed(due):
            begins[table] = min(soon, free_until.popleft() - statistics.median(self._took(table)))
            free_until.append(begins[table])
            begins[table] = max(begins[table], self._quiet_seconds(table, now))
        return begins

    def _quiet_seconds(self, table: TableId, now: datetime) -> float:
        left = self._config.table(table).freshness.quiet_seconds(now)
        return left or -math.inf

    def due_seconds(self, backlog: Backlog, now: datetime) -> float:
        """How soon a merge has to begin not to come too late; ``now``: of the log.

        The age of a change is what the source's clock says, or the time since it was first seen,
        whichever is longer: a clock that is ahead delays nothing.
        """
        table, monotonic = backlog.table, time.monotonic()
        offset, since = self._seen.get(table, (-1, monotonic))
        if offset != backlog.offset:
            since = monotonic
            self._seen[table] = backlog.offset, since
        age = monotonic - since
        if backlog.oldest_commit is not None:
            # That of a file is its last one's: the first may have waited for the flush.
            flushed_every = self._config.staging.flush_interval_seconds
            age = max(age, (now - backlog.oldest_commit).total_seconds() + flushed_every)
        freshness = self._config.table(table).freshness
        quiet = freshness.quiet_seconds(now)
        if backlog.bytes >= self._config.lake.merge_bytes or backlog.rows >= BATCH_ROWS:
            return quiet
        soon = freshness.target.total_seconds() - age - self._expected(table)
        return max(soon, quiet) if quiet else soon

    def _expected(self, table: TableId) -> float:
        """How long the table's next merge takes at most."""
        took = self._took(table)
        return min(max(took), _ODD * statistics.median(took))

    def _took(self, table: TableId) -> Collection[float]:
        return self._merge_seconds.get(table, (_FIRST_SECONDS,))
