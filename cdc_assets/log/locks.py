"""Session locks: rows of the coordination schema that are valid while their session lives.

Any role that may connect to a database can take any advisory lock there, so advisory locks don't
decide here. A lock is a row, which takes rights in the schema, and belongs to a *life*: an advisory
lock with a random key, one for each session. The server releases a life with its session, however
that ends, after everything that the session had under way; no clean-up is needed, and nothing is
held open at the database meanwhile.

Two sessions never have one lock (invariant 9): a row changes hands by compare-and-swap, from the
life that was seen in it, once that life is over. An ended life never returns: its process and role
go with the key, and no other session has all three. A stranger that takes such a key has another
process ID; a stranger that later gets that ID has another role.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg.pq import TransactionStatus

from cdc_assets.postgres.names import TableId

# Names of a source's locks, beside those of its flusher and its tables' writers.
PINS_LOCK = "pins"  # the slot and pins are made, tables registered
HEAPS_LOCK = "heaps"  # heaps' files are compared with the record
CATALOG_LOCK = "catalog"  # a lake table is created
ALONE_LOCK = "merge alone"  # a batch that ended a Spark server is merged
# Poll interval of a waiting session: at first, as a share of its wait so far, and at most.
_LOOK_SECONDS, _LOOK_SHARE, _LOOK_AT_LEAST_SECONDS = 0.05, 0.05, 0.5
# How often a waiting session renews its wish, and checks in the server's list of locks, which costs
# more, whether the holder lives.
_WISH_SECONDS = 1.0
# A wish reserves the lock for this long after it was last renewed.
_WISHED_SECONDS = 3.0

_BEGIN = """
select pg_catalog.pg_advisory_lock(%s), pid, usesysid from pg_catalog.pg_stat_activity
 where pid = pg_catalog.pg_backend_pid()
"""
_LIVES: LiteralString = """
select p.classid::bigint << 32 | p.objid::bigint as life, p.pid, a.usesysid as role
  from pg_catalog.pg_locks p join pg_catalog.pg_stat_activity a on a.pid = p.pid
 where p.locktype = 'advisory' and p.granted and p.mode = 'ExclusiveLock' and p.objsubid = 1
   and p.database = (select oid from pg_catalog.pg_database
                      where datname = pg_catalog.current_database())
"""
_LOOK: LiteralString = f"""
select life, case when life is null then false when not %s then true
       else exists ({_LIVES} and p.pid = l.pid and a.usesysid = l.role
                    and p.classid::bigint << 32 | p.objid::bigint = l.life) end, pid
  from locks l where source = %s and name = %s
"""
# A server crash ends all sessions, so the locks it loses are void: no commit waits for the disk.
_LAX: LiteralString = "(select pg_catalog.set_config('synchronous_commit', 'off', true)) lax"
# No session has a valid wish. A wish further ahead than any session sets is forged, or from before
# the server's clock was set back.
_UNWANTED: LiteralString = """
(wanted_by is null or wanted_until is null
 or wanted_until not between clock_timestamp() and clock_timestamp() + interval '1 minute')
"""
_TAKE_NEW: LiteralString = f"""
insert into locks (source, name, life, pid, role)
select %(source)s, %(name)s, %(life)s, %(pid)s, %(role)s from {_LAX} on conflict do nothing
"""
_TAKE: LiteralString = f"""
update locks set life = %(life)s, pid = %(pid)s, role = %(role)s,
       wanted_by = nullif(wanted_by, %(life)s)
  from {_LAX}
 where source = %(source)s and name = %(name)s and life is not distinct from %(seen)s
   and (wanted_by = %(life)s or {_UNWANTED})
"""
_WISH: LiteralString = f"""
update locks set wanted_by = %(life)s,
       wanted_until = clock_timestamp() + make_interval(secs => %(seconds)s)
  from {_LAX}
 where source = %(source)s and name = %(name)s
   and (wanted_by = %(life)s or {_UNWANTED})
"""
_NO_WISH: LiteralString = f"""
update locks set wanted_by = null from {_LAX}
 where source = %(source)s and name = %(name)s and wanted_by = %(life)s
"""
_GIVE: LiteralString = f"""
with gone as (
    delete from locks using {_LAX}
     where source = %(source)s and name = %(name)s and life = %(life)s
       and {_UNWANTED} returning 1)
update locks set life = null
 where source = %(source)s and name = %(name)s and life = %(life)s
   and not exists (select from gone)
"""
_FORGET: LiteralString = f"""
with lives as materialized ({_LIVES}),
dead as (select name, life from locks l where source = %(source)s and not exists (
    select from lives v where v.life = l.life and v.pid = l.pid and v.role = l.role))
delete from locks k using dead d
 where k.source = %(source)s and k.name = d.name and k.life is not distinct from d.life
   and {_UNWANTED}
"""
_WAITS: LiteralString = f"""
with wanted as materialized (select * from locks where source = %s and not {_UNWANTED}),
lives as materialized ({_LIVES}),
who as (select v.*, coalesce((select process from sessions s where s.pid = v.pid
                               order by heartbeat_at desc limit 1) || ', ', '')
               || 'session ' || v.pid as name from lives v)
select l.name, w.name, h.name from wanted l join who w on w.life = l.wanted_by
  left join who h on h.life = l.life and h.pid = l.pid and h.role = l.role
 order by l.name
"""


def flusher_lock(source: str) -> str:
    """The lock of the active flusher."""
    return f"flusher:{source}"


def write_lock(table: TableId) -> str:
    """The lock of a lake table's one writer (invariant 9)."""
    return f"write:{table}"


@dataclass(frozen=True, slots=True)
class LockWait:
    """The session that is first in turn for one of our locks, and the lock's holder."""

    lock: str
    session: str
    holder: str | None

    @property
    def sentence(self) -> str:
        held = self.holder or "nobody any more"
        return f"{self.session} waits for our lock {self.lock}, held by {held}"


class SessionLocks:
    """The locks of one session on ``connection``, which is in autocommit mode, for one source.

    Locks are re-entrant: a session gives a lock back as often as it took it.
    """

    def __init__(self, connection: psycopg.Connection[Any], source: str) -> None:
        self.connection = connection
        self.source = source
        self._life: dict[str, Any] = {}
        self._held = Counter[str]()

    def try_lock(self, name: str) -> bool:
        """Take the lock ``name`` if nobody has it, or waits for it."""
        return self._take(name, judge=True)

    def lock(self, name: str) -> None:
        """Wait for the lock ``name``, in turn with others."""
        self._wait([name], None)

    def lock_within(self, name: str, seconds: float) -> bool:
        """Wait for the lock ``name``, in turn with others; False if it takes longer."""
        return bool(self.lock_some_within([name], seconds))

    def lock_some_within(self, names: Sequence[str], seconds: float) -> set[str]:
        """Wait for all of these locks at once, in turn with others; those that were taken.

        If it raises, it keeps those that it had.
        """
        return self._wait(names, time.monotonic() + seconds)

    def unlock(self, name: str) -> None:
        """Give back the lock ``name``; nothing if this session doesn't have it."""
        if self._held[name] > 1:
            self._held[name] -= 1
        elif self._held.pop(name, 0) and not self.connection.closed:  # else it went with that
            try:
                self._outside()
                self.connection.execute(_GIVE, self._me(name))
            except BaseException:
                self.connection.close()  # a surviving session would keep the lock unawares
                raise

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Wait for the lock ``name``, in turn with others; hold it meanwhile."""
        self.lock(name)
        try:
            yield
        finally:
            self.unlock(name)

    def lock_holder(self, name: str) -> int | None:
        """The backend that holds the lock, this session's included; None if it is free."""
        row = self._look(name, judge=True)
        return int(row[2]) if row is not None and row[1] else None

    def is_locked(self, name: str) -> bool:
        """Whether any session, this one included, holds the lock."""
        return self.lock_holder(name) is not None

    def has_flusher(self) -> bool:
        """Whether a flusher of the source is active."""
        return self.is_locked(flusher_lock(self.source))

    def lock_waits(self) -> tuple[LockWait, ...]:
        """The sessions that wait for locks of the source, with each lock's holder."""
        found = self.connection.execute(_WAITS, (self.source,)).fetchall()
        return tuple(LockWait(*row) for row in found)

    def forget_locks(self) -> None:
        """Remove the lock rows of ended sessions."""
        self.connection.execute(_FORGET, {"source": self.source})

    def _look(self, name: str, *, judge: bool) -> tuple[Any, ...] | None:
        return self.connection.execute(_LOOK, (judge, self.source, name)).fetchone()

    def _me(self, name: str) -> dict[str, Any]:
        if not self._life:
            key = secrets.randbits(64) - (1 << 63)
            row = self.connection.execute(_BEGIN, (key,)).fetchone()
            assert row is not None
            self._life = {"life": key, "pid": row[1], "role": row[2], "source": self.source}
        return {**self._life, "name": name}

    def _outside(self) -> None:
        # A surrounding transaction could undo this, would block others, and reach the disk late.
        status = self.connection.info.transaction_status
        assert status not in (TransactionStatus.INTRANS, TransactionStatus.INERROR)

    def _take(self, name: str, *, judge: bool) -> bool:
        self._outside()
        if name in self._held:
            self._held[name] += 1
            return True
        found = self._look(name, judge=judge)
        if found is not None and found[1]:
            if found[0] != self._life.get("life"):
                return False
            self._held[name] = 1  # an earlier call took it, but was interrupted
            return True
        me = self._me(name)
        if found is None:
            done = self.connection.execute(_TAKE_NEW, me)
        else:
            done = self.connection.execute(_TAKE, {**me, "seen": found[0]})
        if done.rowcount:
            self._held[name] = 1
        return bool(done.rowcount)

    def _wait(self, names: Sequence[str], deadline: float | None) -> set[str]:
        """Returns once all of ``names`` are taken, or at the deadline."""
        began, wished, left = time.monotonic(), 0.0, list(names)
        while True:
            due = time.monotonic() >= wished + _WISH_SECONDS
            left = [name for name in left if not self._take(name, judge=due)]
            late = deadline is not None and time.monotonic() >= deadline
            if not left or late:
                for name in left:
                    self.connection.execute(_NO_WISH, self._me(name))
                return set(names) - set(left)
            if due:
                for name in left:
                    wish = {**self._me(name), "seconds": _WISHED_SECONDS}
                    self.connection.execute(_WISH, wish)
                wished = time.monotonic()
            waited = time.monotonic() - began
            time.sleep(min(max(_LOOK_SHARE * waited, _LOOK_SECONDS), _LOOK_AT_LEAST_SECONDS))
