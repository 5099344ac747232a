"""Who is alive: heartbeats of processes that hold locks, and the end of those without one.

An advisory lock decides who flushes, and who writes a lake table. It belongs to a session, and a
session outlives a process that is stopped, or a host that is cut off: nobody would take over. So
every process that holds such locks, or waits for them, writes down its sessions and says every few
seconds that it lives; whoever finds that another one wasn't heard of for STALE_SECONDS ends that
one's sessions. The coordination server's clock is the only one that counts.

A late one can do no harm as far as what it does goes through the very session that held the lock:
that session is gone. Why the rest of it is harmless is said where it is done (``flusher.turn``,
``spark.publish``).
"""

from __future__ import annotations

import logging
import threading
import uuid
from contextlib import suppress

import psycopg

from cdc_assets.config import SourceConfig
from cdc_assets.log.store import LogStore
from cdc_assets.pipeline import connect_log
from cdc_assets.process import process_name

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 3.0
# Ten heartbeats: longer than a machine is busy with something else, half of what a take-over may
# take.
STALE_SECONDS = 30.0
# The end of the flusher doesn't wait for a database that doesn't answer.
_JOIN_SECONDS = 3.0

_ADOPT = """
insert into sessions (pid, backend_start, source, holder, process)
select pid, backend_start, %s, %s, %s from pg_stat_activity where pid = pg_backend_pid()
    on conflict do nothing
"""
_BEAT = """
update sessions set heartbeat_at = clock_timestamp()
 where holder = %(holder)s and pid = any(%(mine)s)
"""
# Those of processes that weren't heard of, and of ours those that we gave up on: behind a dead
# connection the server would keep one, with its lock, for hours.
_END = """
select s.process, pg_terminate_backend(s.pid)
  from sessions s
  join pg_stat_activity a on a.pid = s.pid and a.backend_start = s.backend_start
 where s.source = %(source)s
   and (s.heartbeat_at < clock_timestamp() - make_interval(secs => %(stale)s)
        or (s.holder = %(holder)s and not s.pid = any(%(mine)s)))
"""
_FORGET = """
delete from sessions s
 where s.source = %(source)s and not exists (
       select from pg_stat_activity a
        where a.pid = s.pid and coalesce(a.backend_start = s.backend_start, true))
"""


class Heart:
    """Beats for this process in a thread and a session of its own; ends the sessions of the dead.

    An error of it is logged and tried again: if the database is down, nobody else gets the turn.
    """

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self.holder = uuid.uuid4()
        self._process = process_name()
        self._mine: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def adopt(self, store: LogStore) -> int:
        """Vouch for a session from now on: before it holds a lock. Returns its backend."""
        store.connection.execute(_ADOPT, (self._config.name, self.holder, self._process))
        pid = store.connection.info.backend_pid
        with self._lock:
            self._mine.add(pid)
        return pid

    def give_up(self, pid: int) -> None:
        """The session is closed, or lost: if the server still has it, it may end it."""
        with self._lock:
            self._mine.discard(pid)

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self._beat()
            except psycopg.Error as error:
                logger.warning("no heartbeat: %s", str(error).strip())
                self._hang_up()
        self._hang_up()

    def _beat(self) -> None:
        if self._connection is None:
            self._connection = connect_log(self._config, "heart")
        with self._lock:
            mine = sorted(self._mine)
        which = {
            "source": self._config.name,
            "holder": self.holder,
            "mine": mine,
            "stale": STALE_SECONDS,
        }
        self._connection.execute(_BEAT, which)
        for process, ended in self._connection.execute(_END, which).fetchall():
            if ended:
                logger.warning("ended a session that %s has left behind", process)
        self._connection.execute(_FORGET, which)

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()
