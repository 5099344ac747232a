"""Tiny files between two maintenance runs: whoever merges a table puts them together now and then.

Each merge appends a file, and each later one opens all of them: a request each on an object store,
a millisecond each on a disk. At a merge every five seconds that would be 360 by the next
maintenance. Those that are still small when put together are left to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pyspark.sql import SparkSession

from cdc_assets.lake.lost_care import surviving
from cdc_assets.lake.tables import LakeTable
from cdc_assets.maintenance.compact import Busy, due_slice, rewritten, writing
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.traces import noted

logger = logging.getLogger(__name__)

# A table is looked at once it has so many more files than when it was last looked at.
CROWD = 24
# Files below a quarter of this are put together, no more than this at once: that takes a second.
_TARGET_BYTES = 16 * 10**6
# So few of a partition aren't worth it.
_FEW = 8
# The keys of larger tables aren't compared, as they are when a maintenance run compacts.
_CHECKED_ROWS = 1_000_000


class Crowds:
    """How many files each table of a worker had when it was last looked at."""

    def __init__(self) -> None:
        self._files: dict[TableId, int] = {}

    def grew(self, table: TableId, data_files: int) -> bool:
        """Whether ``table``, which has so many files now, is to be thinned out."""
        before = self._files[table] = min(data_files, self._files.get(table, data_files))
        if data_files - before < CROWD:
            return False
        del self._files[table]  # the next look counts from what is left
        return True


def thin_out(pipeline: Pipeline, session: Callable[[], SparkSession], table: TableId) -> None:
    """Put the table's tiny files together; whatever prevents it is left to maintenance.

    It takes the table's writer lock.
    """
    config, store = pipeline.config, pipeline.store
    row = store.table(table)
    if config.maintenance.every is None or row is None:
        return
    lake = LakeTable(config, config.table(table), row)
    wanted = config.maintenance.model_copy(
        update={
            "target_file_size": min(_TARGET_BYTES, config.maintenance.target_file_size),
            "min_input_files": max(_FEW, config.maintenance.min_input_files),
            "deleted_rows": 1.0,  # files with many deleted rows are maintenance's, too
        }
    )
    try:
        with surviving(store, table, "its compaction"), writing(store, row):
            due = due_slice(lake, wanted)
            if due is not None and not due.moved:
                rewritten(session(), lake, due, checked_rows=_CHECKED_ROWS)
    except Busy as busy:
        logger.info("%s: its small files stay: %s", table, busy)
    except Exception as error:  # noqa: BLE001 - the merge is done: nothing of it may fail
        logger.warning("%s: its small files stay: %s", table, noted(error))
