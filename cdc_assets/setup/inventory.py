"""The tables of a database: how large each is, its key, and what keeps it from being replicated.

Read from the catalogs, a handful of statements for however many tables. Sizes and numbers of rows
are Postgres's own estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import TableProblem
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.source.enrolment import facts_of
from cdc_assets.readiness.source.left import replicable
from cdc_assets.readiness.source.tables import obstacles

# Each table with its partitions.
_TABLES = """
with recursive part (root, oid) as (
    select c.oid, c.oid
      from unnest(%s::text[], %s::text[]) w (schema, name)
      join pg_catalog.pg_namespace n on n.nspname = w.schema
      join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name
    union all
    select p.root, i.inhrelid from part p
      join pg_catalog.pg_inherits i on i.inhparent = p.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition)
select n.nspname::text, r.relname::text, pg_catalog.count(*) - 1,
       case when pg_catalog.bool_and(c.reltuples >= 0 or c.relkind = 'p')
            then pg_catalog.sum(c.reltuples) filter (where c.relkind = 'r') end::bigint,
       pg_catalog.sum(c.relpages::bigint)
       * pg_catalog.current_setting('block_size')::bigint,
       pg_catalog.array_agg(c.oid::bigint)
  from part p
  join pg_catalog.pg_class c on c.oid = p.oid
  join pg_catalog.pg_class r on r.oid = p.root
  join pg_catalog.pg_namespace n on n.oid = r.relnamespace
 group by n.nspname, r.relname
 order by n.nspname, r.relname
"""
_SIZES = "select o, pg_catalog.pg_table_size(o::oid) from unnest(%s::bigint[]) o"
_IDENTITIES = {"d": "default", "n": "nothing", "f": "full", "i": "index"}


@dataclass(frozen=True, slots=True)
class Listed:
    """A table of the database.

    ``rows``: None where Postgres never looked. ``key``: the columns that identify a row in the log.
    ``obstacles``: why it can't be replicated as it is. ``configured``: whether the source has it;
    ``status`` knows whether anything of it was copied.
    """

    id: TableId
    rows: int | None
    bytes: int
    partitions: int
    key: tuple[str, ...]
    replica_identity: str
    obstacles: tuple[Finding, ...]
    configured: bool = False

    @property
    def state(self) -> str:
        """What a list shows where nothing is in the way."""
        return "nothing (configured)" if self.configured else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "table": str(self.id),
            "rows": self.rows,
            "bytes": self.bytes,
            "partitions": self.partitions,
            "key": list(self.key),
            "replica_identity": self.replica_identity,
            "obstacles": [finding.to_json() for finding in self.obstacles],
            "configured": self.configured,
        }


def inventory(connection: Connection, config: SourceConfig) -> list[Listed]:
    """All tables of the database that could be replicated; those of ``config`` as configured."""
    named = replicable(connection, config)
    names = [table.schema for table in named], [table.name for table in named]
    rows = connection.execute(_TABLES, names).fetchall()
    sizes = _sizes(connection, [oid for *_, oids in rows for oid in oids])
    configured = {table.id: table for table in config.tables}
    ids = [TableId(schema, name) for schema, name, *_ in rows]
    every = {table: configured.get(table) or TableConfig(name=str(table)) for table in ids}
    # Each as if it were configured; tables of one name are told apart by who chooses among them.
    whole = config.model_copy(update={"tables": tuple(every.values())})
    facts = facts_of(connection, whole, ids)
    found = []
    for table, (_, _, partitions, count, pages, oids) in zip(ids, rows, strict=True):
        there = facts.tables[table]
        if isinstance(there, TableProblem):
            continue  # it was dropped meanwhile
        found.append(
            Listed(
                table,
                count,
                sum(sizes[oid] for oid in oids) if sizes else int(pages),
                partitions,
                there.key_columns,
                _IDENTITIES[there.replica_identity],
                tuple(obstacles(connection, whole, every[table], facts)),
                table in configured,
            )
        )
    return found


def _sizes(connection: Connection, oids: Sequence[int]) -> Mapping[int, int]:
    """Bytes of each table with what is beside it; empty if one is locked."""
    try:
        with connection.transaction():
            connection.execute("set local lock_timeout = '50ms'")
            return {oid: size or 0 for oid, size in connection.execute(_SIZES, ([*oids],))}
    except psycopg.errors.LockNotAvailable:
        return {}
