"""Bringing the coordination schema up to date.

Migrations are the numbered SQL files beside this module, applied in order under a lock of the table
that records them, all in one transaction with its rows: two processes that start at once, or one
that dies half-way, leave a schema that is at one version or the next.
"""

from __future__ import annotations

import time
from contextlib import suppress
from importlib import resources
from typing import Any

import psycopg
from psycopg import sql
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from cdc_assets.errors import CoordinationError, first_line
from cdc_assets.log.schema.ownership import refuse_foreign
from cdc_assets.postgres.session.connect import Connection, pools_transactions

# The version from which on locks are rows (log.locks); before, they were advisory ones.
_LOCKS = 20
# Ending a session takes as long as its statement needs to notice.
_END_SECONDS = 10.0


def sql_name(schema: str) -> str:
    """The schema's name, quoted for a statement."""
    return sql.Identifier(schema).as_string(None)


def search_path(schema: str) -> str:
    """A session's search path: Postgres's own names come first, implicitly, then the schema's.

    Temporary tables would come before both unless ``pg_temp`` is named last.
    """
    return f"{sql_name(schema)},pg_temp"


def migrations() -> list[tuple[int, str]]:
    """``(version, SQL text)`` of each migration file, in order."""
    folder = resources.files("cdc_assets.log.schema") / "migrations"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [(int(f.name.split("_", 1)[0]), f.read_text(encoding="utf-8")) for f in files]


def newest() -> int:
    """The version that this program's migrations lead to."""
    return migrations()[-1][0]


def version(connection: Connection, schema: str) -> int:
    """The version that ``schema`` is at; 0 if it isn't there."""
    name = sql.Identifier(schema, "schema_version")
    found = connection.execute(
        "select pg_catalog.to_regclass(%s)", (name.as_string(connection),)
    ).fetchone()
    if found is None or found[0] is None:
        return 0
    row = connection.execute(
        sql.SQL("select coalesce(max(version), 0) from {}").format(name)
    ).fetchone()
    return int(row[0]) if row else 0


def migrate(connection: Connection, schema: str, dsn: str) -> int:
    """Create or upgrade ``schema`` and return its version.

    ``connection``, to ``dsn``, is in autocommit mode. Raises CoordinationError when the schema is
    somebody else's, or newer than this program, or when a pooler is in between that doesn't keep a
    session.
    """
    if pools_transactions(connection, dsn):
        raise CoordinationError(
            "the coordination database is reached through a transaction pooler: session locks and"
            " exported snapshots don't survive there.",
            "Give the database's own address, or a session-mode pool.",
        )
    refuse_foreign(connection, schema)
    try:
        if version(connection, schema) != newest():
            _upgrade(connection, schema)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
        raise CoordinationError(
            f"the role may not keep its state in the coordination schema {schema}:"
            f" {first_line(error)}",
            "cdc-assets check prints the SQL that allows it.",
        ) from error
    return newest()


# "if not exists" isn't atomic: of two sessions at once, one fails, and finds it made on its retry.
_MADE_MEANWHILE = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.DuplicateTable,
    psycopg.errors.DuplicateObject,  # a table's row type
)


@retry(
    retry=retry_if_exception_type(_MADE_MEANWHILE),
    stop=stop_after_attempt(5),
    reraise=True,
)
def _upgrade(connection: Connection, schema: str) -> None:
    with connection.transaction(), connection.cursor() as cursor:
        # Without this look first, a role that may use the schema but not create one would fail.
        cursor.execute("select pg_catalog.to_regnamespace(%s)", (sql_name(schema),))
        if (row := cursor.fetchone()) is None or row[0] is None:
            cursor.execute(f"create schema if not exists {sql_name(schema)}".encode())
        refuse_foreign(connection, schema)  # somebody may have made it since it was looked for
        cursor.execute(
            "select pg_catalog.set_config('search_path', %s, true)", (search_path(schema),)
        )
        cursor.execute(
            "create table if not exists schema_version"
            " (version int primary key, applied_at timestamptz not null default now())"
        )
        # Blocks readers, too: a process of an earlier version that comes now finds a newer schema.
        cursor.execute("lock table schema_version")
        cursor.execute("select coalesce(max(version), 0) from schema_version")
        row = cursor.fetchone()
        current = int(str(row[0])) if row else 0
        if current > newest():
            raise CoordinationError(
                f"the coordination schema {schema} is at version {current}, this program knows"
                f" {newest()}.",
                "Upgrade cdc_assets here too.",
            )
        for version, text in migrations():
            if version > current:
                if version == _LOCKS and current:
                    _end_earlier(cursor, schema)
                cursor.execute(text.encode())
                cursor.execute("insert into schema_version (version) values (%s)", (version,))


# Sessions of the schema's sources that may have locks, of roles that may read the schema; and
# whether they surely belong to it: they are recorded in it, hold or await one of its locks, or the
# database has no similar schema, whose sessions would have the same name.
_EARLIER = r"""
with source (name) as (
    select source from pipeline_meta
     union select source from tables union select source from sessions),
held as (
    select l.pid from pg_catalog.pg_locks l join (
        select pg_catalog.hashtextextended(
               pg_catalog.concat_ws(':', 'cdc_assets', %(schema)s::text, source.name, t.name), 0)
          from source, lateral (
               select unnest(array['pins', 'heaps', 'catalog', 'flusher:' || source.name])
                union all
               select 'write:' || table_name from tables where tables.source = source.name
               ) t (name)
        ) k (key) on l.classid::bigint << 32 | l.objid::bigint = k.key
     where l.locktype = 'advisory' and l.objsubid = 1)
select a.pid, a.pid in (select pid from held)
       or exists (select from sessions s where (s.pid, s.backend_start) = (a.pid, a.backend_start))
       or not exists (
           select from pg_catalog.pg_class v join pg_catalog.pg_class m using (relnamespace)
            where v.relname = 'schema_version' and m.relname = 'pipeline_meta'
              and v.oid <> 'schema_version'::pg_catalog.regclass)
  from pg_catalog.pg_stat_activity a
  join source on a.application_name = 'cdc_assets ' || source.name || ' log'
 where a.datname = pg_catalog.current_database() and a.pid <> pg_catalog.pg_backend_pid()
   and pg_catalog.has_table_privilege(
       a.usesysid, 'schema_version'::pg_catalog.regclass, 'SELECT')
"""


def _end_earlier(cursor: psycopg.Cursor[tuple[Any, ...]], schema: str) -> None:
    """End sessions from before version _LOCKS, whose locks no longer exclude others.

    A session can lose its lock like this at any time; its process then finds a newer schema.
    Sessions that may be another schema's aren't ended. Raises CoordinationError if any is left.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        cursor.execute("select pg_catalog.pg_stat_clear_snapshot()")
        cursor.execute(_EARLIER, {"schema": schema})
        left = cursor.fetchall()
        if not left:
            return
        may_end = True
        with suppress(psycopg.errors.InsufficientPrivilege), cursor.connection.transaction():
            may_end = False
            cursor.execute(
                "select pg_catalog.pg_terminate_backend(pid) from unnest(%s::int[]) pid",
                ([pid for pid, ours in left if ours],),
            )
            may_end = True
        if time.monotonic() > deadline or not may_end:
            raise CoordinationError(
                "processes of an earlier version are still there, whose locks this one doesn't"
                f" know: the sessions {', '.join(str(pid) for pid, _ in left)}.",
                "Stop those processes first (select * from pg_stat_activity), also those of another"
                " schema of the same database whose source has the same name.",
            )
        time.sleep(0.1)
