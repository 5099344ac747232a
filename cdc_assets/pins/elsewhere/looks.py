"""How often tables that wait for a server they can be copied from are looked at.

They may wait for days, for a person's dump. A look describes all of them at the source, and writes
down what it found: of 500 tables it takes a second, and 1,500 statements there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId

# A look takes sessions there, and at the source.
_SECONDS = 5.0
# How many times as long as the look itself nobody looks, at least.
_REST = 19


class Looks:
    """When to look again, and why the tables couldn't be copied at the last look."""

    def __init__(self) -> None:
        self.refused: Mapping[TableId, Finding] = {}
        self._began_at = self._again_at = 0.0

    def wanted(self, waiting: Iterable[TableRow]) -> bool:
        """Whether one of the tables waits for something else, or it is time to look again."""
        self._began_at = time.monotonic()
        return any(
            self.due() or row.table not in self.refused or not has_begun(row) for row in waiting
        )

    def due(self) -> bool:
        return time.monotonic() >= self._again_at

    def found(self, refused: Mapping[TableId, Finding]) -> None:
        """It is over, and these tables wait on."""
        self.refused, now = refused, time.monotonic()
        self._again_at = now + max(_SECONDS, _REST * (now - self._began_at)) * bool(refused)


def has_begun(row: TableRow) -> bool:
    """Whether the table's log has its beginning, so that it waits for nothing but the server."""
    return row.log_from is not None or row.snapshot_lsn is not None
