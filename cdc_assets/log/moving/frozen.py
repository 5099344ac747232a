"""Freezing a source's rows where they are moved away from: nobody can write one any more.

The mark (``log.moving.mark``) keeps new sessions out. A session that was there before is ended; one
that can't be, or that nobody knows of, meets a constraint: ``check (source <> 'app')`` on every
table of the schema, of any version of this program, and whatever it was about to write. Existing
rows aren't looked at, and those of other sources are written as ever. Each constraint is added in a
transaction of its own, which waits for a fraction of a second at most and tries again: others'
sessions never queue for longer, and no deadlock can come of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.errors import CoordinationError
from cdc_assets.log.moving.mark import MOVED

# Its rows may be written still: the move itself has locks, and with one alone nobody does harm.
LOCKS = "locks"
# Half of deadlock_timeout as Postgres has it.
_LOCK_SECONDS = 0.5
_PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.1

_TABLES = """
select c.relname from pg_catalog.pg_class c
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attname = 'source'
 where n.nspname = %s and c.relkind = 'r' and not a.attisdropped
 order by 1
"""
_SESSIONS = """
select pid, usename::text from pg_catalog.pg_stat_activity
 where datname = pg_catalog.current_database() and pid <> pg_catalog.pg_backend_pid()
   and starts_with(application_name, %s)
"""


def constraint(source: str) -> str:
    """The name of the constraints, which is in the error of whoever writes all the same."""
    return f"{MOVED}_{source}"


def is_frozen(error: BaseException, source: str) -> bool:
    """Whether a statement failed since its source's rows are frozen."""
    return isinstance(
        error, psycopg.errors.CheckViolation
    ) and error.diag.constraint_name == constraint(source)


def tables_of_sources(connection: psycopg.Connection[Any], schema: str) -> list[str]:
    """The tables of the schema whose rows belong to a source."""
    return [str(name) for (name,) in connection.execute(_TABLES, (schema,))]


def freeze(connection: psycopg.Connection[Any], source: str, schema: str) -> None:
    """Let nobody write a row of ``source``, but for its mark and its locks."""
    others = sql.SQL("source <> {}").format(source)
    for table in tables_of_sources(connection, schema):
        rule = others
        if table == "pipeline_meta":
            rule = sql.SQL("{} or key = {}").format(others, MOVED)
        if table != LOCKS and not _is_frozen(connection, source, schema, table):
            _alter(
                connection,
                sql.SQL("alter table {} add constraint {} check ({}) not valid").format(
                    sql.Identifier(schema, table), sql.Identifier(constraint(source)), rule
                ),
            )


def thaw(connection: psycopg.Connection[Any], source: str, schema: str) -> None:
    """Undo :func:`freeze`."""
    for table in tables_of_sources(connection, schema):
        if _is_frozen(connection, source, schema, table):
            _alter(
                connection,
                sql.SQL("alter table {} drop constraint if exists {}").format(
                    sql.Identifier(schema, table), sql.Identifier(constraint(source))
                ),
            )


def _is_frozen(connection: psycopg.Connection[Any], source: str, schema: str, table: str) -> bool:
    found = connection.execute(
        "select from pg_catalog.pg_constraint where conname = %s"
        " and conrelid = pg_catalog.to_regclass(%s)",
        (constraint(source), sql.Identifier(schema, table).as_string(connection)),
    )
    return bool(found.rowcount)


def _alter(connection: psycopg.Connection[Any], statement: sql.Composed) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            with connection.transaction():
                connection.execute(f"set local lock_timeout = '{_LOCK_SECONDS}s'".encode())
                connection.execute(statement)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS)
        else:
            return


def end_sessions(connection: psycopg.Connection[Any], source: str, seconds: float) -> None:
    """End the other sessions of ``source`` in the database of ``connection``.

    Raises CoordinationError if one is left after ``seconds``, or may not be ended.
    """
    deadline = time.monotonic() + seconds
    while left := list(_sessions(connection, source)):
        try:
            connection.execute(
                "select pg_catalog.pg_terminate_backend(pid) from unnest(%s::int[]) pid",
                ([pid for pid, _ in left],),
            )
            may_end = True
        except psycopg.errors.InsufficientPrivilege:
            may_end = False
        if not may_end or time.monotonic() > deadline:
            named = ", ".join(f"{pid} of {role}" for pid, role in left)
            raise CoordinationError(
                f"sessions of source {source} are still in the coordination database: {named}.",
                "Stop the processes that have them.",
            )
        time.sleep(_LOOK_SECONDS)


def _sessions(connection: psycopg.Connection[Any], source: str) -> Iterator[tuple[int, str]]:
    connection.execute("select pg_catalog.pg_stat_clear_snapshot()")
    yield from connection.execute(_SESSIONS, (f"cdc_assets {source} ",)).fetchall()
