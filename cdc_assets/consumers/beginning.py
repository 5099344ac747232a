"""How a table begins, or goes on where the group, or the program's own token, is.

A snapshot is chosen while the group's claim, or its cursor, holds the log from there on; only then
the cursor is set (see ``stream``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from cdc_assets.config.groups.consumers import ConsumerConfig
from cdc_assets.consumers.events import Begin, Event, SnapshotEnd, SnapshotRows
from cdc_assets.consumers.place import Place, offset_of
from cdc_assets.consumers.rows import shape_of
from cdc_assets.consumers.snapshot import choose
from cdc_assets.errors import first_line
from cdc_assets.lake.standing import log_from
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.groups.cursors import NO_SNAPSHOT, GroupCursor, copy_name
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn

logger = logging.getLogger(__name__)

# Of a group that begins anew, and may begin anywhere: all of the log is held.
NOWHERE = GroupCursor(0, None)
_NEW, _ANEW, _WANTED, _HALF, _OTHER = (
    "the group is new",
    "the table was copied anew",
    "the program wanted it",
    "its beginning wasn't committed",
    "the program has no token of this copy that the log still goes on from",
)


def _begins_anew(cursor: GroupCursor | None, copy: str) -> str | None:
    """Why a group with that cursor begins that copy; None if it goes on."""
    if cursor is None:
        return _NEW
    if cursor.copy != copy:
        return _WANTED if cursor.copy is None else _ANEW
    return None if cursor.snapshot_id is None else _HALF


class Beginning:
    """``move`` sets the group's cursor, ``act`` makes an event at a place's offset."""

    def __init__(
        self,
        pipeline: Pipeline,
        group: ConsumerConfig,
        token: Callable[[str], str | None] | None,
        move: Callable[[Place, GroupCursor], None],
        act: Callable[..., Event],
    ) -> None:
        self._pipeline, self._group, self._token = pipeline, group, token
        self._store, self._move, self._act = pipeline.store, move, act

    def events(self, place: Place, row: TableRow, copy: str) -> Iterator[Event]:
        """The events up to the first change of that copy; ``place.copy`` is None if it waits."""
        if (why := place.why or self._resume(place, copy)) is not None:
            place.why = why
            begin = self._snapshot if self._group.start == "snapshot" else self._now
            yield from begin(place, row, copy, why)

    def _resume(self, place: Place, copy: str) -> str | None:
        """Go on where the group, or the program's token, is; or why the table begins anew."""
        cursor, why = place.cursor, _begins_anew(place.cursor, copy)
        if self._token is not None:
            place.token = self._token(str(place.table)) or ""
        if why == _WANTED:
            return why
        if self._token is not None:
            if (offset := offset_of(place.token, copy)) is None:
                return why or _OTHER
            # Held first, and looked for then.
            self._move(place, GroupCursor(offset, copy))
            if log_from(self._store, place.table, offset)[1] is not None:
                return _OTHER
        elif cursor is None or why is not None:
            return why
        else:
            offset = cursor.offset
        place.begin(copy, offset, reading=False)
        return None

    def _snapshot(self, place: Place, row: TableRow, copy: str, why: str) -> Iterator[Event]:
        least = place.cursor.offset if place.cursor is not None and why == _WANTED else 0
        chosen = choose(self._pipeline, row.table, least)
        if not isinstance(chosen, str) and chosen.offset < (place.cursor or NOWHERE).offset:
            # The group doesn't hold the log from there on: now it does, and the lake moved on.
            self._move(place, NOWHERE)
            chosen = choose(self._pipeline, row.table, least)
        if isinstance(chosen, str):
            place.wait(chosen)
            return
        now = chosen.lake.row
        if now.snapshot_lsn is None or copy_name(now.epoch, now.snapshot_lsn) != copy:
            return
        self._move(place, GroupCursor(chosen.offset, copy, chosen.snapshot_id))
        before, shape = place.token, shape_of(chosen.lake)
        place.begin(copy, chosen.offset, reading=True)
        act: dict[str, Any] = {"table": str(place.table), "_commit": lambda: None}
        yield Begin(
            token=place.token,
            since=before,
            why=why,
            snapshot=True,
            lsn=chosen.lsn,
            schema=shape.schema,
            key=shape.key_names,
            **act,
        )
        try:
            for rows in chosen.rows():
                yield SnapshotRows(token=place.token, since=place.token, rows=rows, **act)
        except FileNotFoundError as error:
            logger.warning(
                "%s: its snapshot is gone, and is begun anew: %s", place.table, first_line(error)
            )
            place.forget()
            place.cursor = GroupCursor(chosen.offset, copy, chosen.snapshot_id)
            return
        before, place.shape = place.token, shape
        place.reading = False
        place.reached(chosen.offset)
        yield self._act(place, SnapshotEnd, since=before, lsn=chosen.lsn)

    def _now(self, place: Place, row: TableRow, copy: str, why: str) -> Iterator[Event]:
        """``start: now``: what committed after this moment; after a copy, after that one's pin."""
        store = self._store
        offset, lsn = store.log_end(row.table), store.flushed_lsn() or Lsn.ZERO
        if why == _ANEW and place.cursor is not None and row.snapshot_lsn is not None:
            first = store.first_cursor(row).offset
            offset, lsn = max(first, place.cursor.offset), row.snapshot_lsn
        elif why == _HALF and place.cursor is not None:  # its changes from there on are held
            offset = place.cursor.offset
        self._move(place, GroupCursor(offset, copy, NO_SNAPSHOT))
        before = place.token
        place.begin(copy, offset, reading=False)
        shape = shape_of(
            LakeTable(self._pipeline.config, self._pipeline.config.table(row.table), row)
        )
        yield self._act(
            place,
            Begin,
            since=before,
            why=why,
            snapshot=False,
            lsn=lsn,
            schema=shape.schema,
            key=shape.key_names,
        )
