"""The leaderless log in Postgres: staged files, and how far they are safe.

Keeps invariants 1 to 3: one transaction registers files, takes their offsets and moves
``flushed_lsn``; offsets of a table rise in the order of registration, which is commit order. There
is no leader: the rows of this schema are the whole state.

A store is also the session (``log.session``), the registry of tables (``log.tables``) and how far
their logs are applied (``log.cursors``), because one transaction needs one connection.
``log.copies.chunks`` explains the rows of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cdc_assets.errors import ReplicationLost
from cdc_assets.log.cursors import Cursor, CursorStore
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.staged.places import Place, foreign_entry, staged_place
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# Keys in pipeline_meta: facts of the source that the log is made from.
SOURCE_FACTS = (
    "system_identifier",
    "timeline",
    "timeline_history",
    "database",
    "publication",
    "slot_restart_lsn",
    "inserts_from",
    "query_read",
    "log_of",
    "log_group",
)

# A running flusher registers about once a second: looking more often shows nothing new.
FLUSHED_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Registered rows of a table: the offsets ``start_offset`` to ``end_offset`` (excluded).

    ``flushable_lsn`` and ``commit_time``: of the last transaction of its flush.
    """

    start_offset: int
    rows: StagedRows
    flushable_lsn: Lsn
    commit_time: datetime

    @property
    def end_offset(self) -> int:
        return self.start_offset + self.rows.row_count


class LogStore(CursorStore):
    """Reads and writes the coordination schema for one source.

    ``places``: where the source's staged files are; empty where none is read.
    """

    places: tuple[Place, ...] = ()

    def begin_anew(self) -> None:
        """Forget the source and its log, which can't be continued.

        The offsets go on rising. Every table except the parked ones waits for a new pin: nothing
        resumes where it was. Files of the log become orphans, which maintenance removes.
        """
        with self.connection.transaction():
            for statement in (
                # First: it waits for who registers, and then the next one has what that did.
                "delete from flushed_lsn where source = %s",
                "delete from log_index where source = %s",
                "delete from snapshot_progress where source = %s",
                "delete from query_watermarks where source = %s",
                "delete from pipeline_meta where source = %s and key = any(%s)",
                """update tables set state = case state when 'parked' then state else 'waiting' end,
                   epoch = epoch + (snapshot_lsn is not null)::int, snapshot_lsn = null,
                   complete_lsn = null, pin = null, published_as = null, followed = false,
                   log_from = null, updated_at = now() where source = %s""",
            ):
                parameters = (self.source, list(SOURCE_FACTS))[: statement.count("%s")]
                self.connection.execute(statement.encode(), parameters)

    def flushed_lsn(self) -> Lsn | None:
        """The LSN below which every commit is registered; None before the first pin."""
        row = self.connection.execute(
            "select lsn from flushed_lsn where source = %s", (self.source,)
        ).fetchone()
        return Lsn.parse(row[0]) if row else None

    def is_flushed(self, lsn: Lsn) -> bool:
        """Whether everything that committed below ``lsn`` is registered."""
        flushed = self.flushed_lsn()
        return flushed is not None and flushed >= lsn

    def await_flushed(
        self, lsn: Lsn, patience_seconds: float, *, while_active: bool = False
    ) -> bool:
        """Wait until everything that committed below ``lsn`` is registered; False if it isn't.

        ``while_active``: gives up as soon as no flusher is active.
        """
        deadline = time.monotonic() + patience_seconds
        while not self.is_flushed(lsn):
            if time.monotonic() > deadline or (while_active and not self.has_flusher()):
                return False
            self.note_awaited(lsn)
            time.sleep(FLUSHED_LOOK_SECONDS)
        return True

    def note_awaited(self, lsn: Lsn) -> None:
        """Report to the flusher that a caller waits for ``flushed_lsn`` to be ``lsn``.

        The nearest LSN is kept; a caller that waits for another repeats the call. An LSN beyond the
        end of the WAL hides none.
        """
        self.connection.execute(
            "update flushed_lsn set awaited = %(lsn)s where source = %(source)s"
            " and (awaited is null or awaited <= lsn or awaited > %(lsn)s)",
            {"source": self.source, "lsn": str(lsn)},
        )

    def awaited_lsn(self) -> Lsn:
        """The nearest LSN that a caller waits for, or one already reached; zero without one."""
        row = self.connection.execute(
            "select awaited from flushed_lsn where source = %s and awaited is not null",
            (self.source,),
        ).fetchone()
        return Lsn.parse(row[0]) if row else Lsn.ZERO

    def begin_at(self, lsn: Lsn) -> None:
        """Give the log its beginning, unless it has one: what committed below is in the copies."""
        self.connection.execute(
            "insert into flushed_lsn (source, lsn) values (%s, %s) on conflict do nothing",
            (self.source, str(lsn)),
        )

    def register(
        self, staged: Sequence[StagedRows], flushable: Lsn, flushed: Lsn, commit_time: datetime
    ) -> None:
        """Take offsets, insert the entries, move ``flushed_lsn``: all in one transaction.

        ``staged`` rows of one table are in commit order; ``flushable`` and ``commit_time``: the end
        and the time of their last transaction. Raises psycopg.Error, or like :meth:`advance`,
        having changed nothing.
        """
        with self.connection.transaction():
            # One statement however many files: with many tables a flush has thousands.
            self.connection.execute(
                "with file as (select *, sum(row_count) over (partition by table_name order by"
                "   place) as after, sum(row_count) over (partition by table_name) as total"
                "  from unnest(%(tables)s::text[], %(paths)s::text[], %(rows)s::bigint[],"
                "   %(sizes)s::bigint[], %(firsts)s::bigint[], %(digests)s::bytea[])"
                "  with ordinality as f (table_name, path, row_count, byte_size, first_row, sha256,"
                "   place)),"
                " taken as (insert into log_seq as s (source, table_name, next_offset)"
                "  select distinct %(source)s, table_name, total from file order by table_name"
                "  on conflict (source, table_name)"
                "  do update set next_offset = s.next_offset + excluded.next_offset"
                "  returning table_name, next_offset)"
                " insert into log_index (source, table_name, start_offset, end_offset, path,"
                "  row_count, byte_size, flushable_lsn, commit_time, first_row, sha256)"
                " select %(source)s, table_name, next_offset - total + after - row_count,"
                "  next_offset - total + after, path, row_count, byte_size, %(lsn)s::pg_lsn,"
                "  %(time)s, first_row, sha256 from file join taken using (table_name)"
                " order by place",
                {
                    "source": self.source,
                    "tables": [str(rows.table) for rows in staged],
                    "paths": [rows.path for rows in staged],
                    "rows": [rows.row_count for rows in staged],
                    "sizes": [rows.byte_size for rows in staged],
                    "firsts": [rows.first_row for rows in staged],
                    "digests": [rows.sha256 for rows in staged],
                    "lsn": str(flushable),
                    "time": commit_time,
                },
            )
            self.advance(flushed, commit_time)

    def advance(self, lsn: Lsn, commit_time: datetime | None = None) -> None:
        """Move ``flushed_lsn`` alone: whatever of ours committed up to ``lsn`` is registered.

        It waits for who begins the log anew, or has them wait until this transaction ends. Raises
        ReplicationLost if the log has no beginning any more.
        """
        moved = self.connection.execute(
            "update flushed_lsn set lsn = greatest(lsn, %s), updated_at = now(),"
            " commit_time = greatest(commit_time, %s) where source = %s",
            (str(lsn), commit_time, self.source),
        )
        if not moved.rowcount:
            raise ReplicationLost(
                f"the log of source {self.source} was begun anew, or given up.",
                "What was read for it isn't registered any more.",
            )

    def record(self, facts: Mapping[str, str]) -> None:
        """Write facts of the source down, by SOURCE_FACTS; none of a log that was given up."""
        held = "select 1 from flushed_lsn where source = %s for update"
        with self.connection.transaction():
            if self.connection.execute(held, (self.source,)).fetchone() is not None:
                for key, value in facts.items():
                    self.set_meta(key, value)

    def entries(self, table: TableId, offset: int) -> list[LogEntry]:
        """The entries of ``table`` that hold offsets from ``offset`` on, in order.

        Raises TableProblem if an entry names a file that is in none of the source's ``places``.
        """
        rows = self.connection.execute(
            "select start_offset, end_offset, path, byte_size, flushable_lsn, commit_time,"
            " first_row, sha256"
            " from log_index where source = %s and table_name = %s and end_offset > %s"
            " order by start_offset",
            (self.source, str(table), offset),
        ).fetchall()
        for path in {path for _, _, path, *_ in rows} if self.places else ():
            if staged_place(self.places, path) is None:
                raise foreign_entry(table, path, self.places)
        return [
            LogEntry(
                start, StagedRows(table, path, end - start, size, first, digest), Lsn.parse(lsn), at
            )
            for start, end, path, size, lsn, at, first, digest in rows
        ]

    def newest_file(self) -> str | None:
        """The staged file that was registered last; None if the log is empty."""
        row = self.connection.execute(
            "select path from log_index where source = %s"
            " order by flushable_lsn desc, commit_time desc limit 1",
            (self.source,),
        ).fetchone()
        return str(row[0]) if row else None

    def log_end(self, table: TableId) -> int:
        """The offset that the next registered row of ``table`` gets."""
        row = self.connection.execute(
            "select next_offset from log_seq where source = %s and table_name = %s",
            (self.source, str(table)),
        ).fetchone()
        return int(row[0]) if row else 0

    def log_ends(self) -> dict[str, int]:
        """:meth:`log_end` of every table that has a log, by its SQL name."""
        rows = self.connection.execute(
            "select table_name, next_offset from log_seq where source = %s", (self.source,)
        )
        return {str(name): int(end) for name, end in rows}

    def first_cursor(self, row: TableRow) -> Cursor:
        """The cursor from which the log is applied to a copy that is complete by now.

        Every entry before it holds only transactions that committed before the table's snapshot
        LSN. Called before anything is applied, because applied entries may be removed.
        """
        assert row.snapshot_lsn is not None  # it was pinned
        # Read before the entries: an entry registered meanwhile must not be passed over.
        end = self.log_end(row.table)
        found = self.connection.execute(
            "select min(start_offset) from log_index where source = %s and table_name = %s"
            " and flushable_lsn > %s",
            (self.source, str(row.table), str(row.snapshot_lsn)),
        ).fetchone()
        first = found[0] if found else None
        return Cursor(end if first is None else first, row.snapshot_lsn)

    def flusher_report(self) -> tuple[dict[str, Any], float] | None:
        """The report of the flusher that has the turn, or had it last; and its age in seconds."""
        row = self.connection.execute(
            "select report, extract(epoch from clock_timestamp() - reported_at)::float8"
            " from flusher_reports where source = %s",
            (self.source,),
        ).fetchone()
        return (dict(row[0]), float(row[1])) if row else None
