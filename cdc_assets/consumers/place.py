"""Where one process is in the log of one of its tables."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from cdc_assets.consumers.events import Event
from cdc_assets.consumers.rows import Shape
from cdc_assets.log.groups.cursors import GroupCursor, Held
from cdc_assets.log.relation import Told
from cdc_assets.postgres.names import TableId

# To look again whether a table can go on loads its lake table, or reads a staged file.
WAIT_SECONDS = 5.0


@dataclass(slots=True)
class Place:
    """A table that this process has claimed. ``cursor`` is the group's, ``offset`` this process's.

    ``copy``: whose rows and changes are given, None before the first event. ``reading``: within a
    snapshot. ``dirty``: some event of it isn't committed. ``least``: the lake table has to hold the
    log up to there to have the columns that the program was told of last. ``waits``: why nothing
    is given, None if something may be. ``why`` it begins anew; and it is tried ``not_before``.
    """

    table: TableId
    held: Held
    cursor: GroupCursor | None
    copy: str | None = None
    offset: int = 0
    token: str = ""
    reading: bool = False
    dirty: bool = False
    least: int = 0
    told: Told | None = None
    shape: Shape | None = None
    events: Iterator[Event] | None = None
    waits: str | None = None
    why: str | None = None
    not_before: float = 0.0

    def begin(self, copy: str, offset: int, *, reading: bool) -> None:
        """Go on from ``offset`` of a copy's log, or with the snapshot that is the table there.

        Each reading of a snapshot has a token of its own: who was taken for dead within one can't
        write to what the next one has begun.
        """
        self.copy, self.offset, self.reading = copy, offset, reading
        self.token = f"{copy}:{f'snapshot-{uuid.uuid4()}' if reading else offset}"
        self.told = self.shape = self.waits = self.why = None

    def wait(self, why: str) -> None:
        self.waits, self.not_before = why, time.monotonic() + WAIT_SECONDS

    def reached(self, offset: int) -> None:
        assert self.copy is not None  # it has begun
        self.offset, self.token = offset, f"{self.copy}:{offset}"

    def forget(self) -> None:
        """Begin anew, the next time."""
        self.copy, self.reading, self.dirty = None, False, False


def offset_of(text: str | None, copy: str) -> int | None:
    """The offset of a token of that copy; None if it is another one's, or within a snapshot."""
    of, _, offset = (text or "").rpartition(":")
    return int(offset) if of == copy and offset.isascii() and offset.isdigit() else None
