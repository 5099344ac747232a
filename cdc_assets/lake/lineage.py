"""How far a lake table's log is applied, by the history of its own commits (invariant 7).

The current snapshot's ancestors are followed until one names a cursor; there is no other place for
it. The commits after that one are somebody else's. A rewrite (operation ``replace``) and a commit
of no rows change no row; any other commit does, so that the rows aren't those of the cursor any
more.

An expiry that isn't ours removes ancestors too early, but the table's older metadata files, which
the newest one lists, still describe them. They are read only where the history breaks off before it
has named a cursor. A cursor in a table property would cost each merge another commit, and wouldn't
show whether rows were changed between it and the oldest snapshot that is left.

Pure, but for reading metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pyiceberg.manifest import ManifestContent
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot

from cdc_assets.log.cursors import Cursor
from cdc_assets.postgres.lsn import Lsn

OFFSET, APPLIED, COMMITTED = "cdc.offset", "cdc.applied-lsn", "cdc.commit-time"
# Which copy of the table the cursor belongs to.
EPOCH = "cdc.epoch"
# The first change of rows by somebody else; our later commits carry it on.
FOREIGN = "cdc.foreign"

# A commit without any of these changed no row.
_CHANGES = (
    *("added-data-files", "deleted-data-files", "added-records", "deleted-records"),
    *("added-delete-files", "removed-delete-files"),
    *("added-position-deletes", "removed-position-deletes"),
    *("added-equality-deletes", "removed-equality-deletes"),
    *("added-dvs", "removed-dvs"),
)


@dataclass(frozen=True, slots=True)
class Position:
    """The position in the log, by a table's history.

    ``epoch`` is None where an older version named the cursor. ``foreign`` describes the first
    commit of somebody else that changed rows. ``sequence`` is the number of the snapshot that names
    the cursor; ``at_head``: that is the current one.
    """

    cursor: Cursor
    epoch: int | None
    foreign: str | None
    sequence: int
    at_head: bool


def position(table: Table, of: int | None = None) -> Position | None:
    """The position of the table, or of its snapshot ``of``; None if no commit names a cursor."""
    foreign, at_head = None, True
    for snapshot in _ancestors(table, of):
        summary = said(snapshot)
        if OFFSET in summary:
            epoch = summary.get(EPOCH)
            return Position(
                _cursor(summary),
                int(epoch) if epoch is not None else None,
                summary.get(FOREIGN) or foreign,
                snapshot.sequence_number or 0,
                at_head,
            )
        at_head = False
        if _changes_rows(snapshot):
            foreign = _described(snapshot)
    return None


def foreign_since(table: Table, snapshot_id: int | None, *, or_ours: bool = False) -> str | None:
    """The first commit after a snapshot that changed rows and names no cursor; ``or_ours``: any.

    None if there is none, and the snapshot is an ancestor of the current one; else a description.
    """
    found = None
    for snapshot in _ancestors(table):
        if snapshot.snapshot_id == snapshot_id:
            return found
        if (or_ours or OFFSET not in said(snapshot)) and _changes_rows(snapshot):
            found = _described(snapshot)
    return found or "it was set back"


def foreign_change(table: Table, ours: str) -> str | None:
    """The first commit that changed rows and doesn't have the summary property ``ours``."""
    found = None
    for snapshot in _ancestors(table):
        if ours not in said(snapshot) and _changes_rows(snapshot):
            found = _described(snapshot)
    return found


def cursor_properties(
    cursor: Cursor, epoch: int | None = None, foreign: str | None = None
) -> dict[str, str]:
    """The summary properties of the commit that reaches ``cursor``; earlier commits lack them."""
    properties = {OFFSET: str(cursor.offset), APPLIED: str(cursor.applied_lsn)}
    if cursor.commit_time is not None:
        properties[COMMITTED] = cursor.commit_time.isoformat()
    if epoch is not None:
        properties[EPOCH] = str(epoch)
    if foreign is not None:
        properties[FOREIGN] = foreign
    return properties


def said(snapshot: Snapshot) -> Mapping[str, str]:
    """The summary's properties, without the operation."""
    return snapshot.summary.additional_properties if snapshot.summary else {}


def count(summary: Mapping[str, str], name: str) -> int:
    """A number of a summary, which somebody else may have written: 0 if it isn't one."""
    text = summary.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def may_have_rows(table: Table) -> bool:
    """Whether any row may be there; False only if there is provably no data file."""
    current = table.current_snapshot()
    return current is not None and any(
        manifest.content == ManifestContent.DATA
        and (manifest.added_files_count != 0 or manifest.existing_files_count != 0)
        for manifest in current.manifests(table.io)
    )


def _ancestors(table: Table, of: int | None = None) -> Iterator[Snapshot]:
    """The current snapshot (or ``of``) and its ancestors, expired ones while a file has them."""
    known = {s.snapshot_id: s for s in table.metadata.snapshots}
    older = _expired(table)
    at = of if of is not None else table.metadata.current_snapshot_id
    while at is not None:
        while at not in known:
            if (found := next(older, None)) is None:
                return
            known = found | known
        snapshot = known[at]
        yield snapshot
        at = snapshot.parent_snapshot_id
        while at is None:  # the first one, or pyiceberg's expiry removed the parent's id
            if (found := next(older, None)) is None:
                return
            known = found | known
            if (same := found.get(snapshot.snapshot_id)) is not None:
                at = same.parent_snapshot_id


def _expired(table: Table) -> Iterator[dict[int, Snapshot]]:
    """The snapshots of each older metadata file, the newest first."""
    for entry in reversed(table.metadata.metadata_log):
        try:
            metadata = FromInputFile.table_metadata(table.io.new_input(entry.metadata_file))
        except OSError:
            return  # removed, and those before it are, too
        yield {s.snapshot_id: s for s in metadata.snapshots}


def _changes_rows(snapshot: Snapshot) -> bool:
    if snapshot.summary is None:
        return True
    summary = said(snapshot)
    return snapshot.summary.operation is not Operation.REPLACE and any(
        summary.get(name, "0") != "0" for name in _CHANGES
    )


def _described(snapshot: Snapshot) -> str:
    operation = snapshot.summary.operation.value if snapshot.summary else "unknown"
    at = datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)
    return f"snapshot {snapshot.snapshot_id} ({operation}, {at:%Y-%m-%d %H:%M:%S} UTC)"


def _cursor(summary: Mapping[str, str]) -> Cursor:
    at = summary.get(COMMITTED)
    return Cursor(
        int(summary[OFFSET]),
        Lsn.parse(summary.get(APPLIED, "0/0")),
        datetime.fromisoformat(at) if at else None,
    )
