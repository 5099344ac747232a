"""Timelines: how long two servers that come from the same cluster had the same WAL.

A server that is promoted leaves its timeline for one of its own, and its history says where: the
end of the last record that it had replayed. What committed below that it has, and nothing else of
the timeline that it left. Numbers of timelines don't tell servers apart, as each one counts on from
its own: only the places where they were left do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import replication_connect
from cdc_assets.postgres.slots import command


@dataclass(frozen=True, slots=True)
class History:
    """The timeline that a server is on; ``past``: those it came by, with where each was left."""

    timeline: int
    past: tuple[tuple[int, Lsn], ...] = ()

    def __str__(self) -> str:
        return " ".join([str(self.timeline), *(f"{number}:{left}" for number, left in self.past)])

    @classmethod
    def parse(cls, text: str) -> Self:
        timeline, *past = text.split()
        parts = (part.partition(":") for part in past)
        return cls(
            int(timeline), tuple((int(number), Lsn.parse(left)) for number, _, left in parts)
        )

    @classmethod
    def read(cls, dsn: str) -> Self:
        """Of a server, by a role that may replicate. Raises ReplicationLost or PreflightError."""
        connection = replication_connect(dsn, "cdc_assets timeline")
        try:
            timeline = int(command(connection, "IDENTIFY_SYSTEM").get_value(0, 1) or b"1")
            said = b""
            if timeline > 1:
                said = command(connection, f"TIMELINE_HISTORY {timeline}").get_value(0, 1) or b""
        finally:
            connection.close()
        return cls(timeline, _parsed(said))

    def left(self, timeline: int) -> Lsn | None:
        """Where it left one that it came by; None if it didn't come by it, or is on it."""
        return dict(self.past).get(timeline)


def parted(one: History, other: History) -> Lsn | None:
    """Up to where both have the same WAL; None if neither has left the other's timeline."""
    common = Lsn.ZERO
    ends = [*one.past, (one.timeline, None)], [*other.past, (other.timeline, None)]
    for (timeline, left), (others, others_left) in zip(*ends, strict=False):
        if timeline != others:
            return common
        if left != others_left:
            return min(lsn for lsn in (left, others_left) if lsn is not None)
        common = left or common
    return None


def _parsed(history: bytes) -> tuple[tuple[int, Lsn], ...]:
    """Of a history file, whose lines have a timeline, where it was left, and why."""
    lines = (line.split("\t") for line in history.decode(errors="replace").splitlines())
    return tuple(
        (int(parts[0]), Lsn.parse(parts[1]))
        for parts in lines
        if len(parts) >= 2 and parts[0].strip().isdigit()
    )
