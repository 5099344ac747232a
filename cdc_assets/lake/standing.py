"""The offset from which a table's log is applied, or the reason why it can't be.

Keeps invariant 7. A cursor is one that the lake table's history names, never a guess, and the log
has to go on exactly there. Anything else parks the table with the reason: applying the log then
would double rows or leave some out. Only where somebody else changed rows, the log can be applied
once they are corrected (``operations.repair``), and waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from pyiceberg.table import Table
from pyspark.sql import SparkSession

from cdc_assets.errors import TableProblem
from cdc_assets.lake.adopted.taking import WITHOUT_POSITION, left_alone
from cdc_assets.lake.publish import append, published
from cdc_assets.lake.spark.sql import listed
from cdc_assets.lake.state import LakeState, lake_state
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked.adoptions import adoption
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.heaps.files import has_one_heap
from cdc_assets.log.store import LogEntry, LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.texts import command, copy_anew
from cdc_assets.postgres.names import TableId

# The copy that a table with nothing to be copied began with.
BEGUN = "cdc.begun"
_BEGINNING = " beginning"


def park(store: LogStore, lake: LakeTable, what: str) -> NoReturn:
    """Park the table until it is copied anew."""
    table = lake.row.table
    problem = TableProblem(table, what, copy_anew(table))
    store.park(table, problem.reason, lake.row.epoch)
    raise problem


def is_begun(store: LogStore, lake: LakeTable) -> bool:
    """Whether the lake table was made. Raises TableProblem if it was, and is gone."""
    return _is_begun(store, lake, lake.load())


def _is_begun(store: LogStore, lake: LakeTable, loaded: Table | None) -> bool:
    row, state = lake.row, lake_state(loaded)
    if left_alone(store, row) is not None:
        return False
    if state.epoch == row.epoch:
        return True
    copies = lake.config.snapshot.mode != "never"
    if (copies and chunks(store, row.table, row.epoch)) or was_applied(store, row):
        if loaded is None:
            raise lake.gone()
        return True
    if loaded is None:
        return False
    older = state.cursor is not None and state.epoch is None  # made by an older version
    return older or loaded.properties.get(BEGUN) == str(row.epoch)


def may_hold_others(store: LogStore, lake: LakeTable, state: LakeState, loaded: Table) -> bool:
    """Whether the table may have rows that the source hadn't at the log's position.

    They are somebody else's, or were there before us; or of a partition that was emptied without a
    word in the log, which is found out later.
    """
    if state.foreign is not None or lake.config.snapshot.mode == "never":
        return True
    if adoption(store, lake.row) is not None:
        return True
    return BEGUN in loaded.properties or not has_one_heap(store, lake.row)


def was_applied(store: LogStore, row: TableRow) -> bool:
    """Whether the log was applied to this copy before, by the cursor that the log remembers.

    Applied entries are removed from the log, so a table that is gone can't begin once more.
    """
    known, since = store.cursor(row.table), row.snapshot_lsn
    return known is not None and since is not None and known.applied_lsn >= since


def begin(store: LogStore, session: SparkSession, lake: LakeTable) -> Table:
    """Make a table that has nothing to copy, and name its first cursor, once; returns the table.

    In mode ``never`` the table keeps the rows that it has; a table without a heap is empty.
    """
    loaded, begun = lake.load(), str(lake.row.epoch)
    marked = loaded is not None and loaded.properties.get(BEGUN) == begun + _BEGINNING
    if not _is_begun(store, lake, loaded):
        lake.create(session)
        if not marked:
            _mark(session, lake, begun + _BEGINNING)
            marked = True
        state = replace(lake.state(), foreign=None)
        with published(session, lake, state) as draft:
            if lake.config.snapshot.mode != "never" and lake.has_rows(state):
                session.sql(f"delete from {draft.sql_name}")
            append(session, lake, state, draft, store.first_cursor(lake.row))
    if marked:
        # From here on a missing cursor was lost: it isn't named a second time.
        _mark(session, lake, begun)
        return lake.loaded()
    assert loaded is not None  # it is begun
    return loaded


def _mark(session: SparkSession, lake: LakeTable, begun: str) -> None:
    session.sql(f"alter table {lake.sql_name} set tblproperties ({listed({BEGUN: begun})})")


def standing(
    store: LogStore, lake: LakeTable, state: LakeState, *, whatever_others_wrote: bool = False
) -> Cursor:
    """The cursor of the table, whose state is ``state``.

    Parks the table and raises TableProblem if it has no cursor of this copy. Raises TableProblem,
    too, if somebody else changed its rows: its log is kept until they are corrected.
    ``whatever_others_wrote`` allows that, for a comparison to find the rows that differ; the change
    stays known, and its reason in the table's row until they are corrected.
    """
    row = lake.row
    if state.cursor is None:
        park(
            store,
            lake,
            f"no commit in the history of its lake table {lake.sql_name} says how far its log is"
            " applied (somebody set it back, or expired the snapshots that said it)",
        )
    if state.epoch not in (None, row.epoch):
        park(store, lake, "its lake table was set back to an earlier copy of it")
    if state.foreign is not None and not whatever_others_wrote:
        problem = _changed_by_others(lake, state.foreign)
        store.note_held_up(row.table, str(problem), row.epoch)
        raise problem
    if state.foreign is None and row.reason is not None:
        store.note_held_up(row.table, None, row.epoch)
    return state.cursor


def _changed_by_others(lake: LakeTable, change: str) -> TableProblem:
    table = lake.row.table
    anew = copy_anew(table)
    if lake.key and lake.row.mode != "append":
        anew = (
            "Have the rows that differ corrected:"
            f" {command('verify', '--table', table, '--repair')} -- or {command('resync', table)}"
            " copies it anew"
        )
    what = f"somebody else changed rows of its lake table: {change}. Nothing more is applied to it"
    if change == WITHOUT_POSITION:
        what = f"{change}, so that its rows have to be compared before anything is applied"
    return TableProblem(table, what, anew)


def pending(store: LogStore, lake: LakeTable, cursor: Cursor) -> tuple[list[LogEntry], Cursor]:
    """The entries from the cursor on, without leading ones that the copy holds entirely.

    Parks the table and raises TableProblem if the log doesn't go on at the cursor.
    """
    row = lake.row
    entries, why = log_from(store, row.table, cursor.offset)
    if why is not None:
        park(store, lake, why)
    while entries and row.snapshot_lsn is not None and entries[0].flushable_lsn <= row.snapshot_lsn:
        first = entries.pop(0)
        cursor = Cursor(first.end_offset, first.flushable_lsn, first.commit_time)
    return entries, cursor


def log_from(store: LogStore, table: TableId, offset: int) -> tuple[list[LogEntry], str | None]:
    """The entries from ``offset`` on, and why they aren't the log from there on; None if they are.

    The end is read first: an entry that is registered meanwhile is no gap.
    """
    end = store.log_end(table)
    entries = store.entries(table, offset)
    return entries, gap(entries, offset, end)


def gap(entries: Sequence[LogEntry], offset: int, end: int) -> str | None:
    """Why ``entries`` aren't the log from ``offset`` to ``end``; None if they are."""
    if offset > end:
        return (
            f"its lake table holds its log up to offset {offset:,}, and the log ends at {end:,}"
            " (the coordination database is older than the lake, or another one)"
        )
    at = offset
    for entry in entries:
        if entry.start_offset > at:
            break
        at = max(at, entry.end_offset)
    else:
        if at >= end:
            return None
    return (
        f"its log has a gap: its lake table holds it up to offset {offset:,}, and what follows"
        f" offset {at:,} is gone (somebody set the table back, or removed entries of the log)"
    )
