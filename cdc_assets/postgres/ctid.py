"""Cutting a table into ranges of physical pages, and the partition keys that name them.

A row's ctid is (page, line). ``where ctid >= '(a,0)' and ctid < '(b,0)'`` is a TID range scan since
Postgres 14: it reads exactly those pages. Under one exported snapshot the ranges are disjoint and
together hold every visible row, because a row version doesn't move and the last range is open: a
table that grows while it is planned loses nothing. The plan is frozen; there is no I/O here.

The rows of a partitioned table are in its leaves, so each leaf is cut by itself, and its oid is
part of the key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

# This many chunks cost Dagster about 2,000 * 44 ms = 90 s of events on SQLite; more would be felt.
MAX_CHUNKS = 2000
# The first server version with TID range scans; an older one reads the whole table for a range.
TID_RANGE_SCANS = 140000
# With TOAST, a chunk has so many times the pages of its heap at most.
_TOASTED = 4
_KEY = re.compile(r"\A(\d{4,}):(?:(\d{10})\.)?(\d{10})-(\d{10}|end)\Z")


@dataclass(frozen=True, slots=True, order=True)
class CtidRange:
    """The pages ``first_block`` (included) to ``end_block`` (excluded; None: to the end).

    ``leaf`` is the oid of the partition that they belong to, 0 for a table without partitions.
    """

    first_block: int
    end_block: int | None
    leaf: int = 0

    @property
    def predicate(self) -> str:
        """The range as a SQL condition on ``ctid``."""
        low = f"ctid >= '({self.first_block},0)'::tid"
        return low if self.end_block is None else f"{low} and ctid < '({self.end_block},0)'::tid"

    def key(self, epoch: int) -> str:
        """The partition key: epoch, leaf, first block, end block; text order is block order."""
        end = "end" if self.end_block is None else f"{self.end_block:010d}"
        leaf = f"{self.leaf:010d}." if self.leaf else ""
        return f"{epoch:04d}:{leaf}{self.first_block:010d}-{end}"

    @classmethod
    def parse(cls, key: str) -> tuple[int, Self]:
        """``(epoch, range)`` of a partition key; raises ValueError for anything else."""
        match = _KEY.match(key)
        if match is None:
            raise ValueError(f"{key!r} is not a chunk; one looks like 0001:0000000000-0000002048")
        end = None if match[4] == "end" else int(match[4])
        return int(match[1]), cls(int(match[3]), end, int(match[2] or 0))


def plan_chunks(pages: int, chunk_pages: int, *, leaf: int = 0) -> list[CtidRange]:
    """Ranges of ``chunk_pages`` pages, grown so that there are at most MAX_CHUNKS.

    An empty table has one chunk. Every table's last chunk is open-ended.
    """
    step = max(chunk_pages, -(-pages // MAX_CHUNKS))
    starts = list(range(0, max(pages, 1), step))
    ends: list[int | None] = [*starts[1:], None]
    return [CtidRange(first, end, leaf) for first, end in zip(starts, ends, strict=True)]


def heap_pages(chunk_pages: int, pages: int, toast_pages: int) -> int:
    """How many of a table's ``pages`` a chunk has: fewer where most of its bytes are in TOAST.

    Else one page may stand for gigabytes, and one chunk for a whole table.
    """
    fitting = _TOASTED * chunk_pages * pages // max(1, pages + toast_pages)
    return max(1, min(chunk_pages, fitting))
