"""Rows of the table of markers (``markers.table``), and where a flush ends because of them.

A marker is a row that is inserted into a published table. Its mark is what its transaction's commit
and all commits before that left. So the flush that has that transaction ends with it
(:meth:`Markers.end_of`): the offsets that the log has then are those of the mark, in the log of
each deployment that streams the source. Only inserts are markers: an update, a delete or a truncate
of the table means nothing, so its rows may be removed at any time. Nothing of it is ever staged.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cdc_assets.flusher.decode.transactions import Batch
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import INSERT, NEW_ROW, NULL, RELATION, TEXT, UNCHANGED, Relation

# Markers of one transaction that are taken; the next one is told, and what follows isn't. And the
# bytes of a text of theirs.
MOST, _LONGEST = 100, 500
# Where a message's name begins, behind its kind and the oid; and an INSERT's tuple, behind "N".
_NAME, _TUPLE = 5, 6

Marker = tuple[str, str]
"""The texts of a row's columns ``marker`` and ``name``; empty where it has none."""


class Markers:
    """The markers of a stream, of its ``table``; None: it has none."""

    def __init__(self, table: TableId | None) -> None:
        self.table = table
        self._prefix = b"" if table is None else b"%b\0%b\0" % _encoded(table)
        self._relations: dict[int, Relation] = {}
        self._rows: list[Marker] = []
        self._in_open = False
        self.at_commit = False
        """Whether the last commit taken in is that of a transaction with markers."""

    def end_of(self, batch: Batch) -> int:
        """How many frames of a batch may be taken in before a flush, and take their markers.

        They end with the first commit of a transaction that has markers.
        """
        scan, frames = batch.scan, len(batch.scan.kind)
        self.at_commit = False
        if self.table is None:
            return frames
        relations, oids = dict[int, bytes](), {*self._relations}
        for frame in batch.events[scan.kind[batch.events] == RELATION].tolist():
            message = scan.message(frame)
            if self._is_named(message) or _oid(message) in oids:
                relations[frame] = message
                oids.add(_oid(message))
        inserts = np.empty(0, np.int64)
        if oids:
            ours = np.isin(batch.change_oid, [*oids])
            inserts = batch.changes[ours & (scan.kind[batch.changes] == INSERT)]
        if self._in_open or len(inserts):
            later = batch.commits[batch.commits > (-1 if self._in_open else inserts[0])]
            self.at_commit = len(later) > 0
            self._in_open = not self.at_commit
            frames = int(later[0]) + 1 if self.at_commit else frames
        for frame in sorted([*relations, *inserts.tolist()]):
            if frame >= frames:
                break
            if frame in relations:
                self._learn(relations[frame])
            elif len(self._rows) <= MOST:
                self._add(scan.message(frame), scan.frame_lsn(frame))
        return frames

    def take(self) -> tuple[Marker, ...]:
        """Take those of the last commit, if they are to be registered with it."""
        if self._in_open:
            return ()
        rows, self._rows = self._rows, []
        return tuple(rows)

    def has(self, oid: int) -> bool:
        """Whether this is the table of markers."""
        return oid in self._relations

    def _is_named(self, message: bytes) -> bool:
        return message.startswith(self._prefix, _NAME)

    def _learn(self, message: bytes) -> None:
        if self._is_named(message):
            self._relations[_oid(message)] = Relation.parse(message)
        else:  # it was renamed, perhaps more than once
            self._relations.pop(_oid(message), None)

    def _add(self, message: bytes, lsn: int) -> None:
        relation = self._relations.get(_oid(message))
        if relation is not None:
            texts = _texts(message, relation, lsn)
            self._rows.append((texts.get("marker") or "", texts.get("name") or ""))


def _encoded(table: TableId) -> tuple[bytes, bytes]:
    schema = "" if table.schema == "pg_catalog" else table.schema  # as pgoutput has it
    return schema.encode(), table.name.encode()


def _oid(message: bytes) -> int:
    return int.from_bytes(message[1:_NAME])


def _texts(message: bytes, relation: Relation, lsn: int) -> Mapping[str, str | None]:
    """The columns of an INSERT. Raises ReplicationProblem if it doesn't fit the relation."""
    found, at = dict[str, str | None](), _TUPLE + 2
    fits = message[_TUPLE - 1] == NEW_ROW
    fits = fits and int.from_bytes(message[_TUPLE:at]) == len(relation.columns)
    for column in relation.columns if fits else ():
        kind, at = message[at : at + 1], at + 1
        if kind == bytes([TEXT]):
            size = int.from_bytes(message[at : at + 4])
            text, at = message[at + 4 : at + 4 + size], at + 4 + size
            found[column.name] = text[:_LONGEST].decode(errors="replace")
        elif kind in (bytes([NULL]), bytes([UNCHANGED])):
            found[column.name] = None
        else:
            fits = False
    if not fits or at != len(message):
        raise pgoutput.broken(f"a marker in {len(message)} bytes", lsn)
    return found
