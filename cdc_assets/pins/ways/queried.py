"""Tables whose changes are found by queries: a copy's snapshot, and the bound that polls begin at.

The bound is noted first, then the transactions that are running, and only once all of these have
ended is the snapshot taken. So whatever the snapshot doesn't show was written by a transaction that
began after the bound was noted, and has no watermark below it (``poller``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.staged.watermarks import ReadAt, Watermark, set_watermarks, watermarks
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.poller.bounds import Running
from cdc_assets.poller.source import POLLS, bound, place, rule, running, watermark
from cdc_assets.poller.troubles import Troubles
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.source.now import followed

# A table that can't begin for longer than this says why.
_NOTED_SECONDS = 4.0
_PIDS = """
select distinct pid from pg_catalog.pg_locks
 where locktype = 'virtualxid' and virtualxid = any(%s) and pid is not null order by pid
"""


class _Candidate(NamedTuple):
    """The bounds of tables' copies (by their epochs), and who was running then."""

    bounds: Mapping[tuple[TableId, int], Watermark]
    running: Running
    since: float


class Pinnable(NamedTuple):
    """Tables that may be pinned by a snapshot of from now on. ``point``: of their copies."""

    point: Lsn
    tables: list[TableRow]


def begin_queries(source: Connection, config: SourceConfig, store: LogStore) -> None:
    """Give the log its beginning; copies that no bound was noted before are made anew."""
    if config.query is None:
        return
    at, read = place(source), ReadAt.last(store)
    if read is not None and at.lsn < read.lsn and not followed(store):
        store.begin_anew()  # its positions are of a server that was ahead of this one
    known = watermarks(store)
    for row in store.tables():
        mark = known.get(row.table)
        if row.snapshot_lsn is not None and (mark is None or mark.epoch != row.epoch):
            restart_copy(store, row)
    if store.flushed_lsn() is None:
        store.begin_at(at.lsn)


class Queried:
    """The candidate of one source: all tables that wait share one at a time."""

    def __init__(self) -> None:
        self._candidate: _Candidate | None = None
        self._troubles = Troubles()

    def pinnable(
        self, source: Connection, config: SourceConfig, store: LogStore, waiting: list[TableRow]
    ) -> Pinnable:
        """Those of ``waiting`` whose bounds are recorded by now.

        A copy that goes on under another snapshot has one already: what changed since its first
        snapshot is in the log.
        """
        go_on = [row for row in waiting if row.snapshot_lsn is not None]
        fresh = {(row.table, row.epoch): row for row in waiting if row.snapshot_lsn is None}
        if self._candidate is None and fresh:
            self._candidate = self._noted(source, config, store, [*fresh.values()])
        if self._candidate is not None:
            bounds, before, since = self._candidate
            left = before.left(running(source, place(source)))
            if left.all:
                self._candidate = _Candidate(bounds, left, since)
                self._tell(source, store, left)
            else:
                self._candidate = None
                begun = [one for one in bounds if one in fresh]
                set_watermarks(store, [bounds[one] for one in begun])
                go_on += [fresh[one] for one in begun]
        # Below whatever is read from now on, even if nothing is written in between.
        return Pinnable(Lsn(place(source).lsn.value - 1), go_on)

    def _tell(self, source: Connection, store: LogStore, left: Running) -> None:
        assert self._candidate is not None
        if time.monotonic() - self._candidate.since < _NOTED_SECONDS:
            return
        pids = [str(pid) for (pid,) in source.execute(_PIDS, (list(left.sessions),))]
        who = f" of sessions {', '.join(pids[:5])} (pg_stat_activity)" if pids else ""
        if left.prepared:
            who += f"{' and' if who else ':'} prepared ones (pg_prepared_xacts)"
        for table, _ in self._candidate.bounds:
            store.note_waiting(table, f"it waits for transactions that began before it{who}.")

    def _noted(
        self, source: Connection, config: SourceConfig, store: LogStore, rows: Sequence[TableRow]
    ) -> _Candidate | None:
        """Of those whose bounds can be asked for: a view may fail, or its server be away."""
        source.execute(POLLS)
        at, bounds = place(source), dict[tuple[TableId, int], Watermark]()
        for row in (row for row in rows if row.table not in self._troubles.resting):
            began, of = time.monotonic(), config.table(row.table)
            try:
                least = bound(source, of, at)
            except psycopg.Error as error:
                why = self._troubles.note(source, row.table, error, time.monotonic() - began)
                store.note_waiting(row.table, f"its watermark can't be asked for: {why}.")
            else:
                self._troubles.over([row.table])
                known = Watermark(row.table, row.epoch, rule(watermark(of)), least)
                bounds[row.table, row.epoch] = known
        return _Candidate(bounds, running(source, at), time.monotonic()) if bounds else None
