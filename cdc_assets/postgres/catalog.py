"""A table as the source's catalog describes it: its columns, its key, its size in pages.

Read-only queries and the values they return. ``types`` maps types to the lake; ``ctid`` cuts a
table into chunks.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

from cdc_assets.errors import TableProblem
from cdc_assets.messages.texts import copy_anew
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection


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
    generated: str = ""
    """The catalog's letter: s(tored), v(irtual), or empty for an ordinary column."""
    type_oid: int = 0
    modifier: int = -1
    """The declared type, which may be a domain, as in a Relation message; type_oid 0: unknown."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError unless ``data`` is a column: it becomes SQL."""
        return cls(
            str(data["name"]),
            str(data["type"]),
            int(data["number"]),
            bool(data.get("not_null", False)),
            str(data.get("generated", "")),
            int(data.get("type_oid", 0)),
            int(data.get("modifier", -1)),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@lru_cache(4096)  # of all tables, again and again, in a process that looks at them
def parse_columns(text: str) -> tuple[Column, ...]:
    """The columns of a JSON array. Raises like :meth:`Column.from_json`."""
    return tuple(Column.from_json(column) for column in json.loads(text))


# Views, materialized views, foreign tables: none of their changes is in the WAL.
QUERIED_KINDS = ("v", "m", "f")


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table as the source has it.

    ``key_columns`` identify a row in the log: the replica identity's index if one is set, else the
    primary key, else nothing. ``replica_identity`` is the catalog's letter: d(efault), n(othing),
    f(ull), i(ndex). ``kind`` is the catalog's relkind: r, p, or one of QUERIED_KINDS.
    """

    id: TableId
    oid: int
    kind: str
    columns: tuple[Column, ...]
    key_columns: tuple[str, ...]
    replica_identity: str

    def without(self, names: Collection[str]) -> SourceTable:
        """The table as if it lacked some columns."""
        return replace(self, columns=tuple(c for c in self.columns if c.name not in names))


_RELATIONS = """
select n.nspname::text, c.relname::text, c.oid, c.relkind::text, c.relreplident::text
  from unnest(%s::text[], %s::text[]) w (schema, name)
  join pg_catalog.pg_namespace n on n.nspname = w.schema
  join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name
"""

_COLUMNS = """
with recursive base as (
    select a.attrelid, a.attnum, a.atttypid as type, a.atttypmod as modifier
      from pg_catalog.pg_attribute a
     where a.attrelid = any(%(oids)s::oid[]) and a.attnum > 0 and not a.attisdropped
    union all
    select b.attrelid, b.attnum, t.typbasetype, t.typtypmod
      from base b join pg_catalog.pg_type t on t.oid = b.type and t.typtype = 'd'
)
select a.attrelid, a.attname, pg_catalog.format_type(b.type, b.modifier), a.attnum, a.attnotnull,
       a.attgenerated::text, a.atttypid::bigint, a.atttypmod
  from pg_catalog.pg_attribute a
  join base b on b.attrelid = a.attrelid and b.attnum = a.attnum
  join pg_catalog.pg_type t on t.oid = b.type and t.typtype <> 'd'
 order by a.attrelid, a.attnum
"""

# The replica identity's index wins over the primary key: old tuples carry its columns only. A
# deferrable primary key doesn't count: Postgres sends no old keys by it.
_KEYS = """
select distinct on (i.indrelid) i.indrelid, array(
    select a.attname
      from unnest(i.indkey::int2[]) with ordinality k (attnum, place)
      join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
     where k.place <= i.indnkeyatts
     order by k.place)
  from pg_catalog.pg_index i
 where i.indrelid = any(%(oids)s::oid[]) and i.indisvalid and i.indimmediate
   and (i.indisreplident or i.indisprimary)
 order by i.indrelid, i.indisreplident desc
"""


def describe(connection: Connection, table: TableId) -> SourceTable:
    """The table as it is now; raises TableProblem when it isn't there or has no rows to query."""
    found = describe_all(connection, [table])[table]
    if isinstance(found, TableProblem):
        raise found
    return found


def describe_all(
    connection: Connection, tables: Sequence[TableId]
) -> dict[TableId, SourceTable | TableProblem]:
    """Each table as it is now, or the problem of one that isn't there or has no rows to query."""
    relations = _relations(connection, tables)
    which = {"oids": [oid for oid, _, _ in relations.values()]}
    columns = dict[int, list[Column]]()
    for oid, *column in connection.execute(_COLUMNS, which):
        columns.setdefault(oid, []).append(Column(*column))
    keys = {oid: tuple(key) for oid, key in connection.execute(_KEYS, which)}
    found = dict[TableId, SourceTable | TableProblem]()
    for table in tables:
        oid, kind, identity = relations.get(table, (0, "", ""))
        if not oid:
            found[table] = TableProblem(
                table, "not found in the source", "Create it, or take it out of the configuration."
            )
        elif kind not in ("r", "p", *QUERIED_KINDS):
            found[table] = TableProblem(
                table, "it is not a table, nor a view: it has no rows", "Name the table itself."
            )
        else:
            mine = tuple(columns.get(oid, ()))
            found[table] = SourceTable(table, oid, kind, mine, keys.get(oid, ()), identity)
    return found


def _relations(
    connection: Connection, tables: Sequence[TableId]
) -> dict[TableId, tuple[int, str, str]]:
    """The oid, the kind and the replica identity of what has these names."""
    names = [table.schema for table in tables], [table.name for table in tables]
    rows = connection.execute(_RELATIONS, names).fetchall()
    return {
        TableId(schema, name): (int(oid), kind, letter) for schema, name, oid, kind, letter in rows
    }


def check_oid(connection: Connection, table: TableId, oid: int) -> None:
    """Raises TableProblem unless the source's table of this name has ``oid``, the log's."""
    if _relations(connection, [table]).get(table, (0,))[0] != oid:
        raise another(table, oid)


def another(table: TableId, oid: int) -> TableProblem:
    """The problem of a table that isn't the one with ``oid``, the log's, any more."""
    return TableProblem(
        table,
        f"the source's table of that name isn't the one that is registered (oid {oid})",
        copy_anew(table),
    )


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column that a table has or had: dropped ones keep their number for ever.

    ``missing`` is the value that rows older than the column show (Postgres's fast default), as
    text; None if none is known. ``has_default``: a default, identity or generation expression.
    """

    number: int
    name: str
    dropped: bool
    type_oid: int
    modifier: int
    generated: str
    has_default: bool
    missing: str | None


# attmissingval is an array of one element, of the column's own type.
_ATTRIBUTES = """
select a.attnum, a.attname, a.attisdropped, a.atttypid::bigint, a.atttypmod, a.attgenerated::text,
       a.atthasdef or a.attidentity <> '',
       case when a.atthasmissing then (a.attmissingval::text::text[])[1] end
  from pg_catalog.pg_attribute a
 where a.attrelid = %s and a.attnum > 0
 order by a.attnum
"""

_TYPE_NAMES = """
with recursive base as (
    select o.place, o.type, o.modifier
      from unnest(%s::oid[], %s::int[]) with ordinality o (type, modifier, place)
    union all
    select b.place, t.typbasetype, t.typtypmod
      from base b join pg_catalog.pg_type t on t.oid = b.type and t.typtype = 'd'
)
select pg_catalog.format_type(b.type, b.modifier)
  from base b left join pg_catalog.pg_type t on t.oid = b.type
 where t.typtype is distinct from 'd'
 order by b.place
"""


def attributes(connection: Connection, oid: int) -> tuple[Attribute, ...]:
    """Every column that the table has or had, by number; empty if there is no such table."""
    found = connection.execute(_ATTRIBUTES, (oid,)).fetchall()
    return tuple(Attribute(*row) for row in found)


def type_names(connection: Connection, types: Sequence[tuple[int, int]]) -> list[str]:
    """``format_type``'s spelling of types and their modifiers, of the base type for domains."""
    oids, modifiers = [oid for oid, _ in types], [modifier for _, modifier in types]
    return [row[0] for row in connection.execute(_TYPE_NAMES, (oids, modifiers)).fetchall()]


NO_FILE = 0


@dataclass(frozen=True, slots=True)
class Heap:
    """A relation that holds rows: a plain table, or a leaf of a partitioned one.

    ``filenode`` is its file: TRUNCATE, CLUSTER, VACUUM FULL and rewriting ALTERs give it another. A
    view and a foreign table, which are read as a whole, have none: NO_FILE. ``pages`` is the file's
    size as the file system has it: ``relpages`` may be stale or 0. ``toast_pages``: its TOAST
    table's, too. A heap that grows is the same one.
    """

    id: TableId
    oid: int
    filenode: int
    pages: int = field(compare=False)
    is_leaf: bool
    toast_pages: int = field(default=0, compare=False)


# Functions over oids answer as of now, regardless of the transaction's snapshot. The filenode is
# that of the snapshot: a file that came later holds rows that the snapshot doesn't show.
_HEAPS = """
select w.root, c.relkind::text, n.nspname, c.relname, c.oid, c.relfilenode,
       coalesce(pg_catalog.pg_relation_size(c.oid), 0) / b.size, c.oid <> w.root,
       coalesce(pg_catalog.pg_relation_size(nullif(c.reltoastrelid, 0)), 0) / b.size
  from unnest(%s::oid[]) w (root)
 cross join (select pg_catalog.current_setting('block_size')::bigint) b (size)
 cross join lateral (
        select relid from pg_catalog.pg_partition_tree(w.root::regclass) where isleaf
        union
        select oid::regclass from pg_catalog.pg_class
         where oid = w.root and relkind in ('r', 'v', 'm', 'f')) t
  join pg_catalog.pg_class c on c.oid = t.relid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.relkind <> 'p'
 order by w.root, c.oid
"""


def heaps(connection: Connection, table: TableId, oid: int) -> list[Heap]:
    """Where the rows of ``table`` are: itself, or the leaves of its partition tree.

    Empty for a partitioned table without partitions. Raises TableProblem for a foreign partition.
    """
    found = heaps_of(connection, {oid: table})[oid]
    if isinstance(found, TableProblem):
        raise found
    return found


def heaps_of(
    connection: Connection, tables: Mapping[int, TableId]
) -> dict[int, list[Heap] | TableProblem]:
    """The heaps of each table, by its oid, as :func:`heaps` has them."""
    found: dict[int, list[Heap] | TableProblem] = {oid: [] for oid in tables}
    for root, kind, schema, name, *facts in connection.execute(_HEAPS, (list(tables),)):
        there, heap = found[root], Heap(TableId(schema, name), *facts)
        if isinstance(there, TableProblem):
            continue
        if heap.is_leaf and kind != "r":
            found[root] = elsewhere(tables[root], heap.id)
        else:
            there.append(heap)
    return found


_HEAP_NAMES = """
with recursive part (root, oid) as (
    select w.oid, w.oid from unnest(%s::oid[]) w (oid)
    union all
    select p.root, i.inhrelid from part p
      join pg_catalog.pg_inherits i on i.inhparent = p.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition)
select p.root, n.nspname::text, c.relname::text, c.relkind::text, c.oid <> p.root
  from part p
  join pg_catalog.pg_class c on c.oid = p.oid and c.relkind <> 'p'
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 order by p.root, c.oid
"""


def heap_names(
    connection: Connection, tables: Sequence[SourceTable]
) -> dict[TableId, list[TableId] | TableProblem]:
    """What the :func:`heaps` of these tables are called; waits for no lock."""
    found: dict[int, list[TableId]] = {table.oid: [] for table in tables}
    foreign = dict[int, TableId]()
    for root, schema, name, kind, leaf in connection.execute(_HEAP_NAMES, ([*found],)):
        found[root].append(TableId(schema, name))
        if leaf and kind != "r":
            foreign.setdefault(root, TableId(schema, name))
    return {
        table.id: elsewhere(table.id, foreign[table.oid])
        if table.oid in foreign
        else found[table.oid]
        for table in tables
    }


def elsewhere(table: TableId, partition: TableId) -> TableProblem:
    return TableProblem(
        table,
        f"its partition {partition} is a foreign table, whose rows and changes are elsewhere",
        "Detach it, or replicate the other partitions as tables of their own.",
    )
