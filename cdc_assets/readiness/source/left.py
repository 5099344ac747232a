"""Leftovers that ``check`` reports: slots without a reader, tables out of the configuration.

A renamed source, and a table that was taken out of the configuration, go on using disk space at the
source and in staging. That may be on purpose, so nothing is removed, only reported with the SQL.
"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.store import LogStore
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.publications import inserts_publication, published_tables, removal
from cdc_assets.postgres.session.connect import Connection

# A slot's reader may be between two sessions; its slot keeps less than this meanwhile.
UNREAD_BYTES = 10**9

_UNREAD = """
select slot_name::text, pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                                        else pg_current_wal_lsn() end, restart_lsn)::bigint
  from pg_catalog.pg_replication_slots
 where plugin = 'pgoutput' and database = current_database() and not temporary
   and active_pid is null and restart_lsn is not null and slot_name <> %s
 order by 2 desc
"""


def left_findings(
    connection: Connection, config: SourceConfig, store: LogStore | None
) -> Iterator[Finding]:
    """Findings about leftovers of this source's past at the database."""
    for slot, kept in connection.execute(_UNREAD, (config.slot,)).fetchall():
        yield Finding(
            "slot_unread",
            "warning" if kept >= UNREAD_BYTES else "info",
            f"nobody reads the slot {slot}, which keeps {kept / 1e6:,.1f} MB of WAL: it is of a"
            " source that is down, or was renamed or removed, or of another program.",
            f"select pg_drop_replication_slot({sql.Literal(slot).as_string(connection)});"
            " -- if nobody needs it",
        )
    if store is None:
        return
    whole, inserts = config.publication, inserts_publication(config.publication)
    published = {name: published_tables(connection, name) or {} for name in (whole, inserts)}
    wanted = {table.id for table in config.tables}
    for row in store.tables():
        name = inserts if row.inserts_only else whole
        if row.table in wanted or row.table not in published[name]:
            continue
        yield Finding(
            "table_left",
            "warning",
            f"{row.table} isn't in the configuration any more, but its changes go on being staged,"
            " and nothing removes them.",
            f"{removal(connection, name, [row.table])}; -- as its owner; or put it back",
        )
