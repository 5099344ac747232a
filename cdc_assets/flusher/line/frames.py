"""The frames that a look at the line brings, and where they are in a buffer of CopyData messages.

A message is its kind, a length that counts itself in four bytes, and the body. A server that
streams sends CopyData (``d``) whose body begins with ``w`` or ``k``, one after the other. Bytes
that look like such a beginning are found by columns; they are believed as far as each message ends
where the next one begins, from the buffer's own beginning on. What follows is walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.pgoutput import KEEPALIVE, KEEPALIVE_BYTES, XLOG_DATA, Bytes, Ints, be32
from cdc_assets.postgres.session.messages import COPY_DATA, PREFIX

# Kind and length.
PREFIX_BYTES: Final = PREFIX.size
# Bytes searched at a time: the masks of a piece fit the CPU's caches.
_PIECE_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Received:
    """Whole frames: ``blob`` has each behind ``gap`` other bytes, ``lengths`` are their sizes."""

    blob: bytes | memoryview
    lengths: npt.NDArray[np.int32]
    gap: int = 0

    @classmethod
    def of(cls, frames: Sequence[bytes | memoryview]) -> Self:
        """``frames`` joined; one alone isn't copied."""
        lengths = np.fromiter(map(len, frames), np.int32, len(frames))
        return cls(frames[0] if len(frames) == 1 else b"".join(frames), lengths)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The frames of ``parts``, which have one gap, in order."""
        if len(parts) == 1:
            return parts[0]
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(b"".join(part.blob for part in parts), lengths, parts[0].gap)

    @property
    def frames(self) -> list[memoryview]:
        stops = self._stops()
        starts = stops - self.lengths
        blob = memoryview(self.blob)
        return [blob[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    @property
    def lsn(self) -> Lsn:
        """Where the last frame's record begins; of a keepalive, the end of the WAL."""
        start = len(self.blob) - int(self.lengths[-1])
        return Lsn(int.from_bytes(self.blob[start + 1 : start + 9]))

    @property
    def reply_wanted(self) -> bool:
        """Whether a keepalive asks for feedback."""
        stops = self._stops()[self.lengths == KEEPALIVE_BYTES]
        return any(self.blob[stop - 1] for stop in stops.tolist())

    def _stops(self) -> Ints:
        return np.cumsum(self.lengths + self.gap, dtype=np.int64)


def frames(data: Bytes) -> Ints:
    """Where each of the whole frames ends that lie back to back from the beginning of ``data`` on.

    A frame of 16 MB or more, or one behind bytes in a frame that look like another, isn't found.
    """
    begin = _candidates(data)
    if len(begin) == 0 or begin[0] != 0:
        return begin[:0]
    end = begin + 1 + be32(data)[begin + 1].astype(np.int64)
    follows = end[:-1] == begin[1:]
    if not bool(follows.all()):
        end = end[: int(np.argmin(follows)) + 1]
    return end if end[-1] <= len(data) else end[:-1]


def _candidates(data: Bytes) -> Ints:
    found = [np.empty(0, np.int64)]
    last = len(data) - PREFIX_BYTES
    for low in range(0, last, _PIECE_BYTES):
        high = min(low + _PIECE_BYTES, last)
        mask = data[low:high] == COPY_DATA
        mask &= data[low + 1 : high + 1] == 0  # of the length: no text has a zero byte
        found.append(np.flatnonzero(mask) + low)
    at = np.concatenate(found)
    kind = data[at + PREFIX_BYTES]
    begin: Ints = at[((kind == XLOG_DATA) | (kind == KEEPALIVE)) & (be32(data)[at + 1] >= 4)]
    return begin
