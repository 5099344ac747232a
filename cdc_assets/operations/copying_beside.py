"""Copies beside a follower: whoever starts ``flush`` and ``materialize --follow`` needs no more.

In Dagster runs copy, and ``cdc-assets snapshot`` does by hand. A table that is pinned, and that
none of them is copying, would wait with its snapshot held at the source.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, TableProblem
from cdc_assets.log.copies.chunks import being_read
from cdc_assets.log.states import TableState
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.backoff import Backoff
from cdc_assets.process.helper_thread import HelperThread
from cdc_assets.snapshot.coordinator import copy_tables
from cdc_assets.snapshot.progress import CopyProgress

logger = logging.getLogger(__name__)

# A table that nobody copies at two looks is copied here: a run that begins comes first.
_LOOK_SECONDS, _LONGEST_SECONDS = 10.0, 300.0
_BACKOFF = Backoff(first_seconds=2 * _LOOK_SECONDS, cap_seconds=_LONGEST_SECONDS)


@contextmanager
def copying_beside(
    config: SourceConfig,
    tables: Collection[TableId],
    sessions: Callable[[], AbstractContextManager[SparkSession]],
    on_progress: Callable[[CopyProgress], None],
) -> Iterator[None]:
    """Copy those of ``tables`` that nobody else does, in threads, for the length of the block.

    Errors are logged, and tried again, ever later; chunks that were read stay. A table that fails
    makes no other one wait, and none that comes waits for those that are being copied, up to
    ``snapshot.max_parallel_tables``.
    """
    stop, failures, threads = threading.Event(), dict[TableId, _Failure](), list[HelperThread]()
    hands = list[_Copying]()
    for number in range(1, config.snapshot.max_parallel_tables + 1):
        hand = _Copying(config, tables, sessions, on_progress, stop, hands, failures)
        hands.append(hand)
        threads.append(
            HelperThread(
                f"copies {number}", hand.step, _LOOK_SECONDS, longest_seconds=_LONGEST_SECONDS
            )
        )
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.close()


@dataclass(frozen=True, slots=True)
class _Failure:
    """Of a table, which failed so many times in a row."""

    times: int
    again_at: float
    told: str


@dataclass(slots=True, eq=False)
class _Copying:
    """What a thread does, and what it remembers.

    Of ``hands``, which know each other's tables and ``failures``, it looks for some only while all
    before it copy.
    """

    config: SourceConfig
    tables: Collection[TableId]
    sessions: Callable[[], AbstractContextManager[SparkSession]]
    on_progress: Callable[[CopyProgress], None]
    stop: threading.Event
    hands: Sequence[_Copying]
    failures: dict[TableId, _Failure]
    idle: frozenset[tuple[TableId, int]] = frozenset()
    taken: frozenset[TableId] = frozenset()

    def step(self) -> None:
        """Look, and copy what nobody copied at the look before, either."""
        if not all(hand.taken for hand in self.hands[: self.hands.index(self)]):
            self.idle = frozenset()
            return
        try:
            self._copy()
        finally:
            self.taken = frozenset()

    def _copy(self) -> None:
        with Pipeline.open(self.config) as pipeline:
            rows = pipeline.store.tables(None, TableState.COPYING)
            busy, seen = being_read(pipeline.store), self.idle
            self.idle = frozenset(
                (row.table, row.epoch)
                for row in rows
                if row.table in self.tables and row.table not in busy
                if not any(row.table in hand.taken for hand in self.hands)
            )
            todo = sorted(table for table, _ in self.idle & seen if self._is_due(table))
            if not todo:
                return
            self.taken = frozenset(todo)
            logger.info("copying %s, which nobody else does", ", ".join(map(str, todo)))
            with self.sessions() as session:
                failed = copy_tables(
                    pipeline, session, todo, on_progress=self.on_progress, stop=self.stop
                )
        for table in todo:
            self._judge(table, failed.get(table))

    def _is_due(self, table: TableId) -> bool:
        failure = self.failures.get(table)
        return failure is None or failure.again_at <= time.monotonic()

    def _judge(self, table: TableId, error: CdcError | None) -> None:
        before = self.failures.pop(table, None)
        if error is None:
            return
        times, told = before.times + 1 if before else 1, str(TableProblem.of(table, error))
        if before is None or told != before.told:
            logger.warning("copies: %s", told)
        again_at = time.monotonic() + _BACKOFF.delay_seconds(times)
        self.failures[table] = _Failure(times, again_at, told)
