"""The horizons of a backfill: the last one that is proven, and the next one.

In query mode the log has rows as polls read them, with LSNs of after they were read. What has a
lower LSN than the present one was read by an earlier snapshot than any to come, whatever committed
when: so that is a horizon at once, and no transaction that lasts holds it up.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

from cdc_assets.poller.source import position
from cdc_assets.postgres.horizon import Horizon
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection


class Proven(NamedTuple):
    """An LSN below which every commit is visible to whoever looks from now on.

    ``offset``: whatever the log has before it had committed below the LSN.
    """

    lsn: Lsn
    offset: int


class Horizons:
    """Of all readers of a backfill. ``offset``: how far the log is applied, see :meth:`reached`.

    ``of_commits``: whether the log is; else it is of polls.
    """

    def __init__(self, offset: int, *, of_commits: bool = True) -> None:
        self._offset = offset
        self._of_commits = of_commits
        self._candidate: tuple[Horizon, int] | None = None
        self._proven: Proven | None = None
        self._lock = Lock()

    def reached(self, offset: int) -> None:
        """The log is applied that far by now, and so had committed before what is observed next."""
        with self._lock:
            self._offset = offset

    def latest(self, source: Connection) -> Proven | None:
        """The last one that is proven by now; None if none is. One at a time is observed."""
        with self._lock:
            if not self._of_commits:
                offset = self._offset  # before the look
                self._proven = Proven(position(source), offset)
                return self._proven
            if self._candidate is not None and self._candidate[0].is_proven(source):
                horizon, offset = self._candidate
                self._proven, self._candidate = Proven(horizon.lsn, offset), None
            if self._candidate is None:
                offset = self._offset  # before the observation
                self._candidate = Horizon.observe(source), offset
            return self._proven

    def cover(self, source: Connection, offset: int) -> bool:
        """Whether the last one that is proven is above all that the log has before ``offset``."""
        found = self.latest(source)
        return found is not None and found.offset >= offset

    def proven(self, source: Connection) -> Proven:
        """:meth:`latest`, of which a backfill waits for the first before it reads anything."""
        found = self.latest(source)
        assert found is not None
        return found
