"""The tables that a worker gives away and takes: fair shares without a leader.

Every worker decides for itself from all workers' shares, again and again. It gives a table away if
another worker that wants it has at least two fewer; it takes a free one unless another worker that
wants it has fewer. Tables with a long backlog are counted separately and first, so that they are
spread, too. In whatever order workers decide, even several at once from the same view, the shares
converge, and differ by one at most.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cdc_assets.postgres.names import TableId


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker: the tables it wants, and those it has."""

    wants: frozenset[TableId]
    has: frozenset[TableId]


@dataclass(frozen=True, slots=True)
class Moves:
    """The tables that a worker gives and takes to come nearer to its share."""

    give: tuple[TableId, ...]
    take: tuple[TableId, ...]


def moves(
    me: Peer,
    others: Sequence[Peer],
    heavy: Collection[TableId] = (),
    stray: Collection[TableId] = (),
) -> Moves:
    """The tables to be given and taken now.

    A wanted table that no worker has is free. ``heavy``: tables with a long backlog. ``stray``:
    tables that were free for so long that the workers that should take them must be held up.
    """
    given = list[TableId]()
    counts = [_Counts(peer, heavy) for peer in others]
    mine = _Counts(me, heavy)
    # Heavy ones first; any others will do, but in a fixed order, so that few of them move.
    for table in sorted(me.has, key=lambda t: (t not in heavy, t)):
        of = table in heavy
        wanting = [c for c in counts if table in c.wants]
        poorest = min(wanting, key=lambda c: c.number(of), default=None)
        unwanted = table not in me.wants
        if unwanted or (poorest is not None and poorest.number(of) <= mine.number(of) - 2):
            given.append(table)
            mine.add(table, -1)
            if poorest is not None:
                poorest.add(table, 1)
    mine = _Counts(Peer(me.wants, me.has - set(given)), heavy)
    counts = [_Counts(peer, heavy) for peer in others]
    held = frozenset[TableId]().union(*(peer.has for peer in others)) | me.has
    taken = []
    for table in sorted(me.wants - held, key=lambda t: (t not in heavy, t)):
        of = table in heavy
        fewest = all(mine.number(of) <= c.number(of) for c in counts if table in c.wants)
        if fewest or table in stray:
            taken.append(table)
            mine.add(table, 1)
    return Moves(tuple(given), tuple(taken))


class _Counts:
    """How many tables a worker has, of the heavy ones and of all."""

    def __init__(self, peer: Peer, heavy: Collection[TableId]) -> None:
        self.wants = peer.wants
        self._heavy = heavy
        self._number = {True: sum(t in heavy for t in peer.has), False: len(peer.has)}

    def number(self, heavy: bool) -> int:
        return self._number[heavy]

    def add(self, table: TableId, number: int) -> None:
        self._number[False] += number
        if table in self._heavy:
            self._number[True] += number
