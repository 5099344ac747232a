"""Undecoded changes: one buffer of their messages, with columns of what surrounds them.

They are cut and joined here, never read: cutting copies no message, joining copies each once.
Elsewhere: what is in a message (``rows``), which transaction is open (``decoder``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cdc_assets.flusher.decode.json_text import binary_array, parts_of
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.pgoutput import PADDING, Bytes, Ints

# Column values decoded at a time: the positions of each take about 100 bytes meanwhile.
CELLS_PER_BATCH = 100_000
# Bytes decoded at a time: a few times as much is copied; a larger row is a batch alone.
BYTES_PER_BATCH = 16 * 2**20

_PADDING = pgoutput.bytes_of(PADDING)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes in commit order: their messages and what surrounds them.

    ``message`` holds, back to back, what follows the relation's oid in each message; change i ends
    at ``stop[i]``. ``op``: the message's kind. ``about`` has a row for each of the five properties
    that are named below and a column for each change.
    """

    message: Bytes
    stop: Ints
    op: Bytes
    about: Ints

    @property
    def oid(self) -> Ints:
        """Of the relation."""
        return self._row(0)

    @property
    def lsn(self) -> Ints:
        """Of the change's own record."""
        return self._row(1)

    @property
    def commit_lsn(self) -> Ints:
        """Of its transaction's commit record, as its Begin said."""
        return self._row(2)

    @property
    def commit_time(self) -> Ints:
        """Microseconds since 2000, as its transaction's Begin said."""
        return self._row(3)

    @property
    def xid(self) -> Ints:
        return self._row(4)

    def _row(self, number: int) -> Ints:
        row: Ints = self.about[number]
        return row

    @property
    def nbytes(self) -> int:
        """The bytes of the messages; what surrounds a message takes as much as a small one."""
        return len(self.message)

    def part(self, low: int, high: int) -> Changes:
        """The changes ``low`` to ``high`` (excluded), without a copy of their messages."""
        begin = int(self.stop[low - 1]) if low else 0
        return Changes(
            self.message[begin : int(self.stop[high - 1])],
            self.stop[low:high] - begin,
            self.op[low:high],
            self.about[:, low:high],
        )

    def taken(self, order: Ints) -> Changes:
        """A copy of the changes with these numbers, in this order."""
        messages = binary_array(np.concatenate(([0], self.stop)), self.message)
        offsets, data = parts_of(messages.take(pa.array(order)))
        return Changes(data[: offsets[-1]], offsets[1:], self.op[order], self.about[:, order])


def by_relation(mixed: Sequence[Changes]) -> Iterator[tuple[int, Changes]]:
    """The changes of each relation, with its oid; those of one stay in order.

    They are parts of one copy of all: a copy for each of many relations would cost more.
    """
    if not mixed:
        return
    first = int(mixed[0].oid[0])
    if all(bool((changes.oid == first).all()) for changes in mixed):
        yield from ((first, changes) for changes in mixed)
        return
    whole = joined(mixed)
    del mixed  # of each message two copies are enough
    whole = whole.taken(np.argsort(whole.oid, kind="stable"))
    begins = [0, *(np.flatnonzero(np.diff(whole.oid)) + 1).tolist()]
    oids = whole.oid[begins].tolist()
    for oid, begin, end in zip(oids, begins, [*begins[1:], len(whole.stop)], strict=True):
        yield oid, whole.part(begin, end)


def batches(
    parts: Iterable[tuple[int, Changes]], columns: int
) -> Iterator[list[tuple[int, Changes]]]:
    """``parts``, all with so many columns, in order, as batches of bounded size to be decoded.

    Each piece of a part keeps the part's number.
    """
    most = max(1, CELLS_PER_BATCH // max(1, columns))
    batch: list[tuple[int, Changes]] = []
    rows = size = 0
    for owner, part in ((owner, piece) for owner, whole in parts for piece in _pieces(whole, most)):
        if batch and (rows + len(part.stop) > most or size + len(part.message) > BYTES_PER_BATCH):
            yield batch
            batch, rows, size = [], 0, 0
        batch.append((owner, part))
        rows += len(part.stop)
        size += len(part.message)
    if batch:
        yield batch


def _pieces(changes: Changes, rows: int) -> Iterator[Changes]:
    """``changes`` cut into pieces of at most so many rows and BYTES_PER_BATCH, or of one row."""
    low, count = 0, len(changes.stop)
    if count <= rows and len(changes.message) <= BYTES_PER_BATCH:
        yield changes
        return
    while low < count:
        begin = int(changes.stop[low - 1]) if low else 0
        fits = int(np.searchsorted(changes.stop, begin + BYTES_PER_BATCH, side="right"))
        high = min(max(fits, low + 1), low + rows, count)
        yield changes.part(low, high)
        low = high


def joined(parts: Sequence[Changes]) -> Changes:
    """All of them as one; its messages are followed by PADDING."""
    sizes = np.array([len(part.message) for part in parts])
    shift = np.cumsum(sizes) - sizes
    return Changes(
        message=np.concatenate([*(part.message for part in parts), _PADDING]),
        stop=np.concatenate([p.stop + s for p, s in zip(parts, shift.tolist(), strict=True)]),
        op=np.concatenate([part.op for part in parts]),
        about=np.concatenate([part.about for part in parts], axis=1),
    )
