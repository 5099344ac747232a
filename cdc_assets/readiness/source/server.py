"""Looking at a source before anything is created: what is missing, and what to do about it.

Every finding reports the fault and the remedy, in words that can be pasted into psql. Nothing is
changed. Further checks of a server belong here; a finding's ``code`` stays the same for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.log.asked.wishes import dropped_since
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.messages.findings import Finding, Severity
from cdc_assets.postgres.ctid import TID_RANGE_SCANS
from cdc_assets.postgres.session.connect import Connection, pools_transactions
from cdc_assets.postgres.slots import FAILOVER_SLOTS, SlotStatus, on_standby, slot_status
from cdc_assets.readiness.asked.log import log_findings
from cdc_assets.readiness.asked.markers import marker_findings
from cdc_assets.readiness.asked.signals import signal_findings
from cdc_assets.readiness.queries import lag_findings
from cdc_assets.readiness.source.enrolment import Facts, facts_of
from cdc_assets.readiness.source.left import left_findings, new_findings
from cdc_assets.readiness.source.now import review
from cdc_assets.readiness.source.publications import publication_findings
from cdc_assets.readiness.source.record import Recorded
from cdc_assets.readiness.source.restart_record import compare_slot
from cdc_assets.readiness.source.roles import role_findings
from cdc_assets.readiness.source.tables import table_findings
from cdc_assets.readiness.standby import standby_findings

# The first minor versions whose decoding sees a table added to a publication at once, whatever
# transactions are under way.
STALE_RELATIONS = {13: 21, 14: 18, 15: 13, 16: 9, 17: 5}
# The oldest server whose pgoutput and publication commands we use.
OLDEST = 130000


def preflight(
    connection: Connection,
    config: SourceConfig,
    store: LogStore | None = None,
    dsn: str = "",
    *,
    tables: Sequence[TableConfig] | None = None,
    record: bool = True,
) -> list[Finding]:
    """All findings, the server's first, then those of ``tables`` (default: all).

    With ``store``, the log's record of the source is compared too (``dsn``: the source's). Without
    ``record``, checks that the restart record makes are left to it: a standby, the slot's state.
    """
    wanted = config.tables if tables is None else tables
    facts = facts_of(connection, config, [table.id for table in wanted])
    objects = [*_objects(connection, config, store, record=record)] if config.decodes else []
    # The record knows why a table isn't there: it needn't be created.
    explained = {f.table for f in objects if f.code in ("table_dropped", "table_renamed")}
    return [
        *_server(connection, config, dsn, standby=record),
        *role_findings(connection, config),
        *objects,
        *(signal_findings(connection, config) if config.decodes else ()),
        *marker_findings(connection, config),
        *lag_findings(connection, config),
        *(_before_a_slot(connection, config) if config.log is not None else ()),
        *(_beside(connection, config, store) if config.log is not None and record else ()),
        *log_findings(config, store, facts.tables),
        *(
            replace(finding, table=table.name)
            for table in wanted
            for finding in _unless_locked(connection, config, table, facts)
            if finding.code != "table_missing" or table.name not in explained
        ),
    ]


def _unless_locked(
    connection: Connection, config: SourceConfig, table: TableConfig, facts: Facts
) -> list[Finding]:
    """The findings about a table; if it is locked, the only finding is that."""
    try:
        return list(table_findings(connection, config, table, facts))
    except psycopg.errors.LockNotAvailable:
        return [
            Finding(
                "table_locked",
                "warning",
                f"{table.name} can't be looked at: somebody has locked it.",
                "Look again once that is over: select * from pg_locks where mode ="
                f" 'AccessExclusiveLock' and relation = '{table.name}'::regclass;",
            )
        ]


def _one(connection: Connection, query: str, *params: object) -> Any:
    row = connection.execute(query.encode(), params or None).fetchone()
    return row[0] if row else None


def _server(
    connection: Connection, config: SourceConfig, dsn: str, *, standby: bool
) -> Iterator[Finding]:
    version = connection.info.server_version
    name = _one(connection, "select current_setting('server_version')")
    if version < OLDEST:
        yield Finding(
            "server_version",
            "error",
            f"Postgres {name} is too old: 13 is the first that works.",
            "Upgrade the server.",
        )
    elif version < TID_RANGE_SCANS:
        yield Finding(
            "server_version",
            "warning",
            f"Postgres {name} has no TID range scans: a table is copied by one reader.",
            "Upgrade to 14 or later for parallel copies.",
        )
    else:
        yield Finding("server_version", "info", f"Postgres {name}.", "")
    if config.publishes:
        yield from _decoding(connection, config, standby=standby)
    if config.streams and dsn and pools_transactions(connection, dsn):
        yield Finding(
            "pooler",
            "error",
            "the source is reached through a transaction pooler: exported snapshots and session"
            " locks don't survive there, and it can't stream.",
            "Give the database's own address in postgres.dsn.",
        )


def _decoding(connection: Connection, config: SourceConfig, *, standby: bool) -> Iterator[Finding]:
    """Findings about a server whose changes come by a slot."""
    version = connection.info.server_version
    name = _one(connection, "select current_setting('server_version')")
    if version % 10000 < STALE_RELATIONS.get(version // 10000, 0):
        yield Finding(
            "server_minor_version",
            "warning",
            f"Postgres {name} may lose changes of a table that is added to a publication while"
            " older transactions write to it (mended in 13.21, 14.18, 15.13, 16.9 and 17.5).",
            "Install the latest minor version.",
        )
    level = _one(connection, "select current_setting('wal_level')")
    if level != "logical":
        yield Finding(
            "wal_level",
            "error",
            f"wal_level is {level}; logical replication needs logical.",
            "alter system set wal_level = logical; -- then restart the server; on RDS and Aurora"
            " rds.logical_replication = 1, on Cloud SQL cloudsql.logical_decoding = on",
        )
    yield from standby_findings(connection, config)
    if standby and not config.postgres.standby and _one(connection, "select pg_is_in_recovery()"):
        yield Finding(
            "in_recovery",
            "error",
            "this server is a standby: it has no publication of its own to create.",
            "Give the primary's address in postgres.dsn; or, from Postgres 16 on, stream from the"
            " standby: postgres.standby: true.",
        )
    keep = _one(connection, "select current_setting('max_slot_wal_keep_size')")
    if keep == "-1":
        yield Finding(
            "wal_unbounded",
            "warning",
            "max_slot_wal_keep_size is -1: if nothing reads the slot, WAL fills the disk.",
            "alter system set max_slot_wal_keep_size = '50GB'; select pg_reload_conf(); -- or what"
            " your disk can spare",
        )


# A transaction that has run for longer than this at the source is reported: slots wait for it.
LONG_TRANSACTION_SECONDS = 60.0
# The share of max_slot_wal_keep_size: with less than this left the flusher has to catch up soon.
HEADROOM = 0.5
# Slots and senders that a remedy adds to those that there may be.
_MORE = 10

_LONG_TRANSACTIONS = """
select 'process ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''),
       extract(epoch from clock_timestamp() - xact_start)::float8
  from pg_catalog.pg_stat_activity
 where backend_xid is not null and xact_start < clock_timestamp() - make_interval(secs => %(old)s)
 union all
select 'the prepared transaction ' || quote_literal(gid),
       extract(epoch from clock_timestamp() - prepared)::float8
  from pg_catalog.pg_prepared_xacts
 where prepared < clock_timestamp() - make_interval(secs => %(old)s)
 order by 2 desc
"""


def _free_slots(
    connection: Connection, needed: int, severity: Severity = "error"
) -> Iterator[Finding]:
    most = _one(connection, "select current_setting('max_replication_slots')::int")
    free = most - _one(connection, "select count(*) from pg_catalog.pg_replication_slots")
    if free < needed:
        yield Finding(
            "slots_exhausted",
            severity,
            f"{free} replication slots are free; {needed} needed: each pin of a table takes one"
            " while it is made.",
            f"alter system set max_replication_slots = {most + _MORE}; -- then restart the server;"
            " or drop slots that nobody needs",
        )


def _before_a_slot(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """Findings that would keep a slot from being made."""
    by_slot = any(config.pin_by(table.id) == "slot" for table in config.tables)
    # The slot, and a temporary one for tables added later.
    yield from _free_slots(connection, config.decodes + by_slot)
    old = {"old": LONG_TRANSACTION_SECONDS}
    rows = connection.execute(_LONG_TRANSACTIONS, old).fetchall()
    if not _one(connection, "select pg_has_role('pg_read_all_stats', 'usage')"):
        role = _one(connection, "select current_user")
        yield Finding(
            "stats_privilege",
            "warning",
            f"the role {role} can't see for how long other roles' transactions have been running,"
            " which hold up the making of a slot.",
            f"grant pg_read_all_stats to {sql.Identifier(str(role)).as_string(connection)};",
        )
    if rows:
        listed = ", ".join(f"{who} for {seconds:.0f} s" for who, seconds in rows[:5])
        yield Finding(
            "long_transactions",
            "warning",
            f"a slot can only be made once these end, which write: {listed}.",
            "Let them end, or end them: select pg_terminate_backend(pid); rollback prepared '…'.",
        )


def _senders(connection: Connection) -> Iterator[Finding]:
    most = _one(connection, "select current_setting('max_wal_senders')::int")
    free = most - _one(connection, "select count(*) from pg_catalog.pg_stat_get_wal_senders()")
    if free < 1:
        yield Finding(
            "senders_exhausted",
            "error",
            "all of max_wal_senders are in use: nobody else can stream.",
            f"alter system set max_wal_senders = {most + _MORE}; -- then restart the server; or"
            " stop a receiver that nobody needs (pg_stat_replication)",
        )


def _headroom(slot: SlotStatus) -> Iterator[Finding]:
    safe, keep = slot.safe_bytes, slot.keep_bytes
    if safe is not None and keep and safe < HEADROOM * keep:
        yield Finding(
            "slot_headroom",
            "warning",
            f"the slot {slot.name} loses its WAL after another {max(0, safe) / 1e6:,.0f} MB"
            f" (max_slot_wal_keep_size is {keep / 1e6:,.0f} MB).",
            "Start the flusher, or raise max_slot_wal_keep_size; a reload is enough.",
        )


def _objects(
    connection: Connection,
    config: SourceConfig,
    store: LogStore | None,
    *,
    record: bool,
) -> Iterator[Finding]:
    slot = slot_status(connection, config.slot)
    if slot is None:
        yield from _before_a_slot(connection, config)
        yield Finding(
            "slot", "info", f"the slot {config.slot} doesn't exist yet; it will be created.", ""
        )
    else:
        yield Finding(
            "slot",
            "info",
            f"the slot {config.slot} exists and keeps {slot.retained_bytes / 1e6:,.1f} MB of WAL.",
            "",
        )
        yield from _headroom(slot)
        knows = connection.info.server_version >= FAILOVER_SLOTS and not on_standby(connection)
        if knows and not slot.failover:
            yield Finding(
                "slot_failover",
                "warning",
                f"the slot {config.slot} isn't a failover slot: a promoted standby won't have it.",
                "Restart the flusher while nobody else uses the slot: it makes it one.",
            )
    if slot is None or slot.active_pid is None:
        yield from _senders(connection)
    yield from publication_findings(connection, config)
    if not record:
        return
    if slot is not None:
        rows = () if store is None else store.tables()
        pinned = {row.table for row in rows if row.state != TableState.WAITING}
        by_slot = {table.id for table in config.tables if config.pin_by(table.id) == "slot"}
        waits = not by_slot <= pinned
        yield from _free_slots(connection, 1, "error" if waits else "warning")
    yield from _beside(connection, config, store)
    if store is not None:
        found, _ = review(connection, config, store)
        yield from (f for f in found.source if f.code != "in_recovery")  # reported above
        yield from (replace(finding, table=str(row.table)) for row, finding in found.tables)
    elif slot is not None:
        yield from compare_slot(Recorded(None), slot, _database(connection), config.slot)


def _beside(
    connection: Connection, config: SourceConfig, store: LogStore | None
) -> Iterator[Finding]:
    yield from left_findings(connection, config, store)
    yield from new_findings(connection, config)
    if store is not None and (since := dropped_since(store)) is not None:
        yield Finding(
            "source_dropped",
            "error",
            f"source {store.source} was dropped at {since}.",
            "Take its configuration out; or cdc-assets resume: it copies every table anew.",
        )


def _database(connection: Connection) -> str:
    return str(_one(connection, "select current_database()::text"))
