"""The source's comments on its tables (``comment on``), for people who read the catalog.

Read-only queries and their values. Comments aren't in the stream, so only a query finds a changed
one; neither copy nor merge depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection


@dataclass(frozen=True, slots=True)
class Comments:
    """The comments on one table, and on its columns by attribute number."""

    table: str | None = None
    columns: Mapping[int, str] = field(default_factory=dict)


_COMMENTS = """
select d.objsubid, d.description
  from pg_catalog.pg_description d
 where d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass and d.objoid = %s
"""


def comments(connection: Connection, oid: int) -> Comments:
    """The comments of one table; none for one that is gone."""
    found: dict[int, str] = dict(connection.execute(_COMMENTS, (oid,)).fetchall())
    table = found.pop(0, None)
    return Comments(table, found)


@dataclass(frozen=True, slots=True)
class DescribedColumn:
    """A column as a person reads it."""

    name: str
    type: str
    not_null: bool
    is_key: bool
    comment: str | None


@dataclass(frozen=True, slots=True)
class Described:
    """A table as a person reads it; ``rows`` is its statistics' estimate, None without any."""

    table: TableId
    comment: str | None
    rows: int | None
    columns: tuple[DescribedColumn, ...]


_DESCRIBED = """
select n.nspname, c.relname, pg_catalog.obj_description(c.oid, 'pg_class'),
       coalesce((select sum(l.reltuples) filter (where l.reltuples >= 0)
                   from pg_catalog.pg_partition_tree(c.oid) t
                   join pg_catalog.pg_class l on l.oid = t.relid
                  where t.isleaf and c.relkind = 'p'),
                nullif(c.reltuples, -1))::bigint,
       a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull,
       coalesce(a.attnum = any(k.indkey::int2[]), false),
       pg_catalog.col_description(c.oid, a.attnum)
  from unnest(%s::text[], %s::text[]) as wanted (schema, name)
  join pg_catalog.pg_namespace n on n.nspname = wanted.schema
  join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = wanted.name
  join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
  left join pg_catalog.pg_index k on k.indrelid = c.oid and k.indisprimary
 order by n.nspname, c.relname, a.attnum
"""


def described(connection: Connection, tables: Sequence[TableId]) -> dict[TableId, Described]:
    """Those of ``tables`` that exist, in one query."""
    names = [table.schema for table in tables], [table.name for table in tables]
    found: dict[TableId, Described] = {}
    for schema, name, said, rows, *column in connection.execute(_DESCRIBED, names):
        table = TableId(schema, name)
        before = found[table].columns if table in found else ()
        columns = (*before, DescribedColumn(*column))
        found[table] = Described(table, said, rows, columns)
    return found
