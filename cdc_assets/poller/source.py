"""What a poll notes of the source before it reads: where it is, its clock, and who is running."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import LiteralString

from psycopg import sql

from cdc_assets.config.query.sections import WatermarkConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import CoordinationError
from cdc_assets.poller.bounds import WHOLE, Running
from cdc_assets.poller.clock import MARGIN, Clock
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import ONLY_READS, Connection

# A statement that takes longer is given up. Rows of one time, which one transaction has written,
# are read by one statement: some ten million of them.
POLLS: LiteralString = f"set statement_timeout = '300s'; {ONLY_READS}"
# The one expression that asks the server for its time.
CLOCK: LiteralString = "pg_catalog.clock_timestamp()"
_MICROSECONDS: LiteralString = "(extract(epoch from {}) * 1000000)::bigint"
_WHERE: LiteralString = """
select in_recovery, case when in_recovery then pg_catalog.pg_last_wal_replay_lsn()
                         else pg_catalog.pg_current_wal_insert_lsn() end::text,
       {now}, {replayed}, case when in_recovery then {began} end,
       case when in_recovery then (select timeline_id from pg_catalog.pg_control_checkpoint())
            else ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(
                  case when in_recovery then null
                       else pg_catalog.pg_current_wal_insert_lsn() end), 1, 8))::bit(32)::int end
  from (select pg_catalog.pg_is_in_recovery() as in_recovery) one
"""
# Each transaction holds a lock on its virtual id, from its begin until it is visible; a prepared
# one has no session, and holds that on its own id. A session of another database can't write here,
# nor can one of ours that holds a copy's snapshot, or reads under it: these are READ ONLY, and a
# copy lasts for hours. No right is needed to see these columns.
_RUNNING: LiteralString = """
select l.pid is null, case when l.pid is null then l.transactionid::text
                           else l.virtualxid end
  from pg_catalog.pg_locks l
  left join pg_catalog.pg_stat_activity a on a.pid = l.pid
 where l.granted and (l.locktype = 'virtualxid' or (l.locktype = 'transactionid' and l.pid is null))
   and l.pid is distinct from pg_catalog.pg_backend_pid()
   and (a.datid is null or a.datid = (
        select oid from pg_catalog.pg_database where datname = pg_catalog.current_database()))
   and (a.application_name ~ '^cdc_assets (.* )?(pin|copy)$' and a.usesysid = (
        select oid from pg_catalog.pg_roles where rolname = session_user)) is not true
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the source is, and when.

    ``shown``: as of which time, in microseconds, it shows commits: its clock's, or on a standby
    that of the last commit that it has replayed. Since it was started, perhaps none: then it is the
    time of the checkpoint that it began at, which is earlier, and ``clock`` isn't dated: it doesn't
    compare with others.
    """

    lsn: Lsn
    clock: Clock
    shown: int
    in_recovery: bool
    timeline: int
    is_dated: bool = True


def place(source: Connection) -> Place:
    query = sql.SQL(_WHERE).format(
        now=sql.SQL(_MICROSECONDS).format(sql.SQL(CLOCK)),
        replayed=sql.SQL(_MICROSECONDS).format(
            sql.SQL("pg_catalog.pg_last_xact_replay_timestamp()")
        ),
        began=sql.SQL(_MICROSECONDS).format(
            sql.SQL("(select checkpoint_time from pg_catalog.pg_control_checkpoint())")
        ),
    )
    row = source.execute(query).fetchone()
    assert row is not None
    in_recovery, lsn, now, replayed, began, timeline = row
    if not in_recovery:
        return Place(Lsn.parse(lsn), Clock(now, time.monotonic()), now, False, int(timeline))
    shown, is_dated = (began, False) if replayed is None else (replayed, True)
    # How fast the primary's clock goes isn't known here: only that it went back.
    return Place(Lsn.parse(lsn), Clock(shown, None), shown, True, int(timeline), is_dated)


def running(source: Connection, at: Place) -> Running:
    """The transactions that are running in this database, but for the session's own.

    A standby doesn't know those of the primary, and has no others that write.
    """
    if at.in_recovery:
        return Running()
    found = source.execute(_RUNNING).fetchall()
    return Running(
        frozenset(str(one) for is_prepared, one in found if not is_prepared),
        frozenset(f"prepared {one}" for is_prepared, one in found if is_prepared),
    )


def position(source: Connection) -> Lsn:
    """An LSN that whatever the session has seen committed below; of a standby, about."""
    row = source.execute(
        "select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()"
        " else pg_catalog.pg_current_wal_insert_lsn() end::text"
    ).fetchone()
    assert row is not None
    return Lsn.parse(str(row[0]))


def watermark(table: TableConfig) -> WatermarkConfig:
    """The configured one; raises CoordinationError for a table without, which isn't queried."""
    if table.watermark is None:
        raise CoordinationError(f"{table.name} has no watermark: it isn't queried.")
    return table.watermark


def rule(of: WatermarkConfig) -> str:
    """By what bounds compare: of another column, or order, they are of no use."""
    return f"{of.order} {of.column}"


def bound(source: Connection, table: TableConfig, at: Place) -> int:
    """A number that no watermark which is taken from now on is below."""
    of = watermark(table)
    if of.order == "clock":
        return max(WHOLE, at.shown - MARGIN - of.units)
    query = sql.SQL("select max(t.{})::bigint from {} t")
    row = source.execute(query.format(sql.Identifier(of.column), table.rows)).fetchone()
    newest = row[0] if row else None
    return WHOLE if newest is None else max(WHOLE, int(newest) - of.units)
