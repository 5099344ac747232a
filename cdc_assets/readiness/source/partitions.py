"""Partitions whose changes aren't sent: ``pins.enrol`` and ``check`` refuse them.

With publish_via_partition_root the changes of a partition are sent as those of its topmost ancestor
that is published in any publication that the stream asks for, and never as its own. Changes of an
unlogged partition are in no WAL, whatever its root is. Only the catalogs are read, so no lock is
waited for. ``now`` checks the followed tables in the same way.
"""

from __future__ import annotations

from typing import LiteralString

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publications import inserts_publication, published_tables
from cdc_assets.postgres.session.connect import Connection

_ABOVE = """
select n.nspname::text, c.relname::text
  from pg_catalog.pg_partition_ancestors(%(oid)s::oid::regclass) with ordinality a (relid, place)
  join pg_catalog.pg_class c on c.oid = a.relid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where a.relid <> %(oid)s::oid
 order by a.place desc
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


def refuse_under_root(connection: Connection, config: SourceConfig, table: SourceTable) -> None:
    """Raise TableProblem for a partition whose root is published, or will be."""
    above = [TableId(*row) for row in connection.execute(_ABOVE, {"oid": table.oid}).fetchall()]
    if not above:
        return
    for name in (config.publication, inserts_publication(config.publication)):
        row = connection.execute(
            "select pubviaroot from pg_catalog.pg_publication where pubname = %s", (name,)
        ).fetchone()
        if row is not None and not row[0]:  # one that doesn't exist yet will be made so
            continue
        there = {table.id for table in config.tables}
        there |= (published_tables(connection, name) or {}).keys()
        if taken := [root for root in above if root in there]:
            raise TableProblem(
                table.id,
                sent_as(taken[0]),
                f"Replicate one of them alone: take {table.id} out of the configuration, or"
                f" {taken[0]} out of it and of the publication.",
            )


def refuse_unlogged(connection: Connection, table: SourceTable) -> None:
    """Raise TableProblem for a table that isn't in the WAL, or has a partition that isn't."""
    row = connection.execute(
        f"select {UNLOGGED} from pg_catalog.pg_class c where c.oid = %s".encode(), (table.oid,)
    ).fetchone()
    if row is not None and row[0] is not None:
        raise TableProblem(
            table.id,
            f"{row[0]} is unlogged or temporary: its changes aren't in the WAL",
            f"alter table {row[0]} set logged;",
        )
