"""The leaderless log in Postgres: staged files, how far they are safe, how far they are applied.

Keeps invariants 1 to 3: one transaction registers files, takes their offsets and moves
``flushed_lsn``; offsets of a table rise in the order of registration, which is commit order. There
is no leader: the rows of this schema are the whole state.

A store is also the session (``log.session``) and the registry of tables (``log.tables``), because
one transaction needs one connection. ``log.copies.chunks`` explains the rows of a copy.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from cdc_assets.errors import Fenced
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.staged.places import Place, foreign_entry, staged_place
from cdc_assets.log.tables import GROUP, TableRegistry, TableRow
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# Keys in pipeline_meta: facts of the source that the log is made from.
SOURCE_FACTS = (
    "system_identifier",
    "timeline",
    "database",
    "publication",
    "slot_restart_lsn",
    "inserts_from",
)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A table's rows in a staged Parquet file, ready to be registered.

    ``flushable_lsn``: the end of the rows' last transaction; ``path``: a URI. ``first_row``: the
    number of the table's first row in a file that tables share, None if the file is this table's
    alone. ``sha256``: the digest of the file's bytes.
    """

    table: TableId
    path: str
    row_count: int
    byte_size: int
    flushable_lsn: Lsn
    commit_time: datetime
    first_row: int | None = None
    sha256: bytes | None = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Registered rows of a table: the offsets ``start_offset`` to ``end_offset`` (excluded).

    ``first_row`` and ``sha256`` are as in StagedFile, ``byte_size`` is the rows' share of a shared
    file. The digest is None for entries registered by a version that took none.
    """

    start_offset: int
    end_offset: int
    path: str
    byte_size: int
    flushable_lsn: Lsn
    commit_time: datetime
    first_row: int | None = None
    sha256: bytes | None = None

    @property
    def rows(self) -> StagedRows:
        """The entry's rows in its file."""
        return StagedRows(
            self.path, self.end_offset - self.start_offset, self.first_row, self.sha256
        )


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a table's log is applied: ``offset`` is the first one that isn't."""

    offset: int
    applied_lsn: Lsn
    commit_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's claim to a table; ``epoch`` is the fence, raised with every change of worker."""

    worker: uuid.UUID
    epoch: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """The part of a table's log that waits to be applied, from ``offset`` on."""

    table: TableId
    rows: int
    bytes: int
    oldest_commit: datetime | None
    offset: int


class LogStore(TableRegistry):
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
                "delete from log_index where source = %s",
                "delete from flushed_lsn where source = %s",
                "delete from snapshot_progress where source = %s",
                "delete from pipeline_meta where source = %s and key = any(%s)",
                """update tables set state = case state when 'parked' then state else 'waiting' end,
                   epoch = epoch + (snapshot_lsn is not null)::int, snapshot_lsn = null,
                   complete_lsn = null, pin = null, published_as = null, followed = false,
                   updated_at = now() where source = %s""",
            ):
                parameters = (self.source, list(SOURCE_FACTS))[: statement.count("%s")]
                self.connection.execute(statement.encode(), parameters)

    def flushed_lsn(self) -> Lsn | None:
        """The LSN below which every commit is registered; None before the first pin."""
        row = self.connection.execute(
            "select lsn from flushed_lsn where source = %s", (self.source,)
        ).fetchone()
        return _must(row[0]) if row else None

    def await_flushed(self, lsn: Lsn) -> None:
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
        return _must(row[0]) if row else Lsn.ZERO

    def register(
        self, files: Sequence[StagedFile], flushed: Lsn, commit_time: datetime | None
    ) -> None:
        """Take offsets, insert the files, move ``flushed_lsn``: all in one transaction.

        ``files`` of one table are in commit order. Raises psycopg.Error having changed nothing.
        """
        with self.connection.transaction():
            # One statement however many files: with many tables a flush has thousands.
            self.connection.execute(
                "with file as (select *, sum(row_count) over (partition by table_name order by"
                "   place) as after, sum(row_count) over (partition by table_name) as total"
                "  from unnest(%(tables)s::text[], %(paths)s::text[], %(rows)s::bigint[],"
                "   %(sizes)s::bigint[], %(lsns)s::pg_lsn[], %(times)s::timestamptz[],"
                "   %(firsts)s::bigint[], %(digests)s::bytea[])"
                "  with ordinality as f (table_name, path, row_count, byte_size, flushable_lsn,"
                "   commit_time, first_row, sha256, place)),"
                " taken as (insert into log_seq as s (source, table_name, next_offset)"
                "  select distinct %(source)s, table_name, total from file order by table_name"
                "  on conflict (source, table_name)"
                "  do update set next_offset = s.next_offset + excluded.next_offset"
                "  returning table_name, next_offset)"
                " insert into log_index (source, table_name, start_offset, end_offset, path,"
                "  row_count, byte_size, flushable_lsn, commit_time, first_row, sha256)"
                " select %(source)s, table_name, next_offset - total + after - row_count,"
                "  next_offset - total + after, path, row_count, byte_size, flushable_lsn,"
                "  commit_time, first_row, sha256 from file join taken using (table_name)"
                " order by place",
                {
                    "source": self.source,
                    "tables": [str(file.table) for file in files],
                    "paths": [file.path for file in files],
                    "rows": [file.row_count for file in files],
                    "sizes": [file.byte_size for file in files],
                    "lsns": [str(file.flushable_lsn) for file in files],
                    "times": [file.commit_time for file in files],
                    "firsts": [file.first_row for file in files],
                    "digests": [file.sha256 for file in files],
                },
            )
            self._move_flushed(flushed, commit_time)

    def advance(self, lsn: Lsn) -> None:
        """Move ``flushed_lsn`` alone: nothing of ours committed up to ``lsn``."""
        self._move_flushed(lsn, None)

    def _move_flushed(self, lsn: Lsn, commit_time: datetime | None) -> None:
        self.connection.execute(
            "insert into flushed_lsn as f (source, lsn, commit_time) values (%s, %s, %s)"
            " on conflict (source) do update set lsn = greatest(f.lsn, excluded.lsn),"
            " commit_time = coalesce(greatest(f.commit_time, excluded.commit_time), f.commit_time),"
            " updated_at = now()",
            (self.source, str(lsn), commit_time),
        )

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
            LogEntry(int(start), int(end), path, int(size), _must(lsn), at, first, digest)
            for start, end, path, size, lsn, at, first, digest in rows
        ]

    def log_end(self, table: TableId) -> int:
        """The offset that the next registered row of ``table`` gets."""
        row = self.connection.execute(
            "select next_offset from log_seq where source = %s and table_name = %s",
            (self.source, str(table)),
        ).fetchone()
        return int(row[0]) if row else 0

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

    # --- the materializer's claims and cursor ---

    def claim(self, table: TableId, lock: str, worker: uuid.UUID) -> Claim | None:
        """Take the session lock ``lock`` and the claim to ``table``; None if another has the lock.

        Raises Fenced if the worker was taken for dead.
        """
        if not self.try_lock(lock):
            return None
        try:
            row = self.connection.execute(
                "insert into claims as c (consumer_group, source, table_name, worker)"
                " values (%(group)s, %(source)s, %(table)s, %(worker)s)"
                " on conflict (consumer_group, source, table_name) do update"
                " set worker = excluded.worker, claimed_at = case when c.worker = excluded.worker"
                "  then c.claimed_at else excluded.claimed_at end,"
                " epoch = c.epoch + (c.worker is distinct from excluded.worker)::int"
                " returning epoch",
                {"group": GROUP, "source": self.source, "table": str(table), "worker": worker},
            ).fetchone()
        except psycopg.errors.ForeignKeyViolation as error:
            self.unlock(lock)
            raise Fenced(
                "this worker wasn't heard of for too long: its tables went to others."
            ) from error
        assert row is not None
        return Claim(worker, int(row[0]))

    def cursor(self, table: TableId) -> Cursor | None:
        row = self.connection.execute(
            'select "offset", applied_lsn, commit_time from mat_cursor'
            " where consumer_group = %s and source = %s and table_name = %s",
            (GROUP, self.source, str(table)),
        ).fetchone()
        return Cursor(row[0], _must(row[1]), row[2]) if row else None

    def set_cursor(self, table: TableId, cursor: Cursor, claim: Claim | None = None) -> None:
        """Remember the Iceberg table's cursor; the table is the truth, this is its cache.

        Raises Fenced, having changed nothing, if ``claim`` is another worker's by now.
        """
        done = self.connection.execute(
            "insert into mat_cursor as m"
            ' (consumer_group, source, table_name, "offset", applied_lsn, commit_time)'
            " select %(group)s, %(source)s, %(table)s, %(offset)s, %(lsn)s::pg_lsn,"
            "  %(time)s::timestamptz where %(epoch)s::bigint is null or exists"
            "  (select from claims where consumer_group = %(group)s and source = %(source)s"
            "   and table_name = %(table)s and worker = %(worker)s and epoch = %(epoch)s)"
            " on conflict (consumer_group, source, table_name)"
            ' do update set "offset" = excluded."offset", applied_lsn = excluded.applied_lsn,'
            " commit_time = coalesce(excluded.commit_time, m.commit_time), updated_at = now()",
            {
                "group": GROUP,
                "source": self.source,
                "table": str(table),
                "offset": cursor.offset,
                "lsn": str(cursor.applied_lsn),
                "time": cursor.commit_time,
                "epoch": claim.epoch if claim is not None else None,
                "worker": claim.worker if claim is not None else None,
            },
        )
        if not done.rowcount:
            raise Fenced(f"{table}: another worker looks after it by now.")

    def backlogs(self) -> list[Backlog]:
        """The backlog of every table that streams; a table that has caught up has 0 rows."""
        # Lateral: a plain join would read a day's log to find the rows that wait.
        rows = self.connection.execute(
            "select t.table_name, coalesce(b.rows, 0), coalesce(b.bytes, 0), b.oldest,"
            ' coalesce(m."offset", 0) from tables t'
            " left join mat_cursor m on m.source = t.source and m.table_name = t.table_name"
            "  and m.consumer_group = %s"
            " cross join lateral (select sum(l.row_count) as rows, sum(l.byte_size) as bytes,"
            "  min(l.commit_time) as oldest from log_index l"
            "  where l.source = t.source and l.table_name = t.table_name"
            '  and l.end_offset > coalesce(m."offset", 0)) b'
            " where t.source = %s and t.state = 'streaming' order by 1",
            (GROUP, self.source),
        ).fetchall()
        return [Backlog(TableId.parse(n), int(r), int(b), at, o) for n, r, b, at, o in rows]

    def flusher_report(self) -> tuple[dict[str, Any], float] | None:
        """The report of the flusher that has the turn, or had it last; and its age in seconds."""
        row = self.connection.execute(
            "select report, extract(epoch from clock_timestamp() - reported_at)::float8"
            " from flusher_reports where source = %s",
            (self.source,),
        ).fetchone()
        return (dict(row[0]), float(row[1])) if row else None


def _must(value: object) -> Lsn:
    return Lsn.parse(str(value))


def total_rows(entries: Iterable[LogEntry]) -> int:
    """How many offsets the entries span."""
    return sum(entry.end_offset - entry.start_offset for entry in entries)
