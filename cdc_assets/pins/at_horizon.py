"""Tables whose log is whole from a proven horizon on.

All transactions that had written when a table was published have ended by then: the changes that
they made before aren't streamed. The tables that wait share one candidate at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import SlotBusy
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.pins.taking import Seen, look_at
from cdc_assets.postgres.horizon import Horizon
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.waits import writers
from cdc_assets.postgres.slots import SLOT_PATIENCE_SECONDS

# A table that can't begin for longer than this says why.
_NOTED_SECONDS = 4.0


class _Candidate(NamedTuple):
    """A horizon, with the tables that may begin at it, and what they were like before it."""

    horizon: Horizon
    tables: Mapping[TableId, tuple[object, ...]]
    seen: Seen
    since: float
    told: frozenset[TableId] = frozenset()
    """Those whose rows say who holds them up."""


class Proven(NamedTuple):
    """A proven horizon, the tables that may begin there, and what they were like before it."""

    lsn: Lsn
    tables: list[TableRow]
    seen: Seen


class AtHorizon:
    """The candidate of one source; ``held_up``: why a table waits for too long, once it does."""

    def __init__(self) -> None:
        self._candidate: _Candidate | None = None
        self.held_up: SlotBusy | None = None

    @property
    def told(self) -> frozenset[TableId]:
        """The tables whose rows say what they wait for."""
        return self._candidate.told if self._candidate is not None else frozenset()

    def forget(self) -> None:
        self._candidate = None

    def proven(
        self, source: Connection, config: SourceConfig, store: LogStore, tables: list[TableRow]
    ) -> Proven | None:
        """The horizon that ``tables`` may begin at, some or all; None: it isn't proven yet.

        A table that came, was altered, or was published anew meanwhile begins with a new candidate:
        the log would have its changes as of before, or not at all.
        """
        self.held_up = None
        if not tables:
            self._candidate = None
            return None
        described = {
            row.table: (row.epoch, row.oid, row.columns, row.key_columns, row.masks, row.excluded)
            for row in tables
        }
        if self._candidate is None:
            seen = look_at(source, config, tables)
            self._candidate = _Candidate(Horizon.observe(source), described, seen, time.monotonic())
        horizon, before, seen, since, told = self._candidate
        among = {table: then for table, then in before.items() if described.get(table) == then}
        self._candidate = _Candidate(horizon, among, seen, since, told) if among else None
        if not among:
            return None
        if horizon.is_proven(source):
            self._candidate = None
            return Proven(horizon.lsn, [row for row in tables if row.table in among], seen)
        if (waited := time.monotonic() - since) > _NOTED_SECONDS:
            oldest = f"The oldest: {'; '.join(writers(source))}."
            for table in among.keys() - told:
                why = f"it waits for transactions that had written before it. {oldest}"
                store.note_waiting(table, why)
            self._candidate = _Candidate(horizon, among, seen, since, frozenset(among))
            if waited > SLOT_PATIENCE_SECONDS:
                names = ", ".join(sorted(map(str, among)))
                self.held_up = SlotBusy(
                    f"for {waited:.0f} s transactions that had written by then keep from copying"
                    f" {names}. {oldest}",
                    "End them, or wait: their copies begin by themselves.",
                )
        return None
