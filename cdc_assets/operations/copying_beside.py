"""Copies beside a follower: whoever starts ``flush`` and ``materialize --follow`` needs no more.

In Dagster runs copy, and ``cdc-assets snapshot`` does by hand. A table that is pinned, and that
none of them is copying, would wait with its snapshot held at the source.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem, TablesFailed
from cdc_assets.log.copies.chunks import being_read
from cdc_assets.log.states import TableState
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.helper_thread import HelperThread
from cdc_assets.snapshot.coordinator import copy_tables
from cdc_assets.snapshot.table_copy import CopyProgress

logger = logging.getLogger(__name__)

# A table that nobody copies at two looks is copied here: a run that begins comes first.
_LOOK_SECONDS, _LONGEST_SECONDS = 10.0, 300.0


@contextmanager
def copying_beside(
    config: SourceConfig,
    tables: Collection[TableId],
    sessions: Callable[[], AbstractContextManager[SparkSession]],
    on_progress: Callable[[CopyProgress], None],
) -> Iterator[None]:
    """Copy those of ``tables`` that nobody else does, in a thread, for the length of the block.

    Errors are logged, and tried again, ever later; chunks that were read stay.
    """
    idle, stop = frozenset[tuple[TableId, int]](), threading.Event()

    def step() -> None:
        nonlocal idle
        with Pipeline.open(config) as pipeline:
            rows = pipeline.store.tables(None, TableState.COPYING)
            busy = being_read(pipeline.store)
            seen, idle = (
                idle,
                frozenset(
                    (row.table, row.epoch)
                    for row in rows
                    if row.table in tables and row.table not in busy
                ),
            )
            todo = sorted(table for table, _ in idle & seen)
            if not todo:
                return
            logger.info("copying %s, which nobody else does", ", ".join(map(str, todo)))
            with sessions() as session:
                failed = copy_tables(pipeline, session, todo, on_progress=on_progress, stop=stop)
            if failed:
                raise TablesFailed([TableProblem.of(t, error) for t, error in failed.items()])

    thread = HelperThread("copies", step, _LOOK_SECONDS, longest_seconds=_LONGEST_SECONDS)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.close()
