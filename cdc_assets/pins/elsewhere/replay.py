"""Stopping the replay of a standby, for the moment in which its snapshot is exported.

Only then it is known to the byte what the snapshot shows: the server moves the LSN that it has
replayed after a record was replayed, so a snapshot may show a commit that isn't below it. Whoever
dies in between leaves a note, and the next one lets the standby go on. The note says when that
server was started: another one, stopped by somebody else, stays so; and a restart ends each stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import LiteralString

import psycopg

from cdc_assets.log.store import LogStore
from cdc_assets.pins.holders import started
from cdc_assets.postgres.session.connect import Connection

# In pipeline_meta: that replay was stopped by us, and is to go on.
_STOPPED = "replay_stopped"
# What an earlier version noted, of whichever server.
_BEFORE = "by us"
# A record that waits for a query's end holds up the stop.
_SECONDS = 5.0
_STATE: LiteralString = "select pg_catalog.pg_get_wal_replay_pause_state()"


@contextmanager
def stopped(there: Connection, store: LogStore) -> Iterator[bool]:
    """Whether replay stands still meanwhile: the role may lack the right to stop it.

    One that somebody else has stopped stays so. From Postgres 14 on.
    """
    go_on(there, store)
    if _is_stopped(there):
        yield True
        return
    store.set_meta(_STOPPED, str(started(there)))
    try:
        yield _stop(there)
    finally:
        _resume(there)  # first: the log may be gone by now
        store.set_meta(_STOPPED, "")


def go_on(there: Connection, store: LogStore) -> None:
    """Undo what a process that died has done."""
    if (note := store.meta(_STOPPED)) and note in (str(started(there)), _BEFORE):
        _resume(there)
        store.set_meta(_STOPPED, "")


def _resume(there: Connection) -> None:
    # Who may not stop it, hasn't; and one that was promoted replays nothing.
    with suppress(
        psycopg.errors.InsufficientPrivilege, psycopg.errors.ObjectNotInPrerequisiteState
    ):
        there.execute("select pg_catalog.pg_wal_replay_resume()")


def _stop(there: Connection) -> bool:
    try:
        there.execute("select pg_catalog.pg_wal_replay_pause()")
    except psycopg.errors.InsufficientPrivilege:
        return False
    deadline = time.monotonic() + _SECONDS
    while not _is_stopped(there):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _is_stopped(there: Connection) -> bool:
    row = there.execute(_STATE).fetchone()
    return row is not None and row[0] == "paused"
