"""From which LSN on the log of a waiting table is whole: a copy may be of any later moment."""

from __future__ import annotations

from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn


def begin_log(store: LogStore, row: TableRow, lsn: Lsn) -> None:
    """Record that whatever commits from ``lsn`` on is in the table's log.

    Does nothing if the table no longer waits as ``row`` describes it.
    """
    store.connection.execute(
        "update tables set log_from = %s where source = %s and table_name = %s and epoch = %s"
        " and state = 'waiting' and oid = %s",
        (str(lsn), store.source, str(row.table), row.epoch, row.oid),
    )


def forget_begin(store: LogStore, row: TableRow) -> None:
    """It isn't known any more: the next look at the table finds another one."""
    store.connection.execute(
        "update tables set log_from = null where source = %s and table_name = %s and epoch = %s"
        " and state = 'waiting' and snapshot_lsn is null",
        (store.source, str(row.table), row.epoch),
    )
