"""Sessions that keep ours waiting at the source, and for how long ours hold up its vacuum.

Read-only, and never waits itself: the facts come from the server's lists of sessions and locks.
Sessions of ours are known by their application_name. Every role sees the process and application
of other roles' sessions; the start of their transactions takes pg_read_all_stats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# Added to messages where that right would show more.
UNSEEN = "(grant pg_read_all_stats to our role to see since when)"


@dataclass(frozen=True, slots=True)
class Wait:
    """A session of ours that waits for a lock, with the lock's object and its holders."""

    session: str
    waits_for: str
    seconds: float
    holders: tuple[str, ...]

    @property
    def sentence(self) -> str:
        held = "; ".join(self.holders) or "nobody any more"
        return (
            f"{self.session} waits for {self.waits_for} since {self.seconds:.0f} s, held by {held}"
        )


# A foreign session in words; a is its row of pg_stat_activity.
_WHO: LiteralString = """
'process ' || a.pid || ' (' || coalesce(nullif(a.application_name, ''), 'no application name')
|| coalesce(', role ' || a.usename, '') || ')'
|| case when a.xact_start is null then ' {unseen}'
        else ' since ' || to_char(a.xact_start at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') end
""".replace("{unseen}", UNSEEN)

_WAITS: LiteralString = """
with waiting as materialized (
    select a.pid, a.application_name, a.query_start from pg_catalog.pg_stat_activity a
     where a.wait_event_type = 'Lock' and a.pid <> pg_catalog.pg_backend_pid()
       and (a.application_name like any(%s)))
select w.application_name,
       coalesce((select case when l.relation is not null
                             then (select pg_catalog.format('%%I.%%I', n.nspname, c.relname)
                                     from pg_catalog.pg_class c
                                     join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                                    where c.oid = l.relation)
                             when l.locktype in ('transactionid', 'virtualxid')
                             then 'the end of a transaction'
                             else 'a lock (' || l.locktype || ')' end
                   from pg_catalog.pg_locks l where l.pid = w.pid and not l.granted limit 1),
                'a lock'),
       coalesce(extract(epoch from clock_timestamp() - w.query_start), 0)::float8,
       array(select coalesce((select {who} from pg_catalog.pg_stat_activity a where a.pid = b.pid),
                             'a prepared transaction (pg_prepared_xacts)')
               from unnest(pg_catalog.pg_blocking_pids(w.pid)) b (pid))
  from waiting w
 order by 3 desc
""".replace("{who}", _WHO)


def waits(connection: Connection, source: str, slot: str) -> tuple[Wait, ...]:
    """Our sessions that wait for a lock now, the longest wait first."""
    ours = [f"cdc_assets {_literally(source)} %"]
    if slot:
        ours.append(f"cdc_assets pin {_literally(slot)[:40]}%")
    found = connection.execute(_WAITS, (ours,)).fetchall()
    return tuple(
        Wait(name.removeprefix("cdc_assets "), what, seconds, tuple(holders))
        for name, what, seconds, holders in found
    )


def _literally(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


# What is read with relation {}: its partitions or heirs, and what a view selects from.
BELOW: LiteralString = """
select i.inhrelid from pg_catalog.pg_inherits i where i.inhparent = {0}
union all
select d.refobjid from pg_catalog.pg_rewrite w
  join pg_catalog.pg_class v on v.oid = w.ev_class and v.relkind = 'v'
  join pg_catalog.pg_depend d
    on d.classid = 'pg_catalog.pg_rewrite'::pg_catalog.regclass and d.objid = w.oid
   and d.refclassid = 'pg_catalog.pg_class'::pg_catalog.regclass
 where w.ev_class = {0} and w.ev_type = '1'
"""
_LOCKED: LiteralString = """
with recursive tree as (
    select w.schema_name, w.table_name, c.oid
      from unnest(%(schemas)s::text[], %(names)s::text[]) w (schema_name, table_name)
      join pg_catalog.pg_namespace n on n.nspname = w.schema_name
      join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.table_name
     union
    select t.schema_name, t.table_name, b.oid from tree t, lateral ({below}) b (oid))
select distinct on (1, 2) t.schema_name, t.table_name,
       coalesce({who}, 'a prepared transaction (pg_prepared_xacts)')
  from pg_catalog.pg_locks l
  join tree t on t.oid = l.relation
  left join pg_catalog.pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'relation' and l.mode = any(%(modes)s)
   and l.database = (select oid from pg_catalog.pg_database where datname = current_database())
   and l.pid is distinct from pg_catalog.pg_backend_pid()
 order by 1, 2, l.granted desc
""".replace("{who}", _WHO).replace("{below}", BELOW.format("t.oid"))
# Lock modes that reading waits for, and those that ALTER PUBLICATION waits for.
_AGAINST_READING = ("AccessExclusiveLock",)
_AGAINST_ALTER = (
    *("ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock"),
    *_AGAINST_READING,
)


def locked(
    connection: Connection, tables: Sequence[TableId], *, against_alter: bool = False
) -> dict[TableId, str]:
    """The tables that can't be read now (or altered), each with who is to blame.

    A session that waits for such a lock counts, too: all others wait behind it. So does a prepared
    transaction, which has no session. A partitioned table is as locked as any of its partitions,
    and a view as what it selects from.
    """
    if not tables:
        return {}
    found = connection.execute(
        _LOCKED,
        {
            "schemas": [table.schema for table in tables],
            "names": [table.name for table in tables],
            "modes": list(_AGAINST_ALTER if against_alter else _AGAINST_READING),
        },
    ).fetchall()
    return {TableId(schema, name): who for schema, name, who in found}


# Locks of a table, or of a partition, that SHARE waits for; one that waits itself is served first.
_AGAINST_SHARE = ("RowExclusiveLock", *(m for m in _AGAINST_ALTER if m != "ShareLock"))
_WRITERS_OF: LiteralString = """
with recursive part (root, oid) as (
    select w.oid, w.oid from unnest(%s::oid[]) w (oid)
    union all
    select p.root, i.inhrelid from part p
      join pg_catalog.pg_inherits i on i.inhparent = p.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition)
select p.root::bigint, l.virtualtransaction,
       coalesce({who}, 'a prepared transaction (pg_prepared_xacts)')
  from pg_catalog.pg_locks l
  join part p on p.oid = l.relation
  left join pg_catalog.pg_stat_activity a on a.pid = l.pid
 where l.locktype = 'relation' and l.mode = any(%s)
   and l.database = (select oid from pg_catalog.pg_database where datname = current_database())
""".replace("{who}", _WHO)


def writers_of(connection: Connection, tables: Sequence[int]) -> dict[int, dict[str, str]]:
    """By oid, the transactions that a SHARE lock of each table waits for, with who they are.

    Those that have written to it, prepared ones included; and whoever vacuums, analyzes or alters
    it, or builds an index.
    """
    found: dict[int, dict[str, str]] = {oid: {} for oid in tables}
    for oid, transaction, who in connection.execute(_WRITERS_OF, ([*tables], list(_AGAINST_SHARE))):
        found[oid][transaction] = who
    return found


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A session of ours that holds a pin's snapshot, and so keeps vacuum from removing rows.

    ``xmin_age``: in transactions.
    """

    backend_pid: int
    seconds: float
    xmin_age: int


def held_snapshots(connection: Connection, source: str) -> tuple[HeldSnapshot, ...]:
    """The pins' sessions at the source."""
    found = connection.execute(
        "select pid, coalesce(extract(epoch from clock_timestamp() - xact_start), 0)::float8,"
        " age(backend_xmin)::bigint from pg_catalog.pg_stat_activity"
        " where application_name = %s and backend_xmin is not null order by 2 desc",
        (f"cdc_assets {source} pin"[:63],),
    ).fetchall()
    return tuple(HeldSnapshot(int(pid), seconds, int(age)) for pid, seconds, age in found)


# Sessions that have a transaction ID: slot creation waits until they end. Every role sees the IDs.
_WRITERS: LiteralString = """
select {who} from pg_catalog.pg_stat_activity a
 where a.backend_xid is not null and a.pid <> pg_catalog.pg_backend_pid()
 order by pg_catalog.age(a.backend_xid) desc limit 3
""".replace("{who}", _WHO)
_PREPARED: LiteralString = """
select pg_catalog.format('the prepared transaction %L (%s) since %s', gid, owner,
                         date_trunc('second', prepared))
  from pg_catalog.pg_prepared_xacts order by prepared limit 3
"""


def writers(connection: Connection) -> list[str]:
    """The oldest transactions that write and so hold up slot creation, prepared ones included."""
    rows = [*connection.execute(_WRITERS).fetchall(), *connection.execute(_PREPARED).fetchall()]
    return [str(row[0]) for row in rows]
