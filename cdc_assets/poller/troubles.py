"""Tables that couldn't be read: why, and when each is tried again.

Whatever keeps one from being read (a lock, a right, a function of a view, another server that is
down) is its own. The others are polled as before, and it is tried again by itself, ever later: a
table whose rows take longer than a statement may would otherwise be read again all the time.

Those that are known are asked in polls of their own, after the others; and a poll ends with a
failure that took long: the tables of a server that hangs don't make the others wait for each of
them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import psycopg

from cdc_assets.errors import first_line
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.process.backoff import Backoff

# A failure that takes this long ends the poll.
LONG_SECONDS = 5.0
_BACKOFF = Backoff(first_seconds=1.0, cap_seconds=60.0)


class Unread(Exception):
    """Why a table can't be read now, in words of ours."""


@dataclass(frozen=True, slots=True)
class _Trouble:
    """``failures``: in a row; ``again_at``: monotonic."""

    reason: str
    failures: int
    again_at: float


class Troubles:
    """Of the tables of one source."""

    def __init__(self) -> None:
        self._known = dict[TableId, _Trouble]()

    def note(
        self, source: Connection, table: TableId, error: psycopg.Error | Unread, seconds: float
    ) -> str:
        """Note why it couldn't be read in ``seconds``; raise the error if the session is lost."""
        if source.closed:
            raise error
        reason = str(error) if isinstance(error, Unread) else first_line(error)
        before = self._known.get(table)
        failures = before.failures + 1 if before else 1
        # Half of the time at most goes into what doesn't work.
        wait = max(_BACKOFF.delay_seconds(failures), seconds)
        self._known[table] = _Trouble(reason, failures, time.monotonic() + wait)
        return reason

    def over(self, tables: Collection[TableId]) -> None:
        """They were read."""
        for table in tables:
            self._known.pop(table, None)

    def keep(self, tables: Collection[TableId]) -> None:
        """The source has no others any more."""
        self._known = {table: one for table, one in self._known.items() if table in tables}

    @property
    def known(self) -> Mapping[TableId, str]:
        """Why tables couldn't be read."""
        return {table: one.reason for table, one in self._known.items()}

    @property
    def resting(self) -> Mapping[TableId, str]:
        """Why tables can't be read whose next try isn't due."""
        now = time.monotonic()
        return {table: one.reason for table, one in self._known.items() if one.again_at > now}

    @property
    def due(self) -> Sequence[TableId]:
        """Those whose next try is due, the one that has waited longest first."""
        resting = self.resting
        since = {table: one.again_at for table, one in self._known.items() if table not in resting}
        return sorted(since, key=since.__getitem__)

    @property
    def again_at(self) -> float:
        """When the next try is due (monotonic); infinity without any."""
        return min((one.again_at for one in self._known.values()), default=float("inf"))
