"""The next part of a table's log that one merge applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cdc_assets.log.batch import Facts, Window, facts, outlines, take
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.relation import Told, alike
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn


@dataclass(frozen=True, slots=True)
class NextWindow:
    """Rows for one merge, all of one relation; the table's cursor is ``reached`` afterwards.

    ``lsn``: one that all of the rows committed below. The cursor's is lower where a truncate ends
    the window within a file.
    """

    entries: Sequence[LogEntry]
    window: Window
    relation: Told
    facts: Facts
    reached: Cursor
    lsn: Lsn


def next_window(
    row: TableRow,
    cursor: Cursor,
    entries: Sequence[LogEntry],
    storage: Storage,
    *,
    below: Lsn | None,
    batch_bytes: int,
) -> NextWindow | None:
    """The rows of ``entries`` to be merged next; None if all committed at ``below`` or later.

    Changes nothing; reads the outlines of up to ``batch_bytes`` of staged files. Raises like
    ``log.batch.outlines``.
    """
    assert row.snapshot_lsn is not None  # it streams
    outlined, relation = alike(outlines(take(entries, batch_bytes), storage))
    window = Window(cursor.offset, row.snapshot_lsn, below)
    key = relation.key(row.key_columns)
    found = facts(outlined, window, key)
    if row.mode == "soft_delete" and (first := found.first_truncate) is not None:
        # A truncate marks the rows that exist at that point: it is a batch of its own.
        window = replace(window, until=first if first > cursor.offset else first + 1)
        found = facts(outlined, window, key)
    if found.end_offset <= cursor.offset:
        return None
    batch = [one.entry for one in outlined]
    last = batch[-1]
    applied = last.flushable_lsn if below is None else min(below, last.flushable_lsn)
    lsn = applied
    if window.until is not None and found.end_offset < last.end_offset:
        applied = cursor.applied_lsn
    # Behind a cut there may be entries none of whose rows are in the window.
    batch = [one for one in batch if one.start_offset < found.end_offset]
    reached = Cursor(found.end_offset, applied, batch[-1].commit_time)
    return NextWindow(batch, window, relation, found, reached, lsn)
