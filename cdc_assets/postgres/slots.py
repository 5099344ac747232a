"""Slots and positions: creating slots, and their state as the server reports it.

``flusher`` reads the stream itself; ``publications`` decides its content; ``pins`` ties snapshots
to tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Timer
from typing import Any, LiteralString

import psycopg
from psycopg import generators, pq, sql
from psycopg.pq import abc
from psycopg.rows import kwargs_row

from cdc_assets.errors import PreflightError, ReplicationLost, SlotBusy, first_line
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import (
    STANDBY,
    Connection,
    connect,
    is_outage,
    replication_connect,
)
from cdc_assets.postgres.session.waits import writers

# The first server versions with two-phase slots, with conflicts, and with failover slots.
TWO_PHASE, CONFLICTS, FAILOVER_SLOTS = 140000, 160000, 170000
# Slot creation waits for every running transaction; after this long it fails, and names them.
SLOT_PATIENCE_SECONDS = 120
# What a primary is asked for, so that a slot can be made on a standby.
LOG_RUNNING: LiteralString = "select pg_catalog.pg_log_standby_snapshot()"
LOGICAL = "On the primary: alter system set wal_level = logical;"


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A replication slot as ``pg_replication_slots`` shows it.

    ``retained_bytes``: the WAL it keeps. ``plugin`` and ``database`` are empty for a physical slot.
    ``invalidation``: why it can't be used any more, if the server reports so. ``safe_bytes``: the
    WAL that may still be written before the slot loses some; None without
    ``max_slot_wal_keep_size`` (``keep_bytes``). ``xmin_age`` is in transactions. What an older
    server doesn't know is False or None.
    """

    name: str
    plugin: str
    active_pid: int | None
    confirmed_flush: Lsn | None
    wal_status: str | None
    retained_bytes: int
    database: str = ""
    restart: Lsn | None = None
    two_phase: bool = False
    invalidation: str | None = None
    failover: bool = False
    safe_bytes: int | None = None
    keep_bytes: int | None = None
    inactive_seconds: float | None = None
    xmin_age: int | None = None
    synced: bool = False
    """Whether it is a standby's copy of its primary's: nobody may stream or drop it there."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A new slot: its snapshot shows exactly what committed below ``consistent_point``.

    The snapshot dies with ``connection``, or with the next command on it.
    """

    consistent_point: Lsn
    snapshot_name: str
    connection: Connection


_SLOT: LiteralString = """
select slot_name::text as name, coalesce(plugin::text, '') as plugin, active_pid,
       confirmed_flush_lsn::text as confirmed_flush, wal_status,
       coalesce(pg_wal_lsn_diff(case when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                                else pg_current_wal_lsn() end, restart_lsn), 0)::bigint
       as retained_bytes,
       coalesce(database::text, '') as database, restart_lsn::text as restart,
       {two_phase} as two_phase, {invalidation} as invalidation, {failover} as failover,
       safe_wal_size::bigint as safe_bytes,
       nullif(pg_size_bytes(current_setting('max_slot_wal_keep_size')), -1) as keep_bytes,
       {inactive_seconds} as inactive_seconds, age(catalog_xmin)::bigint as xmin_age,
       {synced} as synced
  from pg_catalog.pg_replication_slots where slot_name = %s
"""


def slot_status(connection: Connection, slot: str) -> SlotStatus | None:
    """The state of ``slot``, None if there is none of that name in the cluster."""
    version = connection.info.server_version
    invalidation, inactive = "null::text", "null::float8"
    if version >= FAILOVER_SLOTS:  # the first with the time of the last reader's end, too
        invalidation = "invalidation_reason"
        inactive = "extract(epoch from clock_timestamp() - inactive_since)::float8"
    elif version >= CONFLICTS:
        invalidation = "case when conflicting then 'conflict with recovery' end"
    query = sql.SQL(_SLOT).format(
        two_phase=sql.SQL("two_phase" if version >= TWO_PHASE else "false"),
        invalidation=sql.SQL(invalidation),
        failover=sql.SQL("failover" if version >= FAILOVER_SLOTS else "false"),
        inactive_seconds=sql.SQL(inactive),
        synced=sql.SQL("synced and pg_is_in_recovery()" if version >= FAILOVER_SLOTS else "false"),
    )
    with connection.cursor(row_factory=kwargs_row(_status)) as cursor:
        return cursor.execute(query, (slot,)).fetchone()


def sent_through(connection: Connection, slot: str) -> Lsn | None:
    """How far the server has sent ``slot``'s stream, as far as it still knows; None without one.

    While somebody streams it knows that exactly; afterwards only what was acknowledged.
    """
    row = connection.execute(
        "select greatest(s.confirmed_flush_lsn, r.sent_lsn)::text"
        "  from pg_catalog.pg_replication_slots s"
        "  left join pg_catalog.pg_stat_replication r on r.pid = s.active_pid"
        " where s.slot_name = %s",
        (slot,),
    ).fetchone()
    return _lsn(row[0]) if row is not None else None


def _status(*, confirmed_flush: str | None, restart: str | None, **rest: Any) -> SlotStatus:
    return SlotStatus(confirmed_flush=_lsn(confirmed_flush), restart=_lsn(restart), **rest)


def _lsn(text: str | None) -> Lsn | None:
    return Lsn.parse(text) if text else None


def create_slot(
    dsn: str, slot: str, *, temporary: bool, patience_seconds: int | None = None
) -> NewSlot:
    """Create a logical slot that exports its snapshot (invariant 5).

    A permanent one is a failover slot where the server knows those: a promoted standby can have it
    too.

    Waits for the running transactions, for ``patience_seconds`` at most (None: for
    SLOT_PATIENCE_SECONDS); then raises SlotBusy. The caller closes the connection once the snapshot
    is held elsewhere.

    On a standby, where it waits for the primary's word on its running transactions, too, the
    snapshot may lack rows, and only the consistent point counts (``pins.on_standby``).
    """
    connection = replication_connect(dsn, f"cdc_assets pin {slot}")
    patience = SLOT_PATIENCE_SECONDS if patience_seconds is None else patience_seconds
    try:
        command(connection, f"set lock_timeout = '{patience}s'")
        kind = "TEMPORARY LOGICAL" if temporary else "LOGICAL"
        # The old spelling of SNAPSHOT 'export': every version from 13 to 18 reads it.
        options = "EXPORT_SNAPSHOT"
        if not temporary and connection.info.server_version >= FAILOVER_SLOTS:
            options = "(SNAPSHOT 'export', FAILOVER true)"
        make = f'CREATE_REPLICATION_SLOT "{slot}" {kind} pgoutput '
        if command(connection, "select pg_is_in_recovery()").get_value(0, 0) == b"t":
            with _patient(connection, patience):  # no failover slot can be made there
                made = command(connection, f"{make}(SNAPSHOT 'export')")
        else:
            made = command(connection, make + options)
        point, name = made.get_value(0, 1), made.get_value(0, 2)
        assert point is not None and name is not None
        return NewSlot(Lsn.parse(point.decode()), name.decode(), connection)
    except SlotBusy as error:
        connection.close()
        what = f"slot creation waited {patience} s: {error.what}"
        raise SlotBusy(f"{what} {_holdups(dsn)}", error.remedy) from error
    except BaseException:
        connection.close()
        raise


@contextmanager
def _patient(connection: Connection, seconds: float) -> Iterator[None]:
    """On a standby a slot waits for WAL, which no time-out of the server's ends."""
    late = Event()

    def give_up() -> None:
        late.set()
        connection.cancel_safe()

    timer = Timer(seconds, give_up)
    timer.start()
    try:
        yield
    except (PreflightError, ReplicationLost) as error:
        if isinstance(error, PreflightError) and "wal_level" in error.what:
            # Of the primary, which nothing that the standby shows tells.
            raise PreflightError(error.what, f"{LOGICAL} then restart it.") from error
        if not late.is_set():
            raise
        raise SlotBusy(
            "the primary hasn't told which transactions run there, as it does now and then if it"
            " isn't idle, or some don't end.",
            f"On the primary: {LOG_RUNNING}; -- more than once while it is idle; or let its"
            " transactions end. With postgres.primary_dsn that is done for you.",
        ) from error
    finally:
        timer.cancel()
        timer.join()


def make_failover(dsn: str, slot: str) -> None:
    """Turn an idle slot into a failover one (Postgres 17+); raises PreflightError if refused."""
    connection = replication_connect(dsn, f"cdc_assets pin {slot}")
    try:
        command(connection, f'ALTER_REPLICATION_SLOT "{slot}" (FAILOVER true)')
    finally:
        connection.close()


def _holdups(dsn: str) -> str:
    try:
        with connect(dsn, application_name="cdc_assets pin") as source:
            found = writers(source)
    except psycopg.Error:
        return ""
    return f"The oldest: {'; '.join(found)}." if found else ""


def export_snapshot(dsn: str) -> NewSlot:
    """A snapshot without a slot, for a copy that no stream follows.

    Needs neither ``wal_level=logical`` nor REPLICATION, and works on a standby. The consistent
    point is informative only: nothing relies on it.
    """
    connection = connect(dsn, application_name="cdc_assets pin", is_answered=True)
    try:
        command(connection, "begin isolation level repeatable read read only")
        made = command(
            connection,
            "select pg_export_snapshot(), case when pg_is_in_recovery()"
            " then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end::text",
        )
        name, point = made.get_value(0, 0), made.get_value(0, 1)
        assert point is not None and name is not None
        return NewSlot(Lsn.parse(point.decode()), name.decode(), connection)
    except BaseException:
        connection.close()
        raise


def command(connection: Connection, said: str) -> abc.PGresult:
    """What the server answers to a command, of replication perhaps.

    Raises ReplicationLost, SlotBusy or PreflightError.
    """
    # Not exec_: a person who interrupts it would wait as long as the server does.
    try:
        connection.pgconn.send_query(said.encode())
        result: abc.PGresult = connection.wait(generators.execute(connection.pgconn))[-1]
    except psycopg.OperationalError as error:
        said = first_line(error)
        raise ReplicationLost(f"the replication connection was lost: {said}.") from error
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return result
    message = result.get_error_message().strip()
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    if is_outage(state):
        raise ReplicationLost(f"the replication connection was lost: {message}.")
    if state == b"55P03":  # lock_not_available
        raise SlotBusy(
            f"transactions don't end that it has to wait for ({message}).",
            "End them (select pg_terminate_backend(pid)) or wait for them; see pg_stat_activity.",
        )
    raise PreflightError(
        f"Postgres refused {said.split(maxsplit=1)[0].lower()}: {message}.",
        "Run cdc-assets check: it names what is missing.",
    )


def drop_slot(connection: Connection, slot: str) -> None:
    """Drop ``slot`` if it exists; raises psycopg.errors.ObjectInUse while it is streamed from."""
    connection.execute(
        "select pg_drop_replication_slot(slot_name) from pg_catalog.pg_replication_slots"
        " where slot_name = %s",
        (slot,),
    )


# A record is visible before the replay LSN passes it. So of all that a standby shows, the end is
# that of the WAL it has received: it replays nothing else, but from an archive.
RECEIVED: LiteralString = """
greatest(pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn())
"""
_ON_STANDBY: LiteralString = (
    f"(pg_is_in_recovery() and current_setting('{STANDBY}', true) is not distinct from 'on')"
)
_CURRENT: LiteralString = (
    f"select case when {_ON_STANDBY} then {RECEIVED}"
    " else pg_logical_emit_message(false, 'cdc_assets', '') end::text"
)


def on_standby(connection: Connection) -> bool:
    """Whether the server is a standby, and may be: ``postgres.standby``, or query mode."""
    row = connection.execute(f"select {_ON_STANDBY}").fetchone()
    return bool(row and row[0])


def current_lsn(connection: Connection) -> Lsn:
    """An LSN above every transaction that committed before the call, sure to be streamed soon.

    The message costs some bytes of WAL; without it the position could lie beyond the last record
    (a page header), which an idle server would never reach. On a standby that is meant to be one
    nothing is written: it is above what the standby shows, and streamed once that is replayed.
    Raises psycopg.errors.ReadOnlySqlTransaction or ObjectNotInPrerequisiteState on any other.
    """
    row = connection.execute(_CURRENT).fetchone()
    assert row is not None
    return Lsn.parse(str(row[0]))


def current_position(connection: Connection) -> Lsn:
    """Where the server's WAL ends now; on a standby, how far it has got the primary's."""
    row = connection.execute(
        f"select case when pg_is_in_recovery() then {RECEIVED} else pg_current_wal_lsn() end::text"
    ).fetchone()
    assert row is not None
    return Lsn.parse(str(row[0]))


def system_identifier(connection: Connection) -> str:
    """The cluster's identity; a restored copy keeps it, another cluster never has it."""
    row = connection.execute("select system_identifier from pg_control_system()").fetchone()
    return str(row[0]) if row else ""
