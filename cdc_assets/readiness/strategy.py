"""Which tables are copied without a snapshot that a session would have to hold.

An incremental copy reads a table in many short transactions. What moves between them shows up
twice or not at all; the log from the pin on evens that out, by key, in a mirror (see
``snapshot.table_copy``). What can't be so is pinned.
"""

from __future__ import annotations

from collections.abc import Sequence

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.ctid import TID_RANGE_SCANS
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# With auto, of a table and its partitions; half an hour to an hour of reading.
LARGE_BYTES = 100 * 10**9

# Of a table that wasn't vacuumed or analyzed since it was restored, Postgres has no estimate.
_SIZES = """
select r.oid::bigint,
       pg_catalog.sum(
         case when c.relpages > 0
              then (c.relpages + greatest(coalesce(o.relpages, 0), 0))
                * pg_catalog.current_setting('block_size')::bigint
              else coalesce(pg_catalog.pg_relation_size(c.oid), 0)
                + coalesce(pg_catalog.pg_relation_size(c.reltoastrelid), 0) end)
  from pg_catalog.unnest(%s::oid[]) r (oid)
  left join lateral pg_catalog.pg_partition_tree(r.oid) t on true  -- none of a plain table
  join pg_catalog.pg_class c on c.oid = coalesce(t.relid, r.oid)
  left join pg_catalog.pg_class o on o.oid = c.reltoastrelid and c.reltoastrelid <> 0
 group by 1
"""


def why_pinned(
    config: SourceConfig, mode: str, key: Sequence[str], server_version: int
) -> str | None:
    """What keeps a table from an incremental copy; None if nothing does."""
    if not config.publishes:
        return "it is only copied, so no log evens out what moves meanwhile"
    if config.snapshot.from_ is not None:
        return "snapshot.from has one moment of it"
    if config.postgres.standby:
        return "a standby is read under one snapshot"
    if mode != "mirror":
        return f"its lake table, in mode {mode}, would show what moves meanwhile twice"
    if not key:
        return "it has no key by which the log could even out what moves meanwhile"
    if server_version < TID_RANGE_SCANS:
        return "before Postgres 14 a range of pages is read by reading the whole table"
    return None


def incremental(
    source: Connection, config: SourceConfig, rows: Sequence[TableRow]
) -> frozenset[TableId]:
    """Those of the waiting tables that are to be copied in short transactions."""
    version = source.info.server_version
    wanted = {
        row.table: config.strategy(row.table)
        for row in rows
        if why_pinned(config, row.mode, row.key_columns, version) is None
    }
    large = set[int]()
    if unsure := [row.oid for row in rows if wanted.get(row.table) == "auto"]:
        sizes = source.execute(_SIZES, (unsure,)).fetchall()
        large = {int(oid) for oid, size in sizes if size > LARGE_BYTES}
    return frozenset(
        row.table
        for row in rows
        if (strategy := wanted.get(row.table)) == "incremental"
        or (strategy == "auto" and row.oid in large)
    )


def adopts(config: SourceConfig, row: TableRow) -> bool:
    """Whether the table is to be adopted: at its first beginning alone; a later one is a copy."""
    begins = row.epoch == 1 and row.snapshot_lsn is None
    return begins and config.table(row.table).adopt is not None


def at_horizon(
    source: Connection, config: SourceConfig, rows: Sequence[TableRow]
) -> frozenset[TableId]:
    """Those of the waiting tables whose logs begin at a proven horizon, not under a snapshot."""
    adopted = {row.table for row in rows if adopts(config, row)}
    others = [row for row in rows if row.table not in adopted]
    return incremental(source, config, others) | adopted
