"""The state of a lake table's copy and its cursor, by its snapshots."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyiceberg.table import Table

from cdc_assets.lake.lineage import count, position, said
from cdc_assets.log.cursors import Cursor

COPY, CHUNKS = "cdc.copy", "cdc.chunks"


@dataclass(frozen=True, slots=True)
class LakeState:
    """A lake table's state by its own snapshots; ``cursor`` is None where none names it.

    ``copy``: the newest copy (:attr:`LakeTable.copy_id`) that has landed anything; ``whole``: the
    history goes back to the table's first commit. ``epoch``: the copy that the cursor belongs to;
    ``sequence``: the number of the snapshot that names the cursor; ``at_head``: that snapshot is
    the current one. ``foreign``: a description of somebody else's change. ``total_rows`` and
    ``data_files``: the current snapshot's counts, which may be wrong where somebody else wrote: see
    :meth:`LakeTable.has_rows`.
    """

    snapshot_id: int | None
    copy: str | None
    landed: frozenset[str]
    cursor: Cursor | None
    total_rows: int
    whole: bool = True
    epoch: int | None = None
    sequence: int = 0
    at_head: bool = True
    foreign: str | None = None
    data_files: int = 0


def lake_state(table: Table | None, *, copying: bool = False) -> LakeState:
    """See :meth:`LakeTable.state`; a table that doesn't exist is in the initial state.

    ``copying``: only the landed chunks are needed; the cursor isn't looked for.
    """
    current = table.current_snapshot() if table is not None else None
    if table is None or current is None:
        return LakeState(None, None, frozenset(), None, 0)
    by_id = {s.snapshot_id: s for s in table.metadata.snapshots}
    copy, landed, at = None, set[str](), current.snapshot_id
    while (snapshot := by_id.get(at)) is not None:
        summary = said(snapshot)
        copy = copy or summary.get(COPY)
        if copy is not None and summary.get(COPY) == copy:
            landed.update(filter(None, summary.get(CHUNKS, "").split(",")))
        if snapshot.parent_snapshot_id is None:
            break
        at = snapshot.parent_snapshot_id
    # pyiceberg's expiry makes the oldest snapshot that is left look like the first one.
    whole = snapshot is not None and snapshot.sequence_number == 1
    totals = said(current)
    rows = count(totals, "total-records") - count(totals, "total-position-deletes")
    state = LakeState(
        current.snapshot_id,
        copy,
        frozenset(landed),
        None,
        rows,
        whole,
        data_files=count(totals, "total-data-files"),
    )
    found = None if copying else position(table)
    if found is None:
        return state
    return replace(
        state,
        cursor=found.cursor,
        epoch=found.epoch,
        sequence=found.sequence,
        at_head=found.at_head,
        foreign=found.foreign,
    )
