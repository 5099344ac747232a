"""The leaderless log in Postgres: what was staged, how far it is safe, how far it was applied.

Keeps invariants 1 to 3: a file is registered, its offsets are taken and ``flushed_lsn`` moves in
one transaction; offsets of a table rise in the order of registration, which is commit order. There
is no leader: whoever holds the rows of this schema knows everything.

A store wraps one connection in autocommit mode and is used by one thread at a time. What the rows
of a copy mean is in ``log.progress``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

import psycopg
from psycopg import sql

from cdc_assets.errors import Fenced
from cdc_assets.log.files import StagedRows
from cdc_assets.log.schema import migrate, newest, version
from cdc_assets.postgres.catalog import Column, SourceTable
from cdc_assets.postgres.connect import connect
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# What pipeline_meta remembers of the source that the log is made from.
SOURCE_FACTS = ("system_identifier", "timeline", "database", "publication", "slot_restart_lsn")
# The one group of consumers that merges into the lake; the schema has room for others.
GROUP = "lake"


@dataclass(frozen=True, slots=True)
class TableRow:
    """A replicated table as the coordination schema knows it."""

    table: TableId
    oid: int
    epoch: int
    state: str
    key_columns: tuple[str, ...]
    columns: tuple[Column, ...]
    snapshot_lsn: Lsn | None
    complete_lsn: Lsn | None
    pin: str | None
    reason: str | None
    excluded: frozenset[str] = frozenset()
    followed: bool = False
    published_as: str | None = None
    mode: str = "mirror"
    excluded_numbers: frozenset[int] = frozenset()

    @property
    def followed_since(self) -> Lsn | None:
        """From where on its log has no gap; None if no log of it is needed."""
        return self.snapshot_lsn if self.state in ("waiting", "copying", "streaming") else None


@dataclass(frozen=True, slots=True)
class CopyState:
    """What of a table's row decides whether a copy goes on."""

    epoch: int
    state: str
    pin: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A table's rows in a staged Parquet file, ready to be registered.

    ``flushable_lsn`` is where the last transaction of them ended; ``path`` is a URI. ``first_row``:
    the number of the first one in a file that tables share, None where it is this table's alone.
    """

    table: TableId
    path: str
    row_count: int
    byte_size: int
    flushable_lsn: Lsn
    commit_time: datetime
    first_row: int | None = None


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Registered rows of a table: the offsets ``start_offset`` to ``end_offset`` (excluded).

    ``first_row`` is as in StagedFile, ``byte_size`` their share of a shared file.
    """

    start_offset: int
    end_offset: int
    path: str
    byte_size: int
    flushable_lsn: Lsn
    commit_time: datetime
    first_row: int | None = None

    @property
    def rows(self) -> StagedRows:
        """Where they are."""
        return StagedRows(self.path, self.end_offset - self.start_offset, self.first_row)


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a table's log is applied: ``offset`` is the first one that isn't."""

    offset: int
    applied_lsn: Lsn
    commit_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """That a worker looks after a table; ``epoch`` is the fence, higher with every other worker."""

    worker: uuid.UUID
    epoch: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """What of a table's log waits to be applied, from ``offset`` on."""

    table: TableId
    rows: int
    bytes: int
    oldest_commit: datetime | None
    offset: int


class LogStore:
    """Reads and writes the coordination schema for one source."""

    def __init__(self, connection: psycopg.Connection[Any], source: str, schema: str) -> None:
        self.connection = connection
        self.source = source
        self.schema = schema
        connection.execute(
            sql.SQL("set search_path to {}, pg_catalog").format(sql.Identifier(schema))
        )

    @classmethod
    def peek(cls, dsn: str, source: str, schema: str) -> Self | None:
        """The store as it is, for reading; None before the first start or an upgrade."""
        connection = connect(dsn, application_name=f"cdc_assets {source} log")
        try:
            if version(connection, schema) == newest():
                return cls(connection, source, schema)
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    @classmethod
    def open(cls, dsn: str, source: str, schema: str) -> Self:
        """Connect, bring the schema up to date, and return the store."""
        connection = connect(dsn, application_name=f"cdc_assets {source} log")
        try:
            migrate(connection, schema, dsn)
            return cls(connection, source, schema)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self.connection.close()

    # --- locks: one writer a table, one active flusher a source (session advisory locks) ---

    def _lock_key(self, name: str) -> str:
        return f"cdc_assets:{self.schema}:{self.source}:{name}"

    def try_lock(self, name: str) -> bool:
        """Take the session lock ``name`` if nobody has it."""
        row = self.connection.execute(
            "select pg_try_advisory_lock(hashtextextended(%s, 0))", (self._lock_key(name),)
        ).fetchone()
        return bool(row and row[0])

    def lock(self, name: str) -> None:
        """Wait for the session lock ``name``."""
        self.connection.execute(
            "select pg_advisory_lock(hashtextextended(%s, 0))", (self._lock_key(name),)
        )

    def lock_within(self, name: str, seconds: float) -> bool:
        """Wait for the session lock ``name``, in turn with others; False if it takes longer."""
        try:
            with self.connection.transaction():
                self.connection.execute(
                    "select set_config('lock_timeout', %s, true)", (str(round(seconds * 1000)),)
                )
                self.lock(name)
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    def unlock(self, name: str) -> None:
        self.connection.execute(
            "select pg_advisory_unlock(hashtextextended(%s, 0))", (self._lock_key(name),)
        )

    def lock_holder(self, name: str) -> int | None:
        """The backend that holds the lock, this session's included; None if it is free."""
        row = self.connection.execute(
            "with k as (select hashtextextended(%s, 0) as key)"
            " select pid from pg_locks, k where locktype = 'advisory' and granted"
            " and database = (select oid from pg_database where datname = current_database())"
            " and objsubid = 1 and (classid::bigint << 32 | objid::bigint) = k.key",
            (self._lock_key(name),),
        ).fetchone()
        return int(row[0]) if row else None

    def is_locked(self, name: str) -> bool:
        """Whether any session, this one included, holds the lock."""
        return self.lock_holder(name) is not None

    # --- facts of the source ---

    def meta(self, key: str) -> str | None:
        row = self.connection.execute(
            "select value from pipeline_meta where source = %s and key = %s", (self.source, key)
        ).fetchone()
        return str(row[0]) if row else None

    def set_meta(self, key: str, value: str) -> None:
        self.connection.execute(
            "insert into pipeline_meta (source, key, value) values (%s, %s, %s)"
            " on conflict (source, key) do update set value = excluded.value",
            (self.source, key, value),
        )

    # --- tables ---

    def tables(self) -> list[TableRow]:
        """Every registered table, by name."""
        rows = self.connection.execute(
            "select table_name, oid, epoch, state, key_columns, columns, snapshot_lsn,"
            " complete_lsn, pin, reason, excluded, followed, published_as, mode,"
            " excluded_numbers from tables"
            " where source = %s order by table_name",
            (self.source,),
        ).fetchall()
        return [
            TableRow(
                TableId.parse(name),
                int(oid),
                epoch,
                state,
                tuple(key),
                tuple(Column.from_json(c) for c in columns),
                _lsn(snapshot),
                _lsn(complete),
                str(pin) if pin else None,
                reason,
                frozenset(excluded),
                followed,
                published_as,
                mode,
                frozenset(numbers),
            )
            for (
                name,
                oid,
                epoch,
                state,
                key,
                columns,
                snapshot,
                complete,
                pin,
                reason,
                excluded,
                followed,
                published_as,
                mode,
                numbers,
            ) in rows
        ]

    def table(self, table: TableId) -> TableRow | None:
        return next((row for row in self.tables() if row.table == table), None)

    def copy_state(self, table: TableId) -> CopyState | None:
        """Where the table's copy stands: cheap enough to be asked twice a second."""
        row = self.connection.execute(
            "select epoch, state, pin::text, reason from tables"
            " where source = %s and table_name = %s",
            (self.source, str(table)),
        ).fetchone()
        return CopyState(*row) if row else None

    def add_table(
        self, table: SourceTable, excluded: Iterable[str] = (), mode: str = "mirror"
    ) -> None:
        """Register a table that waits for its pin; one that is registered stays as it is.

        A waiting one, of which no chunk was read yet, is described anew. ``excluded`` columns never
        leave the source.
        """
        names = sorted(excluded)
        self.connection.execute(
            "insert into tables as t"
            " (source, table_name, oid, state, key_columns, columns, excluded, mode,"
            "  excluded_numbers)"
            " values (%s, %s, %s, 'waiting', %s, %s, %s, %s, %s)"
            " on conflict (source, table_name) do update set oid = excluded.oid,"
            " state = 'waiting', key_columns = excluded.key_columns, columns = excluded.columns,"
            " excluded = excluded.excluded, excluded_numbers = excluded.excluded_numbers,"
            " mode = excluded.mode, reason = null,"
            " updated_at = now(),"
            " followed = t.followed and (t.oid, t.key_columns, t.excluded)"
            "  = (excluded.oid, excluded.key_columns, excluded.excluded)"
            " where t.oid = 0 or (t.state = 'waiting' and t.snapshot_lsn is null)",
            (
                self.source,
                str(table.id),
                table.oid,
                list(table.key_columns),
                json.dumps([c.to_json() for c in table.columns]),
                names,
                mode,
                [c.number for c in table.columns if c.name in names],
            ),
        )

    def mark_followed(self, tables: Iterable[TableRow]) -> None:
        """Say that the flusher that streams now stages these tables as ``tables`` describes them.

        What was described anew meanwhile stays unmarked.
        """
        with self.connection.cursor() as cursor:
            cursor.executemany(
                "update tables set followed = true where source = %s and table_name = %s"
                " and not followed and (oid, key_columns, excluded) = (%s, %s, %s)",
                [
                    (
                        self.source,
                        str(row.table),
                        row.oid,
                        list(row.key_columns),
                        sorted(row.excluded),
                    )
                    for row in tables
                ],
            )

    def add_excluded(self, table: TableId, numbers: Iterable[int]) -> None:
        """Remember attribute numbers of excluded columns that came after the registration."""
        self.connection.execute(
            "update tables set excluded_numbers = array("
            " select distinct n from unnest(excluded_numbers || %s::int[]) n order by n)"
            " where source = %s and table_name = %s",
            (sorted(numbers), self.source, str(table)),
        )

    def park_unknown(self, table: TableId, reason: str) -> None:
        """Register a table that the source doesn't have; ``add_table`` revives it later."""
        self.connection.execute(
            "insert into tables (source, table_name, oid, state, key_columns, columns, reason)"
            " values (%s, %s, 0, 'parked', '{}', '[]', %s) on conflict do nothing",
            (self.source, str(table), reason),
        )

    def park(self, table: TableId, reason: str, epoch: int | None = None) -> None:
        """Set a registered table aside, with the reason and the way out.

        With ``epoch`` only while it is that one: what was found may be mended by a new copy.
        """
        self.connection.execute(
            "update tables set state = 'parked', reason = %(reason)s, updated_at = now()"
            " where source = %(source)s and table_name = %(table)s"
            " and epoch = coalesce(%(epoch)s, epoch)",
            {"reason": reason, "source": self.source, "table": str(table), "epoch": epoch},
        )

    def begin_anew(self) -> None:
        """Forget the source and the log of it, of which nothing can be continued.

        The offsets go on rising. Every table waits for a new pin, but those that are parked:
        nothing resumes where it was. Files of the log become orphans, which maintenance removes.
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

    def set_published_as(self, table: TableId, published_as: str | None) -> None:
        """Remember which entry of the publication the table's changes come through."""
        self.connection.execute(
            "update tables set published_as = %s where source = %s and table_name = %s",
            (published_as, self.source, str(table)),
        )

    def set_columns(self, row: TableRow) -> None:
        """Remember the columns and the key that the lake table says it has; it is the truth."""
        self.connection.execute(
            "update tables set columns = %s, key_columns = %s, updated_at = now()"
            " where source = %s and table_name = %s and epoch = %s and state = 'streaming'",
            (
                json.dumps([c.to_json() for c in row.columns]),
                list(row.key_columns),
                self.source,
                str(row.table),
                row.epoch,
            ),
        )

    def finish_copy(
        self, table: TableId, epoch: int, complete_lsn: Lsn, *, streams: bool = True
    ) -> bool:
        """Every chunk landed: from here on the log is applied. False if the epoch has passed.

        A cursor of the epoch before says nothing of the new table.
        """
        with self.connection.transaction():
            done = self.connection.execute(
                "update tables set state = %s, complete_lsn = %s, updated_at = now()"
                " where source = %s and table_name = %s and epoch = %s and state = 'copying'",
                (
                    "streaming" if streams else "copied",
                    str(complete_lsn),
                    self.source,
                    str(table),
                    epoch,
                ),
            )
            if done.rowcount:
                self.connection.execute(
                    "delete from mat_cursor where consumer_group = %s and source = %s"
                    " and table_name = %s",
                    (GROUP, self.source, str(table)),
                )
        return done.rowcount == 1

    # --- the log ---

    def flushed_lsn(self) -> Lsn | None:
        """Everything that committed below it is registered; None before the first pin."""
        row = self.connection.execute(
            "select lsn from flushed_lsn where source = %s", (self.source,)
        ).fetchone()
        return _lsn(row[0]) if row else None

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
                "   %(firsts)s::bigint[])"
                "  with ordinality as f (table_name, path, row_count, byte_size, flushable_lsn,"
                "   commit_time, first_row, place)),"
                " taken as (insert into log_seq as s (source, table_name, next_offset)"
                "  select distinct %(source)s, table_name, total from file order by table_name"
                "  on conflict (source, table_name)"
                "  do update set next_offset = s.next_offset + excluded.next_offset"
                "  returning table_name, next_offset)"
                " insert into log_index (source, table_name, start_offset, end_offset, path,"
                "  row_count, byte_size, flushable_lsn, commit_time, first_row)"
                " select %(source)s, table_name, next_offset - total + after - row_count,"
                "  next_offset - total + after, path, row_count, byte_size, flushable_lsn,"
                "  commit_time, first_row from file join taken using (table_name) order by place",
                {
                    "source": self.source,
                    "tables": [str(file.table) for file in files],
                    "paths": [file.path for file in files],
                    "rows": [file.row_count for file in files],
                    "sizes": [file.byte_size for file in files],
                    "lsns": [str(file.flushable_lsn) for file in files],
                    "times": [file.commit_time for file in files],
                    "firsts": [file.first_row for file in files],
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
        """The entries of ``table`` that hold offsets from ``offset`` on, in order."""
        rows = self.connection.execute(
            "select start_offset, end_offset, path, byte_size, flushable_lsn, commit_time,"
            " first_row"
            " from log_index where source = %s and table_name = %s and end_offset > %s"
            " order by start_offset",
            (self.source, str(table), offset),
        ).fetchall()
        return [
            LogEntry(start, end, path, size, _must(lsn), at, first)
            for start, end, path, size, lsn, at, first in rows
        ]

    def log_end(self, table: TableId) -> int:
        """The offset that the next registered row of ``table`` gets."""
        row = self.connection.execute(
            "select next_offset from log_seq where source = %s and table_name = %s",
            (self.source, str(table)),
        ).fetchone()
        return int(row[0]) if row else 0

    # --- the materializer's claims and cursor ---

    def claim(self, table: TableId, lock: str, worker: uuid.UUID) -> Claim | None:
        """Take the session lock ``lock`` and the claim to ``table``; None if another has the lock.

        Raises Fenced if the worker was taken for dead.
        """
        try:
            row = self.connection.execute(
                "with lock as materialized"
                " (select pg_try_advisory_lock(hashtextextended(%(lock)s, 0)) as held)"
                " insert into claims as c (consumer_group, source, table_name, worker)"
                " select %(group)s, %(source)s, %(table)s, %(worker)s from lock where held"
                " on conflict (consumer_group, source, table_name) do update"
                " set worker = excluded.worker, claimed_at = case when c.worker = excluded.worker"
                "  then c.claimed_at else excluded.claimed_at end,"
                " epoch = c.epoch + (c.worker is distinct from excluded.worker)::int"
                " returning epoch",
                {
                    "lock": self._lock_key(lock),
                    "group": GROUP,
                    "source": self.source,
                    "table": str(table),
                    "worker": worker,
                },
            ).fetchone()
        except psycopg.errors.ForeignKeyViolation as error:
            self.unlock(lock)  # a statement that fails doesn't give it back
            raise Fenced(
                "this worker wasn't heard of for too long: its tables went to others."
            ) from error
        return Claim(worker, int(row[0])) if row else None

    def cursor(self, table: TableId) -> Cursor | None:
        row = self.connection.execute(
            'select "offset", applied_lsn, commit_time from mat_cursor'
            " where consumer_group = %s and source = %s and table_name = %s",
            (GROUP, self.source, str(table)),
        ).fetchone()
        return Cursor(row[0], _must(row[1]), row[2]) if row else None

    def set_cursor(self, table: TableId, cursor: Cursor, claim: Claim | None = None) -> None:
        """Remember what the Iceberg table says; the table is the truth, this is its cache.

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
        """What waits to be applied, for every table that streams; the caught-up have 0 rows."""
        rows = self.connection.execute(
            "select t.table_name, coalesce(sum(l.row_count), 0), coalesce(sum(l.byte_size), 0),"
            ' min(l.commit_time), coalesce(m."offset", 0) from tables t'
            " left join mat_cursor m on m.source = t.source and m.table_name = t.table_name"
            "  and m.consumer_group = %s"
            " left join log_index l on l.source = t.source and l.table_name = t.table_name"
            '  and l.end_offset > coalesce(m."offset", 0)'
            " where t.source = %s and t.state = 'streaming' group by t.table_name,"
            ' m."offset" order by 1',
            (GROUP, self.source),
        ).fetchall()
        return [Backlog(TableId.parse(n), int(r), int(b), at, o) for n, r, b, at, o in rows]

    def flusher_report(self) -> tuple[dict[str, Any], float] | None:
        """What the flusher that has the turn, or had it last, told, and how many seconds ago."""
        row = self.connection.execute(
            "select report, extract(epoch from clock_timestamp() - reported_at)::float8"
            " from flusher_reports where source = %s",
            (self.source,),
        ).fetchone()
        return (dict(row[0]), float(row[1])) if row else None

    def server_now(self) -> datetime:
        """The coordination server's clock, the only one that lags are measured with."""
        row = self.connection.execute("select clock_timestamp()").fetchone()
        assert row is not None and isinstance(row[0], datetime)
        return row[0]


def _lsn(value: object) -> Lsn | None:
    return None if value is None else Lsn.parse(str(value))


def _must(value: object) -> Lsn:
    return Lsn.parse(str(value))


def total_rows(entries: Iterable[LogEntry]) -> int:
    """How many offsets the entries span."""
    return sum(entry.end_offset - entry.start_offset for entry in entries)
