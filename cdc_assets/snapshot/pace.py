"""How many pages a short transaction reads, so that it lasts about as long as it may."""

from __future__ import annotations

from collections.abc import Iterator

from cdc_assets.postgres.ctid import CtidRange

# 2 MB.
_FIRST = 256
# A part has so many times the pages of the one before it at most: rows differ.
_GROWTH = 4


class Pace:
    """``seconds``: how long a transaction may last. What is learned counts for further chunks."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pages = _FIRST

    def parts(self, chunk: CtidRange, pages: int) -> Iterator[CtidRange]:
        """Parts of a chunk, in order; each is as large as :meth:`took` has it by then.

        ``pages``: how many the heap has by now. The last part of an open-ended chunk is open-ended.
        """
        first, end = chunk.first_block, pages if chunk.end_block is None else chunk.end_block
        while (behind := first + self._pages) < end:
            yield CtidRange(first, behind, chunk.leaf)
            first = behind
        yield CtidRange(first, chunk.end_block, chunk.leaf)

    def took(self, seconds: float, pages: int) -> None:
        """Say how long so many pages took: fewer than a part may have, at the end of a chunk."""
        fitting = max(1, pages) * self._seconds / max(seconds, 1e-9)
        self._pages = max(1, int(min(fitting, _GROWTH * self._pages)))
