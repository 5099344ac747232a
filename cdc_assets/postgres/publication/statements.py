"""The statements that make and change the two publications of a source."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import LiteralString

from psycopg import sql

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import (
    column_lists,
    operations,
    published_tables,
    sends_generated_columns,
)
from cdc_assets.postgres.session.connect import Connection

_NO_LISTS: Mapping[TableId, Sequence[str]] = MappingProxyType({})
_NO_FILTERS: Mapping[TableId, str] = MappingProxyType({})


def creation(connection: Connection, publication: str, *, beside: str | None = None) -> str:
    """The statement that makes the publication, without a table.

    ``beside``: it is the one of inserts beside that publication. Both have to send the same columns
    of a table: else the server ends the stream.
    """
    generated = sends_generated_columns(connection, beside or publication)
    return (
        sql.SQL("create publication {} with (publish = {}, publish_via_partition_root = true{})")
        .format(
            sql.Identifier(publication),
            sql.Literal(operations(inserts_only=beside is not None)),
            sql.SQL(", publish_generated_columns = stored" if generated else ""),
        )
        .as_string(connection)
    )


def addition(
    connection: Connection,
    publication: str,
    tables: Sequence[TableId],
    lists: Mapping[TableId, Sequence[str]] = _NO_LISTS,
    filters: Mapping[TableId, str] = _NO_FILTERS,
) -> str:
    """The statement that adds tables; with the column ``lists`` and row ``filters`` of some."""
    return _alteration(publication, "add", tables, lists, filters).as_string(connection)


def removal(connection: Connection, publication: str, tables: Sequence[TableId]) -> str:
    """The statement that takes tables out of the publication."""
    return _alteration(publication, "drop", tables).as_string(connection)


def placement(
    connection: Connection,
    publication: str,
    tables: Sequence[TableId],
    other: str,
    filters: Mapping[TableId, str] = _NO_FILTERS,
    replaced: Collection[TableId] = (),
) -> list[str]:
    """The statements that add tables; those that the other one has move, with column lists.

    ``replaced``: those that the publication itself has, with another filter.
    """
    removed, lists = list[str](), dict[TableId, Sequence[str]]()
    for name, some in ((other, tables), (publication, [t for t in tables if t in replaced])):
        present = (published_tables(connection, name) or {}) if some else {}
        if there := {table: present[table] for table in some if table in present}:
            lists |= column_lists(connection, name, there)
            removed.append(removal(connection, name, [*there]))
    return [*removed, addition(connection, publication, tables, lists, filters)]


def pasted(statements: Sequence[str]) -> str:
    """Statements as one text for a person to run: all of them take effect, or none.

    A table that was taken out, and that the next statement fails to add, would lose its changes.
    """
    text = "".join(f"{statement}; " for statement in statements).rstrip()
    return text if len(statements) == 1 else f"begin; {text} commit;"


def _alteration(
    publication: str,
    verb: LiteralString,
    tables: Sequence[TableId],
    lists: Mapping[TableId, Sequence[str]] = _NO_LISTS,
    filters: Mapping[TableId, str] = _NO_FILTERS,
) -> sql.Composed:
    """ONLY: tables that inherit from a table are published on their own, or not at all."""
    comma = sql.SQL(", ")
    named = []
    for table in tables:
        name = sql.SQL("only {}").format(table.identifier)
        if table in lists:
            name += sql.SQL(" ({})").format(comma.join(map(sql.Identifier, lists[table])))
        if table in filters:
            name += sql.SQL(" where ({})").format(sql.SQL(filters[table]))
        named.append(name)
    return sql.SQL("alter publication {} " + verb + " table {}").format(
        sql.Identifier(publication), comma.join(named)
    )
