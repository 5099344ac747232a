"""Stopping the replay of a standby, for the moment in which its snapshot is exported.

Only then it is known to the byte what the snapshot shows: the server moves the LSN that it has
replayed after a record was replayed, so a snapshot may show a commit that isn't below it. The
standby itself has what lets it go on: a session of ours there stops it, sleeps, and resumes it, all
in one message. So it goes on though we die in between; a restart ends each stop, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import LiteralString

import psycopg
from psycopg import generators

from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection

# A record that waits for a query's end holds up the stop.
_SECONDS = 5.0
# How long a stop lasts at most, which takes some tenths of a second.
LONGEST_SECONDS = 20.0
_STATE: LiteralString = "select pg_catalog.pg_get_wal_replay_pause_state()"
_MAY: LiteralString = """
select pg_catalog.has_function_privilege('pg_catalog.pg_wal_replay_pause()', 'execute')
   and pg_catalog.has_function_privilege('pg_catalog.pg_wal_replay_resume()', 'execute')
   and pg_catalog.has_function_privilege('pg_catalog.pg_sleep(float8)', 'execute')
"""
_STOP = (
    "select pg_catalog.pg_wal_replay_pause(); select pg_catalog.pg_sleep({});"
    " select pg_catalog.pg_wal_replay_resume()"
)

# A server that looks for its clients would end the message once we are gone.
_GOES_ON: LiteralString = "set client_connection_check_interval = 0"


@contextmanager
def stopped(there: Connection, aside: Connection) -> Iterator[bool]:
    """Whether replay stands still meanwhile: the role may lack the right to stop it.

    One that somebody else has stopped stays so. ``aside``: another session there, for this alone.
    From Postgres 14 on.
    """
    if _state(there) != "not paused":
        yield _stops(there)
        return
    if there.execute(_MAY).fetchone() != (True,):
        yield False
        return
    aside.execute(_GOES_ON)
    aside.pgconn.send_query(_STOP.format(LONGEST_SECONDS).encode())
    aside.pgconn.flush()
    try:
        yield _stops(there)
    finally:
        _resume(there)
        aside.cancel_safe(timeout=_SECONDS)
        aside.wait(generators.execute(aside.pgconn))
        _resume(there)  # if it was stopped only now


def is_stopped(there: Connection, point: Lsn) -> bool:
    """Whether it stands still at ``point``, and is no primary by now."""
    row = there.execute(
        "select pg_catalog.pg_is_in_recovery(),"
        " coalesce(pg_catalog.pg_last_wal_replay_lsn(), '0/0')::text"
    ).fetchone()
    assert row is not None
    return bool(row[0]) and Lsn.parse(row[1]) == point and _state(there) == "paused"


def _resume(there: Connection) -> None:
    with suppress(psycopg.errors.ObjectNotInPrerequisiteState):  # promoted, it replays nothing
        there.execute("select pg_catalog.pg_wal_replay_resume()")


def _stops(there: Connection) -> bool:
    deadline = time.monotonic() + _SECONDS
    while _state(there) != "paused":
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _state(there: Connection) -> str:
    """Not paused, pause requested, or paused."""
    row = there.execute(_STATE).fetchone()
    assert row is not None  # a function's result
    return str(row[0])
