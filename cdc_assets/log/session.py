"""A session of the coordination schema: its connection, and facts stored by key.

One connection in autocommit mode, used by one thread at a time. Its commits survive a crash of the
server, because the source forgets what is registered here. Its locks (``log.locks``) are lost with
the connection. ``log.tables`` and ``log.store`` handle the contents of the tables.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Self

import psycopg

from cdc_assets.log.locks import SessionLocks
from cdc_assets.log.moving.mark import refuse_moved
from cdc_assets.log.schema.ownership import refuse_foreign
from cdc_assets.log.schema.versions import migrate, newest, search_path, version
from cdc_assets.postgres.session.connect import connect

# How often whoever must be known to be alive says so: a process with locks, a worker with chunks.
HEARTBEAT_SECONDS = 3.0
# Whoever was silent for so long is dead to all others. Ten heartbeats: longer than a machine is
# busy with something else, and half the time that a take-over may take.
STALE_SECONDS = 30.0

# synchronous_commit "off" is replaced: it reports commits that aren't on disk yet. Others wait for
# a disk, here or on standbys too, and stay. A statement that waited for a row sees its new version.
_ENTER = """
select pg_catalog.set_config('search_path', %s, false),
       pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
       pg_catalog.set_config('synchronous_commit',
       case setting when 'off' then 'on' else setting end, false)
  from pg_catalog.current_setting('synchronous_commit') as setting
"""


def enter(
    connection: psycopg.Connection[Any], schema: str, source: str, *, moves: bool = False
) -> None:
    """Make ``connection`` a session of the coordination schema, for ``source``.

    Raises CoordinationError if the source's log was moved away, unless the session ``moves`` it.
    """
    connection.execute(_ENTER, (search_path(schema),))
    if not moves:
        refuse_moved(connection, source, schema)


def _name(source: str) -> str:
    return f"cdc_assets {source} log"


class LogSession(SessionLocks):
    """One source's session of the coordination schema."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        source: str,
        schema: str,
        *,
        moves: bool = False,
    ) -> None:
        super().__init__(connection, source)
        self.schema = schema
        enter(connection, schema, source, moves=moves)

    @classmethod
    def peek(cls, dsn: str, source: str, schema: str) -> Self | None:
        """The store as it is, for reading; None before the first start or an upgrade."""
        connection = connect(dsn, application_name=_name(source))
        try:
            refuse_foreign(connection, schema)
            if version(connection, schema) == newest():
                return cls(connection, source, schema)
        except BaseException:
            connection.close()
            raise
        connection.close()
        return None

    @classmethod
    def open(cls, dsn: str, source: str, schema: str, *, moves: bool = False) -> Self:
        """Connect, bring the schema up to date, and return the store.

        Raises CoordinationError if the log was moved away, unless this is to move it.
        """
        # Not the name of sessions that may have locks: a migration ends sessions by that name.
        connection = connect(dsn, application_name=f"cdc_assets: opening {source}")
        try:
            migrate(connection, schema, dsn)
            connection.execute(
                "select pg_catalog.set_config('application_name', %s, false)", (_name(source),)
            )
            return cls(connection, source, schema, moves=moves)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self.connection.close()

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

    def forget_meta(self, key: str) -> bool:
        """False if there was no such fact."""
        done = self.connection.execute(
            "delete from pipeline_meta where source = %s and key = %s", (self.source, key)
        )
        return bool(done.rowcount)

    def server_now(self) -> datetime:
        """The coordination server's clock, the only one that lags are measured with."""
        row = self.connection.execute("select clock_timestamp()").fetchone()
        assert row is not None and isinstance(row[0], datetime)
        return row[0]
