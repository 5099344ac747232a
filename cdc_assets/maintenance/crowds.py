"""Tiny files between two maintenance runs: whoever merges a table puts them together now and then.

Each merge appends a file, and each later one opens all of them: a request each on an object store,
a millisecond each on a disk. At a merge every five seconds that would be 360 by the next
maintenance. It is done right after a merge, takes a second or two, and never waits for anybody. A
table whose merges write to many partitions is left to maintenance: what can be put together in
between would hardly be seen there.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked.wishes import paused
from cdc_assets.log.locks import ALONE_LOCK
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.maintenance.compact import Busy, rewritten, writing
from cdc_assets.maintenance.files import live_files
from cdc_assets.maintenance.lost_care import surviving
from cdc_assets.maintenance.plan import tiny_slice
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.traces import noted

logger = logging.getLogger(__name__)

# A table is looked at once it has so many more files than it was left with, …
CROWD = 24
# … after a pause, and after one of so many times what the last look took.
_PAUSE_SECONDS, _PAUSES = 60.0, 20.0
# Of a worker's time, whatever tables it has: after a look none for so many times what it took.
_RESTS = 4.0
# Files of a merge, above which its table is left to maintenance.
_SPREAD = 5.0
# The keys of larger tables aren't compared, as they are when a maintenance run compacts.
_CHECKED_ROWS = 1_000_000


@dataclass(slots=True)
class _Left:
    """How a table was left: its files, also as of its last merge, and until when (monotonic)."""

    files: int
    seen: int
    until: float = 0.0


class Crowds:
    """How the tables of a worker were left. One at a time is put together."""

    def __init__(self) -> None:
        self._left: dict[TableId, _Left] = {}
        self._rests_until = 0.0

    def is_crowd(self, table: TableId, data_files: int, merges: int) -> bool:
        """Whether ``table`` has too many tiny files: ``data_files`` after so many merges."""
        if (left := self._left.get(table)) is None:  # what a merge of it adds isn't known yet
            self._left[table] = _Left(0, data_files)
            return False
        left.files = min(left.files, data_files)
        is_spread = data_files - left.seen > _SPREAD * merges
        left.seen = data_files
        rests = time.monotonic() < max(left.until, self._rests_until)
        return data_files - left.files >= CROWD and not (is_spread or rests)

    def thin_out(self, pipeline: Pipeline, session: SparkSession, table: TableId) -> None:
        """Put tiny files of ``table``, which are a crowd, together.

        Takes the table's writer lock. Whatever prevents it is left to maintenance; raises
        PySparkException only if the Spark server is lost.
        """
        left, began = self._left[table], time.monotonic()
        left.files = left.seen = self._thinned(pipeline, session, table, left.seen)
        now = time.monotonic()
        left.until = now + max(_PAUSE_SECONDS, _PAUSES * (now - began))
        self._rests_until = now + _RESTS * (now - began)

    @staticmethod
    def _thinned(pipeline: Pipeline, session: SparkSession, table: TableId, data_files: int) -> int:
        try:
            return _thinned(pipeline, session, table)
        except Busy as busy:
            logger.info("%s: its small files stay: %s", table, busy)
        except TableProblem as problem:
            logger.error("its small files stay: %s", problem)  # noqa: TRY400
        except Exception as error:
            if isinstance(error, PySparkException) and lost_server(error):
                raise
            # The merge is done: nothing of it may fail.
            logger.warning("%s: its small files stay: %s", table, noted(error))
        return data_files


def _thinned(pipeline: Pipeline, session: SparkSession, table: TableId) -> int:
    """Rewrite one slice of tiny files; how many files the table has by then."""
    store, config = pipeline.store, pipeline.config
    if store.is_locked(ALONE_LOCK):
        raise Busy("a batch that ended a Spark server is merged alone")
    if (row := store.table(table)) is None:
        raise Busy("it is gone")
    lake = LakeTable(config, config.table(table), row)
    with writing(store, row, patient=False):
        _refuse_at_rest(store, table)
        loaded = lake.loaded()
        current = loaded.current_snapshot()
        files = live_files(loaded, current) if current is not None else []
        due = tiny_slice(files, loaded.spec().spec_id)
        if due is None:
            return len(files)
        # Without a key all of its columns would be compared.
        checked = _CHECKED_ROWS if lake.key else 0
        with surviving(store, table, "the compaction of its tiny files"):
            rewritten(session, lake, due, checked_rows=checked)
    return lake.state().data_files


def _refuse_at_rest(store: LogStore, table: TableId) -> None:
    row = store.table(table)
    if row is None or row.state != TableState.STREAMING:
        raise Busy("it doesn't stream any more")
    if table in paused(store):
        raise Busy("it is paused")
