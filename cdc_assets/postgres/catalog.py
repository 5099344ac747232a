"""What the source's catalog says of a table: its columns, its key, its size in pages.

Read-only queries and the values they return. What a type becomes in the lake is in ``types``; how
a table is cut into chunks is in ``ctid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import psycopg

from cdc_assets.errors import TableProblem
from cdc_assets.postgres.names import TableId

Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Column:
    """A column as the source has it.

    ``type`` is ``format_type``'s spelling (``numeric(12,2)``, ``text[]``, ``shop.tier``), of the
    base type where the column's type is a domain. ``number`` is the attribute number, which a
    rename keeps.
    """

    name: str
    type: str
    number: int
    not_null: bool = False
    generated: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table as the source has it.

    ``key_columns`` identify a row in the log: the replica identity's index if one is set, else the
    primary key, else nothing. ``replica_identity`` is the catalog's letter: d(efault), n(othing),
    f(ull), i(ndex). ``kind`` is the catalog's relkind: r or p. ``updated``: whether the statistics
    know of an UPDATE or DELETE on it.
    """

    id: TableId
    oid: int
    kind: str
    columns: tuple[Column, ...]
    key_columns: tuple[str, ...]
    replica_identity: str
    updated: bool

    @property
    def identifies_rows(self) -> bool:
        """Whether Postgres lets an UPDATE or DELETE through once the table is published."""
        return (bool(self.key_columns) and self.replica_identity != "n") or (
            self.replica_identity == "f"
        )


_RELATION = """
select c.oid, c.relkind::text, c.relreplident::text,
       coalesce(pg_catalog.pg_stat_get_tuples_updated(c.oid), 0)
       + coalesce(pg_catalog.pg_stat_get_tuples_deleted(c.oid), 0) > 0
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where n.nspname = %s and c.relname = %s
"""

_COLUMNS = """
with recursive base as (
    select a.attnum, a.atttypid as type, a.atttypmod as modifier
      from pg_catalog.pg_attribute a
     where a.attrelid = %(oid)s and a.attnum > 0 and not a.attisdropped
    union all
    select b.attnum, t.typbasetype, t.typtypmod
      from base b join pg_catalog.pg_type t on t.oid = b.type and t.typtype = 'd'
)
select a.attname, pg_catalog.format_type(b.type, b.modifier), a.attnum, a.attnotnull,
       a.attgenerated <> ''
  from pg_catalog.pg_attribute a
  join base b on b.attnum = a.attnum
  join pg_catalog.pg_type t on t.oid = b.type and t.typtype <> 'd'
 where a.attrelid = %(oid)s
 order by a.attnum
"""

# The replica identity's index wins over the primary key: old tuples carry its columns only.
_KEY = """
select array(
    select a.attname
      from unnest(i.indkey::int2[]) with ordinality k (attnum, place)
      join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
     where k.place <= i.indnkeyatts
     order by k.place)
  from pg_catalog.pg_index i
 where i.indrelid = %s and i.indisvalid and (i.indisreplident or i.indisprimary)
 order by i.indisreplident desc
 limit 1
"""


def describe(connection: Connection, table: TableId) -> SourceTable:
    """The table as it is now; raises TableProblem when it isn't there or isn't a table."""
    with connection.cursor() as cursor:
        cursor.execute(_RELATION, (table.schema, table.name))
        row = cursor.fetchone()
        if row is None:
            raise TableProblem(
                table, "not found in the source", "Create it, or take it out of the configuration."
            )
        oid, kind, identity, updated = row
        if kind not in ("r", "p"):
            raise TableProblem(
                table,
                "it is not a table: views, foreign tables and sequences have no changes to follow",
                "Replicate the tables underneath it.",
            )
        cursor.execute(_COLUMNS, {"oid": oid})
        columns = tuple(Column(*found) for found in cursor.fetchall())
        cursor.execute(_KEY, (oid,))
        key = cursor.fetchone()
    found = tuple(key[0]) if key else ()
    return SourceTable(table, int(oid), kind, columns, found, identity, updated)


def size_pages(connection: Connection, oid: int) -> int:
    """The table's main fork in pages as the file system has it: ``relpages`` may be stale or 0."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select pg_catalog.pg_relation_size(%s)"
            " / pg_catalog.current_setting('block_size')::bigint",
            (oid,),
        )
        row = cursor.fetchone()
    return int(row[0]) if row and row[0] is not None else 0
