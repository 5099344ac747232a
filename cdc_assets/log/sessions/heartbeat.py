"""Liveness: heartbeats of processes that hold locks, and the end of sessions without one.

A lock decides which process flushes, and which one writes a lake table. It belongs to a session,
and a session outlives a process that is stopped, or a host that is cut off: no other process could
take over. So every process that holds such locks, or waits for them, records its sessions and beats
every few seconds; any process that finds another one silent for STALE_SECONDS ends that one's
sessions. The coordination server's clock is the only one that counts.

A heart judges others only while it beats itself. A heart that was stopped, or cut off, or has just
begun, finds all others silent if the server was away; so a silence counts only if the heart that
finds it has beaten without a break for as long.

A late process can do no harm as far as it acts through the very session that held the lock, because
that session is gone. A flusher does (invariants 1 and 2): it registers in that session, and
unregistered changes are never acknowledged. It notices, and waits; its walsender ends by
``wal_sender_timeout``, which ``flusher.stream`` ensures. A worker's late commit is harmless by
``lake.publish``.
"""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.session import HEARTBEAT_SECONDS, STALE_SECONDS
from cdc_assets.log.sessions.connection import connect_log
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.kept import KeptConnection
from cdc_assets.process.children import process_name
from cdc_assets.process.helper_thread import HelperThread, Note

logger = logging.getLogger(__name__)

_ADOPT = """
with mine as (select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()),
added as (
    insert into sessions (pid, backend_start, source, holder, process)
    select pid, backend_start, %s, %s, %s from mine on conflict do nothing)
select pid, backend_start from mine
"""
# Our own sessions that we gave up: behind a dead connection the server would keep one, with its
# lock, for hours.
_GIVEN_UP = """
s.holder = %(holder)s and (s.pid, s.backend_start) in (
    select * from unnest(%(pids)s::int[], %(starts)s::timestamptz[]))
"""
_BEAT = f"""
with beat as (
    update sessions s set heartbeat_at = clock_timestamp()
     where s.holder = %(holder)s and not ({_GIVEN_UP}))
select clock_timestamp()
"""
_END = f"""
select s.pid, s.backend_start, s.process, pg_terminate_backend(s.pid)
  from sessions s
  join pg_stat_activity a on a.pid = s.pid and a.backend_start = s.backend_start
 where s.source = %(source)s
   and (s.holder <> %(holder)s and s.heartbeat_at < %(unheard_since)s::timestamptz
        or {_GIVEN_UP})
"""
_FORGET = """
delete from sessions s
 where s.source = %(source)s and not exists (
       select from pg_stat_activity a
        where a.pid = s.pid and coalesce(a.backend_start = s.backend_start, true))
"""


def forget_ended(connection: Connection, source: str) -> int:
    """Delete the rows of sessions that are over; returns how many. Each beat does so, too."""
    return connection.execute(_FORGET, {"source": source}).rowcount


@dataclass(slots=True)
class Watch:
    """The time since which a heart beats without a break, by the server's clock."""

    last: datetime | None = None
    since: datetime | None = None

    def beat(self, now: datetime) -> datetime | None:
        """Note a heartbeat; processes silent since the returned time are dead. None: undecidable.

        A gap of over half of STALE_SECONDS, or a clock that went back, is a break.
        """
        stale = timedelta(seconds=STALE_SECONDS)
        if self.last is None or not timedelta() <= now - self.last <= stale / 2:
            self.since = now
        self.last = now
        return now - stale if self.since is not None and now - self.since >= stale else None


class Heart:
    """Beats for this process in a thread and a session of its own; ends the sessions of the dead.

    Its errors are logged, and it tries again: without the database no other process takes over.
    """

    def __init__(self, config: SourceConfig, note: Note = lambda _name, _trouble: None) -> None:
        self._config = config
        self.holder = uuid.uuid4()
        self._process = process_name()
        self._watch = Watch()
        self._lock = threading.Lock()
        self._mine: dict[int, datetime] = {}
        self._given_up: set[tuple[int, datetime]] = set()
        self._connection = KeptConnection(lambda: connect_log(config, "heart"))
        self._thread = HelperThread(
            "heart", self._beat, HEARTBEAT_SECONDS, at_end=self._connection.close, note=note
        )

    def start(self) -> None:
        self._thread.start()

    def adopt(self, store: LogStore) -> int:
        """Beat for a session from now on; called before it holds a lock. Returns its backend."""
        row = store.connection.execute(
            _ADOPT, (self._config.name, self.holder, self._process)
        ).fetchone()
        assert row is not None
        pid, start = row
        with self._lock:
            self._mine[pid] = start
        return int(pid)

    def give_up(self, pid: int) -> None:
        """Give up a closed or lost session: the heart ends it if the server still has it."""
        with self._lock:
            if (start := self._mine.pop(pid, None)) is not None:
                self._given_up.add((pid, start))

    def close(self) -> None:
        self._thread.close()

    def _beat(self) -> None:
        # A backend is named by its start, too: its number may come again.
        with self._lock:
            given_up = sorted(self._given_up)
        which: dict[str, Any] = {
            "source": self._config.name,
            "holder": self.holder,
            "pids": [pid for pid, _ in given_up],
            "starts": [start for _, start in given_up],
        }
        with self._connection.use() as connection:
            row = connection.execute(_BEAT, which).fetchone()
            assert row is not None
            which["unheard_since"] = self._watch.beat(row[0])
            ending = connection.execute(_END, which).fetchall()
            forget_ended(connection, self._config.name)
        for _, _, process, ended in ending:
            if ended:
                logger.warning("ended a session that %s has left behind", process)
        still_there = {(pid, start) for pid, start, _, _ in ending}
        with self._lock:
            self._given_up -= set(given_up) - still_there
