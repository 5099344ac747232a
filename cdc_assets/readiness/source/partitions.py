"""Partitions whose changes aren't sent: ``pins.enrol`` and ``check`` refuse them.

With publish_via_partition_root the changes of a partition are sent as those of its topmost ancestor
that is published in any publication that the stream asks for, and never as its own. Changes of an
unlogged partition are in no WAL, whatever its root is. Only the catalogs are read, so no lock is
waited for. ``now`` checks the followed tables in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import inserts_publication, published_tables
from cdc_assets.postgres.session.connect import Connection

_ABOVE = """
select w.oid, n.nspname::text, c.relname::text
  from pg_catalog.pg_class w
  cross join lateral pg_catalog.pg_partition_ancestors(w.oid) with ordinality a (relid, place)
  join pg_catalog.pg_class c on c.oid = a.relid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where w.oid = any(%s::oid[]) and w.relispartition and a.relid <> w.oid
 order by w.oid, a.place desc
"""
# Of the relation c: the first of its heaps, itself included, that isn't in the WAL.
UNLOGGED: LiteralString = """
(with recursive part (oid) as (
    select c.oid
    union all
    select i.inhrelid from part p
      join pg_catalog.pg_inherits i on i.inhparent = p.oid
      join pg_catalog.pg_class k on k.oid = i.inhrelid and k.relispartition)
 select pg_catalog.format('%%I.%%I', k_n.nspname, k.relname)
   from part p
   join pg_catalog.pg_class k on k.oid = p.oid and k.relpersistence <> 'p'
   join pg_catalog.pg_namespace k_n on k_n.oid = k.relnamespace
  order by k.oid limit 1)
"""


def sent_as(root: object) -> str:
    """The problem of a partition whose ancestor ``root`` is published, in words."""
    return (
        f"it is a partition of {root}, which is published: its changes are sent as those of"
        f" {root}, never as its own"
    )


def under_roots(
    connection: Connection, config: SourceConfig, tables: Sequence[SourceTable]
) -> dict[TableId, TableProblem]:
    """The problems of partitions whose root is published, or will be."""
    above = dict[int, list[TableId]]()
    for oid, schema, name in connection.execute(_ABOVE, ([table.oid for table in tables],)):
        above.setdefault(oid, []).append(TableId(schema, name))
    published = _published_roots(connection, config) if above else []
    found = dict[TableId, TableProblem]()
    for table in tables:
        roots = above.get(table.oid, ())
        taken = next((root for there in published for root in roots if root in there), None)
        if taken is not None:
            found[table.id] = TableProblem(
                table.id,
                sent_as(taken),
                f"Replicate one of them alone: take {table.id} out of the configuration, or"
                f" {taken} out of it and of the publication.",
            )
    return found


def _published_roots(connection: Connection, config: SourceConfig) -> list[set[TableId]]:
    """The tables of each publication that sends changes as those of the topmost one."""
    found = list[set[TableId]]()
    for name in (config.publication, inserts_publication(config.publication)):
        row = connection.execute(
            "select pubviaroot from pg_catalog.pg_publication where pubname = %s", (name,)
        ).fetchone()
        if row is None or row[0]:  # one that doesn't exist yet will be made so
            there = {table.id for table in config.tables}
            found.append(there | (published_tables(connection, name) or {}).keys())
    return found


def _it(table: TableId, heap: str) -> str:
    return "it" if heap == str(table) else heap


def unlogged(connection: Connection, tables: Sequence[SourceTable]) -> dict[TableId, TableProblem]:
    """The problems of tables that aren't in the WAL, or have a partition that isn't."""
    query = f"select c.oid, {UNLOGGED} from pg_catalog.pg_class c where c.oid = any(%s::oid[])"
    rows = connection.execute(query.encode(), ([table.oid for table in tables],)).fetchall()
    first = {oid: heap for oid, heap in rows if heap is not None}
    return {
        table.id: TableProblem(
            table.id,
            f"{_it(table.id, first[table.oid])} is unlogged or temporary: its changes aren't in the"
            " WAL",
            f"alter table {first[table.oid]} set logged;",
        )
        for table in tables
        if table.oid in first
    }
