"""Whether a table's log is to be applied, and how much of it is."""

from __future__ import annotations

from cdc_assets.errors import TableProblem
from cdc_assets.lake.standing import is_begun, pending, standing
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.locks import write_lock
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


def streaming(store: LogStore, table: TableId) -> TableRow | None:
    """The table's row, None if its log isn't applied yet. Raises TableProblem if it is parked."""
    row = store.table(table)
    if row is not None and row.state == TableState.PARKED:
        raise TableProblem(table, row.reason or "it is parked")
    if row is None or row.state != TableState.STREAMING or row.snapshot_lsn is None:
        return None
    return row


def outstanding(pipeline: Pipeline, table: TableId) -> int | None:
    """The end of the log that is registered for ``table`` now, None if all of it is applied.

    Reads the table's own snapshots, without Spark. While another writer has the table, the answer
    is the log's end. Raises TableProblem when the table is parked, its copy isn't complete, or its
    log can't be applied.
    """
    store = pipeline.store
    row = streaming(store, table)
    if row is None:
        raise TableProblem(table, "its copy isn't complete", "Run cdc-assets snapshot first.")
    lake = LakeTable(pipeline.config, pipeline.config.table(table), row)
    if not store.try_lock(lock := write_lock(table)):
        return store.log_end(table)
    try:
        if not is_begun(store, lake):
            return store.log_end(table)
        cursor = standing(store, lake, lake.state())
        entries, reached = pending(store, lake, cursor)
        if not entries:
            store.set_cursor(table, reached)
    finally:
        store.unlock(lock)
    return entries[-1].end_offset if entries else None


def whole_from(store: LogStore, table: TableId) -> Lsn:
    """The LSN from which on the lake's rows are of one moment; zero if they always were."""
    row = store.table(table)
    if row is None or row.complete_lsn is None or row.complete_lsn == row.snapshot_lsn:
        return Lsn.ZERO
    return row.complete_lsn
