"""A session of the coordination schema: its connection, its locks, and what is remembered by key.

One connection in autocommit mode, used by one thread at a time. What it commits survives a crash of
the server: the source forgets what is registered here. Locks are advisory ones of the session: when
the connection is lost, so are they. What is in the tables is ``log.tables``'s and
``log.store``'s to know.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Self

import psycopg
from psycopg import sql

from cdc_assets.log.schema import migrate, newest, version
from cdc_assets.postgres.connect import connect

# Where the server would say "committed" before it is so, we wait. Whatever else it is set to is on
# disk by then, here or on standbys too, and stays.
_ENTER = """
select set_config('search_path', %s, false), set_config('synchronous_commit',
       case setting when 'off' then 'on' else setting end, false)
  from current_setting('synchronous_commit') as setting
"""


def enter(connection: psycopg.Connection[Any], schema: str) -> None:
    """Make ``connection`` a session of the coordination schema."""
    path = sql.SQL("{}, pg_catalog").format(sql.Identifier(schema))
    connection.execute(_ENTER, (path.as_string(connection),))


class LogSession:
    """One source's session of the coordination schema."""

    def __init__(self, connection: psycopg.Connection[Any], source: str, schema: str) -> None:
        self.connection = connection
        self.source = source
        self.schema = schema
        enter(connection, schema)

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

    # --- facts by key ---

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

    def server_now(self) -> datetime:
        """The coordination server's clock, the only one that lags are measured with."""
        row = self.connection.execute("select clock_timestamp()").fetchone()
        assert row is not None and isinstance(row[0], datetime)
        return row[0]
