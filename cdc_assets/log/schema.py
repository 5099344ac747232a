"""Bringing the coordination schema up to date.

Migrations are the numbered SQL files beside this module, applied in order under an advisory lock,
each in one transaction with the row that records it: two processes that start at once, or one that
dies half-way, leave a schema that is at one version or the next.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.errors import CoordinationError
from cdc_assets.postgres.connect import pools_transactions

# Any constant will do, as long as every process uses the same; this one spells "cdc" in ASCII.
_MIGRATION_LOCK = 0x636463


def migrations() -> list[tuple[int, str]]:
    """``(version, SQL text)`` of each migration file, in order."""
    folder = resources.files("cdc_assets.log") / "migrations"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [(int(f.name.split("_", 1)[0]), f.read_text(encoding="utf-8")) for f in files]


def newest() -> int:
    """The version that this program's migrations lead to."""
    return migrations()[-1][0]


def version(connection: psycopg.Connection[tuple[Any, ...]], schema: str) -> int:
    """The version that ``schema`` is at; 0 if it isn't there."""
    name = sql.Identifier(schema, "schema_version")
    found = connection.execute("select to_regclass(%s)", (name.as_string(connection),)).fetchone()
    if found is None or found[0] is None:
        return 0
    row = connection.execute(
        sql.SQL("select coalesce(max(version), 0) from {}").format(name)
    ).fetchone()
    return int(row[0]) if row else 0


def migrate(connection: psycopg.Connection[tuple[Any, ...]], schema: str, dsn: str) -> int:
    """Create or upgrade ``schema`` and return its version.

    ``connection``, to ``dsn``, is in autocommit mode. Raises CoordinationError when the schema is
    newer than this program, or when a pooler is in between that doesn't keep a session.
    """
    if pools_transactions(connection, dsn):
        raise CoordinationError(
            "the coordination database is reached through a transaction pooler: session locks and"
            " exported snapshots don't survive there.",
            "Give the database's own address, or a session-mode pool.",
        )
    known = migrations()
    try:
        with connection.transaction(), connection.cursor() as cursor:
            cursor.execute(
                "select pg_advisory_xact_lock(%s::int, hashtext(%s))", (_MIGRATION_LOCK, schema)
            )
            name = sql.Identifier(schema)
            # Without this look first, a role that may use the schema but not create one would fail.
            cursor.execute("select to_regnamespace(%s)", (schema,))
            if (row := cursor.fetchone()) is None or row[0] is None:
                cursor.execute(sql.SQL("create schema if not exists {}").format(name))
            cursor.execute(sql.SQL("set local search_path to {}").format(name))
            cursor.execute(
                "create table if not exists schema_version"
                " (version int primary key, applied_at timestamptz not null default now())"
            )
            cursor.execute("select coalesce(max(version), 0) from schema_version")
            row = cursor.fetchone()
            current = int(str(row[0])) if row else 0
            if current > known[-1][0]:
                raise CoordinationError(
                    f"the coordination schema {schema} is at version {current}, this program knows"
                    f" {known[-1][0]}.",
                    "Upgrade cdc_assets here too.",
                )
            for version, text in known:
                if version > current:
                    cursor.execute(text.encode())
                    cursor.execute("insert into schema_version (version) values (%s)", (version,))
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
        raise CoordinationError(
            f"the role may not keep its state in the coordination schema {schema}: {error}",
            "cdc-assets check prints the SQL that allows it.",
        ) from error
    return known[-1][0]
