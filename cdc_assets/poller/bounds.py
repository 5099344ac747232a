"""The rule: where each poll begins to read. Pure; the package argues why it is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Below every watermark: the whole table is read.
WHOLE = -(2**63)


@dataclass(frozen=True, slots=True)
class Running:
    """The transactions that are running: ids of sessions' own, and of prepared ones."""

    sessions: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()

    def __contains__(self, transaction: str) -> bool:
        return transaction in self.sessions or transaction in self.prepared

    @property
    def all(self) -> frozenset[str]:
        return self.sessions | self.prepared

    def left(self, now: Running) -> Running:
        """Those that may be running still, as ``now`` has it.

        A session may have prepared its transaction meanwhile: then that has another id.
        """
        prepared = now.prepared if self.sessions else self.prepared & now.prepared
        return Running(self.sessions & now.sessions, prepared)


@dataclass(frozen=True, slots=True)
class Known:
    """What the last poll of a table left: its bound, and since where the running ones may write."""

    last: int = WHOLE
    since: Mapping[str, int] = field(default_factory=dict)

    def begin(self, running: Running) -> int:
        """The least watermark that the next poll reads; ``running``: as it has noted."""
        return min([self.last, *(at for x, at in self.since.items() if x not in running)])

    def then(self, running: Running, bound: int) -> Known:
        """As the next poll leaves it, which noted ``bound`` and ``running``, once it is over."""
        # A prepared one may be any session's, whose id may be seen beside it for a moment.
        new = dict.fromkeys(running.sessions, self.last)
        new |= dict.fromkeys(running.prepared, self.safe)
        return Known(bound, {x: self.since.get(x, at) for x, at in new.items()})

    def lowered(self, to: int) -> Known:
        """As if nobody had written but at ``to`` or above: the clock was set back."""
        return Known(min(self.last, to), {x: min(at, to) for x, at in self.since.items()})

    @property
    def safe(self) -> int:
        """The bound from which whoever knows no running transaction has to read."""
        return min([self.last, *self.since.values()])
