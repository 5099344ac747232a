"""Publications: making them, completing them, and what they send of a table.

A source has two. The configured one publishes every operation, and has only tables whose changed
rows Postgres can identify (``identity``): Postgres would refuse the others' UPDATE and DELETE. The
one beside it, ``…_inserts``, publishes INSERT and TRUNCATE alone, so Postgres refuses nothing.
Changing them never waits long for a lock. ``pins.enrol`` decides which tables are published, and
when.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import LiteralString

from psycopg import sql

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.identity import Trouble, troubles
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# The first server versions with row filters and column lists, and with generated columns in the
# stream.
COLUMN_LISTS, GENERATED_COLUMNS = 150000, 180000


def publication_oid(connection: Connection, publication: str) -> str | None:
    """The publication's oid, which another one of the same name doesn't have."""
    row = connection.execute(
        "select oid::text from pg_catalog.pg_publication where pubname = %s", (publication,)
    ).fetchone()
    return str(row[0]) if row else None


# A publication's tables, by its own entries: pg_publication_tables would lock each table. A
# partitioned table that is sent by its root's name counts as the root alone.
_PUBLISHED: LiteralString = """
select c.oid::bigint, n.nspname::text, c.relname::text
  from (select r.prrelid as oid
          from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid
         where p.pubname = %(name)s
        union
        select c.oid from pg_catalog.pg_publication p, pg_catalog.pg_class c
         where p.pubname = %(name)s and p.puballtables and c.oid >= 16384
           and c.relpersistence = 'p' and c.relkind in ('r', 'p')
           and not (c.relispartition and p.pubviaroot)
        {schemas}) t
  join pg_catalog.pg_class c on c.oid = t.oid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
"""
_BY_SCHEMA: LiteralString = """
        union
        select c.oid from pg_catalog.pg_publication p
          join pg_catalog.pg_publication_namespace s on s.pnpubid = p.oid
          join pg_catalog.pg_class c on c.relnamespace = s.pnnspid
         where p.pubname = %(name)s
           and c.relpersistence = 'p' and c.relkind in ('r', 'p')
           and not (c.relispartition and p.pubviaroot)
"""


def published_tables(connection: Connection, publication: str) -> dict[TableId, int] | None:
    """The tables of a publication with their oids, None if there is none of that name.

    Waits for no lock.
    """
    if publication_oid(connection, publication) is None:
        return None
    schemas = connection.info.server_version >= COLUMN_LISTS  # both came with 15
    query = sql.SQL(_PUBLISHED).format(schemas=sql.SQL(_BY_SCHEMA if schemas else ""))
    rows = connection.execute(query, {"name": publication}).fetchall()
    return {TableId(schema, name): int(oid) for oid, schema, name in rows}


def published_in_bulk(connection: Connection, publication: str, oid: int) -> bool:
    """Whether it has all tables, or the table's schema: then the table can't be removed alone."""
    schemas = " or exists (select from pg_catalog.pg_publication_namespace s where"
    schemas += " s.pnpubid = p.oid and s.pnnspid = c.relnamespace)"
    query = "select p.puballtables" + (
        schemas if connection.info.server_version >= COLUMN_LISTS else ""
    )
    row = connection.execute(
        f"{query} from pg_catalog.pg_publication p, pg_catalog.pg_class c"
        " where p.pubname = %s and c.oid = %s".encode(),
        (publication, oid),
    ).fetchone()
    return bool(row and row[0])


def sends_generated_columns(connection: Connection, publication: str) -> bool:
    """Whether stored generated columns are in the stream: since Postgres 18, as an option."""
    if connection.info.server_version < GENERATED_COLUMNS:
        return False
    row = connection.execute(
        "select pubgencols::text from pg_catalog.pg_publication where pubname = %s", (publication,)
    ).fetchone()
    return row is None or row[0] == "s"  # one that doesn't exist yet will be made so


def listed_columns(
    connection: Connection, publication: str, oids: Sequence[int]
) -> dict[int, frozenset[int]]:
    """The attribute numbers that are sent of each table with a column list, by the table's oid.

    The publication of inserts beside ``publication`` counts for what isn't in ``publication``.
    """
    if connection.info.server_version < COLUMN_LISTS:
        return {}
    found = connection.execute(
        "select distinct on (r.prrelid) r.prrelid::bigint, r.prattrs::int2[]"
        " from pg_catalog.pg_publication_rel r"
        " join pg_catalog.pg_publication p on p.oid = r.prpubid"
        " where p.pubname = any(%s) and r.prrelid = any(%s::oid[])"
        " order by r.prrelid, p.pubname = %s desc",
        ([publication, inserts_publication(publication)], list(oids), publication),
    ).fetchall()
    return {int(oid): frozenset(numbers) for oid, numbers in found if numbers is not None}


@dataclass(frozen=True, slots=True)
class SentColumns:
    """The columns of some tables that are in the stream.

    A column list (``listed``: numbers by the table's oid) decides alone. Without one a column is
    sent if ``generated`` has its letter: the catalog's ``attgenerated``, empty for an ordinary one.
    """

    generated: Collection[str]
    listed: Mapping[int, Collection[int]]

    def has(self, oid: int, number: int, generated: str) -> bool:
        numbers = self.listed.get(oid)
        return generated in self.generated if numbers is None else number in numbers


def sent_columns(connection: Connection, publication: str, oids: Sequence[int]) -> SentColumns:
    """The columns of these tables that the publication sends, or the one beside it."""
    stored = ("s",) if sends_generated_columns(connection, publication) else ()
    return SentColumns(("", *stored), listed_columns(connection, publication, oids))


def column_lists(
    connection: Connection, publication: str, tables: Mapping[TableId, int]
) -> dict[TableId, list[str]]:
    """The names of the listed columns, for each of ``tables`` (with oids) that has a list."""
    found = listed_columns(connection, publication, [*tables.values()])
    return {
        table: [
            str(name)
            for (name,) in connection.execute(
                "select attname from pg_catalog.pg_attribute where attrelid = %s"
                " and attnum = any(%s) order by attnum",
                (oid, list(found[oid])),
            )
        ]
        for table, oid in tables.items()
        if oid in found
    }


def unidentified(
    connection: Connection, publication: str, oids: Sequence[int]
) -> Mapping[int, Sequence[Trouble]]:
    """The heaps of these tables whose changed rows Postgres couldn't identify, by table's oid."""
    sent = sent_columns(connection, publication, oids)
    return troubles(connection, oids, sent.generated, sent.listed)


def refuse_partial_publication(
    connection: Connection,
    publication: str,
    table: SourceTable,
    excluded: Collection[str],
    *,
    inserts_only: bool = False,
) -> None:
    """Raise TableProblem if a publication made by hand leaves out something of ``table``.

    Looks at the one of the two that the table belongs in. A column list may leave out the
    ``excluded`` columns.
    """
    publication = publication_of(publication, inserts_only=inserts_only)
    row = connection.execute(
        "select pubinsert and pubtruncate and (pubupdate and pubdelete or %s), pubviaroot"
        " from pg_catalog.pg_publication where pubname = %s",
        (inserts_only, publication),
    ).fetchone()
    if row is None:
        return
    row_filter = lacks_columns = False
    if connection.info.server_version >= COLUMN_LISTS:
        row_filter, listed = connection.execute(
            "select prqual is not null, prattrs::int2[] from pg_catalog.pg_publication_rel r"
            " join pg_catalog.pg_publication p on p.oid = r.prpubid"
            " where p.pubname = %s and r.prrelid = %s",
            (publication, table.oid),
        ).fetchone() or (False, None)
        lacks_columns = listed is not None and any(
            not column.generated and column.number not in listed and column.name not in excluded
            for column in table.columns
        )
    shape = PublishedShape(bool(row[0]), bool(row[1]), bool(row_filter), lacks_columns)
    missing = shape.missing(publication, table.id, table.kind, inserts_only=inserts_only)
    if missing is not None:
        raise TableProblem(table.id, missing.what, missing.remedy)


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a publication leaves out of a table: a stable code, what, and the remedy."""

    code: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """How a publication sends a table's changes.

    ``lacks_columns``: its column list for the table lacks a wanted column.
    """

    every_operation: bool
    via_root: bool
    row_filter: bool
    lacks_columns: bool

    @property
    def letters(self) -> str:
        """The publication's own settings, as two letters."""
        return ("a" if self.every_operation else "-") + ("r" if self.via_root else "-")

    def missing(
        self, publication: str, table: TableId, kind: str, *, inserts_only: bool = False
    ) -> Missing | None:
        """The first thing that it leaves out of the table (of that relkind), None if nothing."""
        name = sql.Identifier(publication).as_string(None)
        if not self.every_operation:
            return Missing(
                "publication_operations",
                f"the publication {publication} doesn't publish every kind of change",
                f"alter publication {name} set (publish = '{_operations(inserts_only)}');",
            )
        if kind == "p" and not self.via_root:
            return Missing(
                "publication_via_partitions",
                f"the publication {publication} sends changes as those of the partitions",
                f"alter publication {name} set (publish_via_partition_root = true);",
            )
        whole = f"alter publication {name} drop table only {table}; -- it is added again as a whole"
        if self.row_filter:
            return Missing(
                "publication_row_filter",
                f"the publication {publication} has a row filter for it: what it leaves out would"
                " silently be missing",
                whole,
            )
        if self.lacks_columns:
            return Missing(
                "publication_column_list",
                f"the publication {publication} has a column list for it without a column that"
                " isn't in columns.exclude: its values would silently be missing",
                f"{whole}; or list that column, or exclude it",
            )
        return None


def inserts_publication(publication: str) -> str:
    """The name of the publication of inserts beside ``publication``."""
    return publication.encode()[: 63 - len("_inserts")].decode(errors="ignore") + "_inserts"


def publication_of(publication: str, *, inserts_only: bool) -> str:
    """The one of the two that a table belongs in."""
    return inserts_publication(publication) if inserts_only else publication


def _operations(inserts_only: bool) -> str:
    return "insert, truncate" if inserts_only else "insert, update, delete, truncate"


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
            sql.Literal(_operations(inserts_only=beside is not None)),
            sql.SQL(", publish_generated_columns = stored" if generated else ""),
        )
        .as_string(connection)
    )


def addition(
    connection: Connection,
    publication: str,
    tables: Sequence[TableId],
    lists: Mapping[TableId, Sequence[str]] = MappingProxyType({}),
) -> str:
    """The statement that adds tables to the publication; ``lists``: the column lists of some."""
    return _alteration(publication, "add", tables, lists).as_string(connection)


def removal(connection: Connection, publication: str, tables: Sequence[TableId]) -> str:
    """The statement that takes tables out of the publication."""
    return _alteration(publication, "drop", tables).as_string(connection)


def placement(
    connection: Connection, publication: str, tables: Sequence[TableId], other: str
) -> list[str]:
    """The statements that add tables; those in the other publication move, with column lists."""
    there = published_tables(connection, other) or {}
    moved = {table: there[table] for table in tables if table in there}
    added = addition(connection, publication, tables, column_lists(connection, other, moved))
    return [*([removal(connection, other, [*moved])] if moved else []), added]


def _alteration(
    publication: str,
    verb: LiteralString,
    tables: Sequence[TableId],
    lists: Mapping[TableId, Sequence[str]] = MappingProxyType({}),
) -> sql.Composed:
    """ONLY: tables that inherit from a table are published on their own, or not at all."""
    comma = sql.SQL(", ")
    named = [
        sql.SQL("only {} ({})").format(t.identifier, comma.join(map(sql.Identifier, lists[t])))
        if t in lists
        else sql.SQL("only {}").format(t.identifier)
        for t in tables
    ]
    return sql.SQL("alter publication {} " + verb + " table {}").format(
        sql.Identifier(publication), comma.join(named)
    )
