"""The tag of a lake table at a mark (``log.asked.marks``)."""

from __future__ import annotations

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import first_line
from cdc_assets.lake.drafts.branches import patiently
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked.marks import PendingMark, settle, tag_of
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.store import LogStore
from cdc_assets.readiness.foreign_errors import explained


def tag(
    store: LogStore,
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    cursor: Cursor,
    mark: PendingMark,
) -> None:
    """Tag the table, to which all of its log below ``mark`` is applied, or record why it isn't.

    Done twice, as after a kill, it is the same: no merge goes on before it is recorded. A failure
    of the tag is told and stops no merge; one of Spark is raised.
    """
    reason = _passed(store, lake, state, cursor, mark)
    if reason is None:
        name, snapshot = ticked(tag_of(mark.name)), state.snapshot_id
        statement = f"alter table {lake.sql_name} create or replace tag {name}"
        try:
            patiently(session, lake, f"{statement} as of version {snapshot}")
        except PySparkException as error:
            if lost_server(error):
                raise
            reason = f"it can't be tagged: {first_line(explained(error, lake.config))}"
    settle(store, mark.name, lake.row.table, state.snapshot_id if reason is None else None, reason)


def _passed(
    store: LogStore, lake: LakeTable, state: LakeState, cursor: Cursor, mark: PendingMark
) -> str | None:
    """Why the table's present rows aren't those of the mark; None if they are."""
    row = store.table(lake.row.table)  # merges of this turn may have read rows of a later moment
    if row is None:
        return "it was given up before it had the tag"
    since = max(row.snapshot_lsn or mark.lsn, row.complete_lsn or mark.lsn)
    if row.epoch != mark.epoch:
        return "it was copied anew before it had the tag"
    if since > mark.lsn:
        return f"rows of it are of a later moment, {since}"
    if state.foreign is not None:
        return f"somebody else changed its rows: {state.foreign}"
    if cursor.offset > mark.offset:
        return f"its merges had come to {cursor.applied_lsn} before they knew of it"
    return None
