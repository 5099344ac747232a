"""Publications: which tables they have, and which columns and rows of a table they send.

A source has two. The configured one publishes every operation, and has only tables whose changed
rows Postgres can identify (``identity``): Postgres would refuse the others' UPDATE and DELETE. The
one beside it, ``…_inserts``, publishes INSERT and TRUNCATE alone, so Postgres refuses nothing.
Changing them never waits long for a lock. ``pins.enrol`` decides which tables are published, and
when.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# The first server versions with row filters and column lists, and with generated columns in the
# stream.
COLUMN_LISTS, GENERATED_COLUMNS = 150000, 180000


def inserts_publication(publication: str) -> str:
    """The name of the publication of inserts beside ``publication``."""
    return publication.encode()[: 63 - len("_inserts")].decode(errors="ignore") + "_inserts"


def publication_of(publication: str, *, inserts_only: bool) -> str:
    """The one of the two that a table belongs in."""
    return inserts_publication(publication) if inserts_only else publication


def operations(inserts_only: bool) -> str:
    return "insert, truncate" if inserts_only else "insert, update, delete, truncate"


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
    """The columns of these tables that the publication sends, or the one beside it.

    Without one (its name is empty) each column with stored values is read.
    """
    if not publication:
        return SentColumns(("", "s"), {})
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


def row_filters(connection: Connection, publication: str, oids: Sequence[int]) -> dict[int, str]:
    """The row filters of those tables that have one, as the server writes them, by oid."""
    if connection.info.server_version < COLUMN_LISTS:
        return {}
    found = connection.execute(
        "select r.prrelid::bigint, pg_catalog.pg_get_expr(r.prqual, r.prrelid)"
        " from pg_catalog.pg_publication_rel r"
        " join pg_catalog.pg_publication p on p.oid = r.prpubid"
        " where p.pubname = %s and r.prrelid = any(%s::oid[]) and r.prqual is not null",
        (publication, list(oids)),
    ).fetchall()
    return {int(oid): str(text) for oid, text in found}


def filter_columns(
    connection: Connection, publication: str, oids: Sequence[int]
) -> dict[int, frozenset[int]]:
    """The attribute numbers that the row filters use, by the table's oid; 0 is the whole row."""
    if connection.info.server_version < COLUMN_LISTS:
        return {}
    found = connection.execute(
        "select r.prrelid::bigint, array(select m[1]::int from pg_catalog.regexp_matches("
        "r.prqual::text, ':varattno (-?[0-9]+)', 'g') m)"
        " from pg_catalog.pg_publication_rel r"
        " join pg_catalog.pg_publication p on p.oid = r.prpubid"
        " where p.pubname = %s and r.prrelid = any(%s::oid[]) and r.prqual is not null",
        (publication, list(oids)),
    ).fetchall()
    return {int(oid): frozenset(numbers) for oid, numbers in found}
