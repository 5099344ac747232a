"""What was done to a source's lake tables, told as materializations: a table once a minute at most.

Merges come every few seconds, so what they did is summed up. A table of another worker, which may
not be known to Dagster, is reported by where its log is applied up to; one that doesn't move isn't
reported, or it would look fresh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.dagster.metadata import (
    DATA_VERSION_TAG,
    data_version,
    drained_metadata,
    table_metadata,
)
from cdc_assets.dagster.names import TableAssets
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.cursors import Backlog, Cursor
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.materializer.drain import Drained
from cdc_assets.postgres.names import TableId

# Once a minute is as often as anybody looks.
REPORT_SECONDS = 60.0
# Until an idle table is proven to be level, and the tick that says so.
_PROOF_SECONDS = 30.0


def heartbeat_seconds(table: TableConfig) -> float:
    """How often an idle table is reported as fresh: twice in its warning window, and a bit."""
    warn = table.freshness.warn.total_seconds()
    return max(warn / 2 - _PROOF_SECONDS, warn / 3)


def report_seconds(table: TableConfig) -> float:
    """How often a table that changes is reported: once a minute at most."""
    return min(REPORT_SECONDS, heartbeat_seconds(table))


class Reports:
    """The reports of one worker; ``log`` takes an event, ``store`` may be replaced by a new one."""

    def __init__(
        self,
        config: SourceConfig,
        store: LogStore,
        tables: Sequence[TableAssets],
        log: Callable[[dg.AssetMaterialization], None],
    ) -> None:
        self.store = store
        self._config = config
        self._tables = {names.table: names for names in tables}
        self._log = log
        self._began = time.monotonic()
        self._sums: dict[TableId, Drained] = {}
        self._at: dict[TableId, float] = {}
        self._others: dict[TableId, int] = {}

    def add(self, drained: Drained) -> None:
        """A turn's merges."""
        self._sums[drained.table] = added(self._sums.get(drained.table), drained)

    def introduce(self, table: TableId) -> None:
        """Report a table's present state: just copied, or merged by somebody else.

        Raises TableProblem.
        """
        row = self.store.table(table)
        if row is None or row.snapshot_lsn is None:
            return
        # Before the lake is looked at, which has no less. None: nothing was applied to the copy.
        at = self.store.cursor(table) or Cursor(0, row.snapshot_lsn)
        state = LakeTable(self._config, self._config.table(table), row).state()
        if state.snapshot_id is not None:
            self.add(Drained(table, 0, 0, 0, 0, 0, 0, at, state.total_rows, 0.0))
            self.tell(table)

    def of_other(self, table: TableId, offset: int, *, at_once: bool = False) -> bool:
        """Report a table of another worker that has moved to ``offset``; whether it was due.

        Raises TableProblem.
        """
        moved = offset > self._others.setdefault(table, offset)
        if not at_once and not (moved and self._is_due(table)):
            return False
        self._at[table] = time.monotonic()  # also if it can't be told: it is due again later
        self.introduce(table)
        self._others[table] = max(offset, self._others[table])
        return True

    def tell_due(self, *, at_once: bool = False) -> None:
        """Report the tables whose last report is long enough ago, or all that changed since.

        An error of one of them is raised once the others are told.
        """
        first: Exception | None = None
        due = [table for table in self._sums if at_once or self._is_due(table)]
        backlogs = self._backlogs() if due else {}
        for table in due:
            try:
                self.tell(table, backlogs)
            except Exception as error:  # noqa: BLE001 - one table's: the others are told
                first = first or error
        if first is not None:
            raise first

    def tell(self, table: TableId, backlogs: Mapping[TableId, Backlog] | None = None) -> None:
        """Report what was done to ``table``; what the log doesn't take is told with the next."""
        self._at[table] = time.monotonic()
        row = self.store.table(table)
        # Else it was dropped, or is copied anew: what was done to the table of before is past.
        if row is not None and row.state == TableState.STREAMING:
            lake, tags = self._tables[table].lake, {DATA_VERSION_TAG: self._version(row)}
            metadata = self._metadata(row, self._backlogs() if backlogs is None else backlogs)
            self._log(dg.AssetMaterialization(lake, tags=tags, metadata=metadata))
            self._others[table] = self._sums[table].cursor.offset  # whoever goes on from there
        del self._sums[table]

    def rest(self) -> Iterator[dg.MaterializeResult[None]]:
        """What wasn't told yet, as the results of a step."""
        backlogs = self._backlogs()
        for table in list(self._sums):
            row = self.store.table(table)
            assert row is not None  # it has just been drained
            yield dg.MaterializeResult(
                asset_key=self._tables[table].lake,
                metadata=self._metadata(row, backlogs),
                data_version=dg.DataVersion(self._version(row)),
            )
            del self._sums[table]

    def _is_due(self, table: TableId) -> bool:
        since = time.monotonic() - self._at.get(table, self._began)
        return since >= report_seconds(self._config.table(table))

    def _version(self, row: TableRow) -> str:
        return data_version(row.epoch, self._sums[row.table].cursor.offset)

    def _backlogs(self) -> Mapping[TableId, Backlog]:
        return {backlog.table: backlog for backlog in self.store.backlogs()}

    def _metadata(self, row: TableRow, backlogs: Mapping[TableId, Backlog]) -> dict[str, Any]:
        table = row.table
        drained, names = self._sums[table], self._tables[table]
        lake = LakeTable(self._config, self._config.table(table), row)
        backlog = backlogs.get(table)
        oldest = backlog.oldest_commit if backlog is not None else None
        lag = 0.0 if oldest is None else (self.store.server_now() - oldest).total_seconds()
        return {**table_metadata(lake, names, drained.rows), **drained_metadata(drained, lag)}


def added(before: Drained | None, now: Drained) -> Drained:
    """The sum of two drains of one table; its position is the later one's."""
    if before is None:
        return now
    return replace(
        now,
        merges=before.merges + now.merges,
        changes=before.changes + now.changes,
        upserted=before.upserted + now.upserted,
        deleted=before.deleted + now.deleted,
        repaired=before.repaired + now.repaired,
        seconds=before.seconds + now.seconds,
    )
