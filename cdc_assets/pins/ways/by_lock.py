"""Pins by lock (``snapshot.pin: lock``): a snapshot of a moment in which nobody writes to a table.

For servers that have no slot to spare, or where a stranger's long transaction holds up the making
of one: that waits for all who have written anywhere in the cluster, a lock for those alone who have
written to its table.

In one message to the server: lock the table (SHARE), note the WAL's insert position c and take the
transaction's snapshot S in one statement, unlock, export S. Why S and c are exact for the table:

- Who wrote to it held ROW EXCLUSIVE until its end, in whichever session, as a subtransaction, or
  prepared; a direct write to a partition holds that of the partition, which is locked with its
  table. Locks are released after the transaction is visible, and so after the wait for synchronous
  standbys (``postgres.horizon``). So whoever wrote before our lock committed below c, and is in S,
  or has rolled back. Whoever writes after it commits at c or above, and isn't in S.
- ALTER PUBLICATION ... ADD TABLE came first, and held a lock of the table that ours waits for, too.
  Who wrote to the table without being published is over.
- It is exact for no other table. S and c of one pin serve several tables only if all of their locks
  were held at the moment of S. One after the other, a table that is unlocked again, or not locked
  yet, has writers who are below c and not in S: their changes would be lost.
- S shows commits that a crash, or a failover to a synchronous standby, may still take back, with
  other ones in their place below c. So a pin counts once everything below c is safe (``secured``);
  a slot's snapshot shows nothing but what is flushed.

What it costs others. A lock that waits has all writers that come later wait behind it; one whose
own ``lock_timeout`` is shorter fails. So:

- It never waits while it holds another lock. Several tables at once, and the partitions of one, are
  locked if they are free (NOWAIT). Only a table of its own, or the root of a partitioned one, is
  waited for. An index that is built concurrently waits, at its end, even for a session that does no
  more than that, as it has a snapshot. So a wait is shorter than ``deadlock_timeout``: a deadlock,
  which would end somebody's statement, is over before the server looks for it, and no autovacuum is
  ended for a lock of ours.
- It waits for ``lock_at_most`` at most, and only if all who were in the way that long ago are gone
  by now. A long transaction, or VACUUM, is not waited for: the next try comes later.
- Between two waits are five to fifteen times as long, at random.
- The lock is gone by a ROLLBACK TO SAVEPOINT in the same message, or by the error that ends it.
  The server needs nothing of us in between, so a client that dies, or hangs, holds no lock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from cdc_assets.errors import SlotBusy, first_line
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.horizon import secured
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection, connect
from cdc_assets.postgres.session.waits import writers_of
from cdc_assets.postgres.slots import NewSlot
from cdc_assets.readiness.source.rights import unlockable

# How often a tick tries to lock a table that is written to, and its pauses, in lengths of a wait.
_TRIES, _PAUSES = 3, (5.0, 15.0)
# Each pin is held by a session. With so many, other tables wait until some are copied.
MOST_PINS = 16
# Locks that are taken at once: the server has room for some thousands, of all sessions together. A
# table of more partitions is locked by itself; not at all if it would take half of that room, which
# others would lack.
AT_ONCE, _ROOM_SHARE = 500, 0.5
# For what a snapshot shows to be flushed, by synchronous standbys as well.
_SECURED_SECONDS = 10.0

_MESSAGE: LiteralString = """
begin isolation level repeatable read read only;
set local statement_timeout = {at_most};
savepoint unlocked;
{locks};
select pg_catalog.pg_current_wal_insert_lsn()::text;
rollback to savepoint unlocked;
release savepoint unlocked;
set local statement_timeout = 0;
select pg_catalog.pg_export_snapshot()
"""
_LOCKS = """
with recursive part (root, oid) as (
    select w.oid, w.oid from unnest(%s::oid[]) w (oid)
    union all
    select p.root, i.inhrelid from part p
      join pg_catalog.pg_inherits i on i.inhparent = p.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition)
select p.root::bigint, c.relkind = 'p', pg_catalog.count(*)
  from part p join pg_catalog.pg_class c on c.oid = p.root group by 1, 2
"""
# After how many seconds of a wait the server looks for a deadlock, and ends one of those in it; and
# how many locks it has room for, at least.
_LIMITS: LiteralString = """
select pg_catalog.max(setting::float8) filter (where name = 'deadlock_timeout') / 1000,
       pg_catalog.max(setting::int) filter (where name = 'max_locks_per_transaction')
       * pg_catalog.sum(setting::int) filter (
           where name in ('max_connections', 'max_prepared_transactions'))
  from pg_catalog.pg_settings
"""
# How much of the first a wait of ours may take.
_WAIT_SHARE = 0.9
_IN_THE_WAY = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.DeadlockDetected,
)
# Another table has the name by now, or none, or a right is gone; or there is no room for the locks.
_CANT = (
    psycopg.errors.OutOfMemory,
    psycopg.errors.UndefinedTable,
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.WrongObjectType,
    psycopg.errors.InsufficientPrivilege,
)
_TOO_MANY = (
    "its pin would take {:,} locks at once, and the server has room for {:,} of all sessions"
    " together: raise max_locks_per_transaction, or set pin: slot"
)


class ByLock:
    """Takes snapshots of waiting tables, and notes what those wait for that get none."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._store = pipeline, pipeline.store
        self._at_most = self._wait = pipeline.config.snapshot.lock_at_most.total_seconds()
        self._session: Connection | None = None
        self.told: frozenset[TableId] = frozenset()
        """The tables whose rows say what they wait for."""

    def pins(
        self, source: Connection, rows: Sequence[TableRow], held: Sized
    ) -> Iterator[tuple[list[TableRow], NewSlot]]:
        """Snapshots, each with the tables that it is exact for, until MOST_PINS are ``held``.

        The caller holds a snapshot before it asks for the next one. Raises psycopg.Error, and
        SlotBusy if what a snapshot shows isn't safe within seconds.
        """
        why = dict.fromkeys((row.table for row in rows), "")
        self.told = frozenset(why)
        if not rows:
            return
        refused = unlockable(source, {row.oid: row.table for row in rows})
        why |= {table: f"{found.message} {found.remedy}" for table, found in refused.items()}
        full = f"{MOST_PINS} pins are held: its turn comes when other tables are copied"
        tried = self._tried(source, [row for row in rows if row.table not in refused])
        try:
            while len(held) < MOST_PINS and (one := next(tried, None)) is not None:
                some, made = one
                if isinstance(made, NewSlot):
                    yield some, made
                    for row in some:
                        del why[row.table]
                else:
                    why |= dict.fromkeys((row.table for row in some), made)
        finally:
            if self._session is not None:
                self._session.close()
                self._session = None
        for table, what in why.items():
            self._store.note_waiting(table, what or full)

    def _tried(
        self, source: Connection, rows: Sequence[TableRow]
    ) -> Iterator[tuple[list[TableRow], NewSlot | str]]:
        """Tables with their snapshot, or with what kept them from one at the last try."""
        ((seconds, room),) = source.execute(_LIMITS).fetchall()
        self._wait = min(self._at_most, _WAIT_SHARE * seconds)
        locks, parted = _locks(source, rows)
        large = [row for row in rows if row.oid in parted and locks[row.oid] > _ROOM_SHARE * room]
        for row in large:
            yield [row], _TOO_MANY.format(locks[row.oid], room)
        rows = [row for row in rows if row not in large]
        there = writers_of(source, [row.oid for row in rows])
        busy = [row for row in rows if there[row.oid]]
        free = [row for row in rows if not there[row.oid]]
        groups, room = list[list[TableRow]](), 0
        for row in free:
            room -= locks[row.oid]
            if room < 0:
                groups.append([])
                room = AT_ONCE - locks[row.oid]
            groups[-1].append(row)
        while groups:
            some = groups.pop()
            made = self._locked(source, some, parted)
            if made is None and len(some) == 1:
                busy += some
            elif not isinstance(made, NewSlot) and (half := len(some) // 2):
                groups += [some[half:], some[:half]]
            else:
                yield some, made or ""
        for _ in range(_TRIES if busy else 0):
            before = writers_of(source, [row.oid for row in busy])
            time.sleep(self._wait)
            there, some, busy = writers_of(source, [row.oid for row in busy]), busy, []
            for row in some:
                waits = before[row.oid].keys().isdisjoint(there[row.oid])
                if (made := self._locked(source, [row], parted, waits=waits)) is None:
                    busy.append(row)
                else:
                    yield [row], made
            if not busy:
                return
            time.sleep(self._wait * random.uniform(*_PAUSES))  # noqa: S311 - unlike others
        for row in busy:
            who = "; ".join([*there[row.oid].values()][:3]) or "one transaction after the other"
            yield (
                [row],
                f"its pin waits until nobody has written to it, or vacuums or alters it: {who}",
            )

    def _locked(
        self,
        source: Connection,
        rows: Sequence[TableRow],
        parted: Collection[int],
        *,
        waits: bool = False,
    ) -> NewSlot | str | None:
        """A snapshot that is exact for all of the tables; None: somebody is in the way.

        ``parted``: the partitioned ones. ``waits``: for the lock of one that comes by itself. In
        another case a text says why there is none.
        """
        names = [row.table.identifier for row in rows]
        first = sql.SQL(", ").join(sql.SQL("only {}").format(name) for name in names)
        locks = [sql.SQL("lock table {} in share mode").format(first)]
        locks[0] += sql.SQL("" if waits else " nowait")
        if whole := [row.table.identifier for row in rows if row.oid in parted]:
            every = sql.SQL(", ").join(whole)
            locks.append(sql.SQL("lock table {} in share mode nowait").format(every))
        at_most = sql.Literal(max(1, int(1000 * self._wait / len(locks))))
        message = sql.SQL(_MESSAGE).format(at_most=at_most, locks=sql.SQL(";\n").join(locks))
        session = self._session = self._session or connect(
            self._pipeline.source_dsn, application_name=f"cdc_assets {self._store.source} lock"
        )
        try:
            point, snapshot = _answers(session.execute(message))
        except (*_IN_THE_WAY, *_CANT) as error:
            session.execute("rollback")
            return first_line(error) if isinstance(error, _CANT) else None
        if not secured(source, _SECURED_SECONDS):
            raise SlotBusy(
                f"synchronous standbys didn't confirm within {_SECURED_SECONDS:.0f} s what a"
                " snapshot shows: a failover could take it back.",
                "See pg_stat_replication and synchronous_standby_names; the pin is tried again.",
            )
        self._session = None  # it is the snapshot's now
        return NewSlot(Lsn.parse(point), snapshot, session)


def _answers(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[str]:
    """What the statements that return anything have returned."""
    found = [str(row[0]) for row in cursor] if cursor.description else []
    while cursor.nextset():
        found += [str(row[0]) for row in cursor] if cursor.description else []
    return found


def _locks(
    source: Connection, rows: Sequence[TableRow]
) -> tuple[Mapping[int, int], frozenset[int]]:
    """By oid, how many locks each table takes; and which of them are partitioned."""
    found = source.execute(_LOCKS, ([row.oid for row in rows],)).fetchall()
    locks = dict.fromkeys((row.oid for row in rows), 1) | {oid: number for oid, _, number in found}
    return locks, frozenset(oid for oid, parted, _ in found if parted)
