"""Publications: making them, completing them, and what they send of a table.

Which tables are published, and when, is decided in ``pins``; slots are in ``replication``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.errors import PreflightError, TableProblem
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId

Connection = psycopg.Connection[tuple[Any, ...]]

# The server versions that row filters and column lists, and generated columns in the stream, came
# with.
COLUMN_LISTS, GENERATED_COLUMNS = 150000, 180000


def publication_oid(connection: Connection, publication: str) -> str | None:
    """The publication's oid, which another one of the same name doesn't have."""
    row = connection.execute(
        "select oid::text from pg_catalog.pg_publication where pubname = %s", (publication,)
    ).fetchone()
    return str(row[0]) if row else None


def published_tables(connection: Connection, publication: str) -> set[TableId] | None:
    """The tables of a publication, None if there is none of that name."""
    if not connection.execute(
        "select from pg_catalog.pg_publication where pubname = %s", (publication,)
    ).fetchall():
        return None
    rows = connection.execute(
        "select schemaname, tablename from pg_catalog.pg_publication_tables where pubname = %s",
        (publication,),
    ).fetchall()
    return {TableId(schema, name) for schema, name in rows}


def sends_generated_columns(connection: Connection, publication: str) -> bool:
    """Whether stored generated columns are in the stream: since Postgres 18, if it is asked for."""
    if connection.info.server_version < GENERATED_COLUMNS:
        return False
    row = connection.execute(
        "select pubgencols::text from pg_catalog.pg_publication where pubname = %s", (publication,)
    ).fetchone()
    return row is None or row[0] == "s"  # one that doesn't exist yet will be made so


def refuse_partial_publication(
    connection: Connection, publication: str, table: SourceTable
) -> None:
    """Raise TableProblem if a publication made by hand leaves out something of ``table``."""
    row = connection.execute(
        "select pubinsert and pubupdate and pubdelete and pubtruncate, pubviaroot"
        " from pg_catalog.pg_publication where pubname = %s",
        (publication,),
    ).fetchone()
    if row is None:
        return
    row_filter = column_list = False
    if connection.info.server_version >= COLUMN_LISTS:
        row_filter, column_list = connection.execute(
            "select prqual is not null, prattrs is not null from pg_catalog.pg_publication_rel r"
            " join pg_catalog.pg_publication p on p.oid = r.prpubid"
            " where p.pubname = %s and r.prrelid = %s",
            (publication, table.oid),
        ).fetchone() or (False, False)
    shape = PublishedShape(bool(row[0]), bool(row[1]), bool(row_filter), bool(column_list))
    missing = shape.missing(publication, table.id, table.kind)
    if missing is not None:
        raise TableProblem(table.id, missing.what, missing.remedy)


@dataclass(frozen=True, slots=True)
class Missing:
    """What a publication leaves out of a table: a stable code, what, and how to mend it."""

    code: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """How a publication sends a table's changes."""

    every_operation: bool
    via_root: bool
    row_filter: bool
    column_list: bool

    @property
    def letters(self) -> str:
        """The publication's own part of it, in short."""
        return ("a" if self.every_operation else "-") + ("r" if self.via_root else "-")

    def missing(self, publication: str, table: TableId, kind: str) -> Missing | None:
        """What of the table (of that relkind) it leaves out, None if nothing."""
        name = sql.Identifier(publication).as_string(None)
        if not self.every_operation:
            return Missing(
                "publication_operations",
                f"the publication {publication} doesn't publish every kind of change",
                f"alter publication {name} set (publish = 'insert, update, delete, truncate').",
            )
        if kind == "p" and not self.via_root:
            return Missing(
                "publication_via_partitions",
                f"the publication {publication} sends changes as those of the partitions",
                f"alter publication {name} set (publish_via_partition_root = true).",
            )
        if self.row_filter or self.column_list:
            part = "a row filter" if self.row_filter else "a column list"
            return Missing(
                "publication_row_filter" if self.row_filter else "publication_column_list",
                f"the publication {publication} has {part} for it: what it leaves out would"
                " silently be missing",
                f"alter publication {name} drop table {table}; it is added again as a whole.",
            )
        return None


def ensure_publication(
    connection: Connection, publication: str, tables: Iterable[TableId]
) -> list[TableId]:
    """Create the publication, or add what it lacks; returns the tables that were added."""
    wanted = sorted(set(tables))
    present = published_tables(connection, publication)
    missing = wanted if present is None else [t for t in wanted if t not in present]
    if not missing:
        return []
    listed = sql.SQL(", ").join(t.identifier for t in missing)
    name = sql.Identifier(publication)
    if present is None:
        generated = connection.info.server_version >= GENERATED_COLUMNS
        statement = sql.SQL(
            "create publication {} for table {} with (publish = 'insert, update, delete, truncate',"
            " publish_via_partition_root = true{})"
        ).format(name, listed, sql.SQL(", publish_generated_columns = stored" if generated else ""))
    else:
        statement = sql.SQL("alter publication {} add table {}").format(name, listed)
    try:
        connection.execute(statement)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PreflightError(
            f"the role may not change the publication {publication}: {error}",
            "An owner of the tables runs: " + statement.as_string(connection) + ";",
        ) from error
    return missing


def publish(
    connection: Connection, publication: str, tables: Iterable[TableId]
) -> dict[TableId, str]:
    """Like :func:`ensure_publication`; what one table is refused for doesn't stop the others.

    Returns the refused ones with the reason.
    """
    wanted = list(tables)
    try:
        ensure_publication(connection, publication, wanted)
    except PreflightError:
        refused = {}
        for table in wanted:
            try:
                ensure_publication(connection, publication, [table])
            except PreflightError as error:
                refused[table] = str(error)
        if len(refused) == len(wanted):
            raise
        return refused
    return {}
