"""The sessions that keep a pinned snapshot alive.

A snapshot lives as long as one session that imported it stays in its transaction. So a pin has
*holders*: each imports the snapshot and exports it again under a name of its own. The flusher holds
every pin it made, a running copy holds the one it reads from: either may die without harm to the
other. A holder is alive when its backend is: the server decides, not a clock.

``pins`` decides when a pin is made, and for which tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.errors import SnapshotLost, first_line
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.session.connect import connect

_SNAPSHOT_GONE = (
    psycopg.errors.FeatureNotSupported,  # it is of another database there
    psycopg.errors.UndefinedObject,
    psycopg.errors.InvalidParameterValue,
    psycopg.errors.ObjectNotInPrerequisiteState,  # its session is just ending
)


@dataclass(slots=True)
class Holder:
    """A session that keeps a pin's snapshot alive, and has exported it as ``snapshot_name``."""

    pin: str
    snapshot_name: str
    connection: psycopg.Connection[Any]

    def alive(self) -> bool:
        """False once the session is gone (asked of the server, over this very session)."""
        try:
            self.connection.execute("select 1")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        self.connection.close()


@contextmanager
def under(source: psycopg.Connection[Any], snapshot_name: str | None) -> Iterator[None]:
    """A transaction that reads under the snapshot (None: one of now), the catalog too."""
    with source.transaction():
        source.execute("set transaction isolation level repeatable read read only")
        if snapshot_name is not None:
            name = sql.Literal(snapshot_name)
            source.execute(sql.SQL("set transaction snapshot {}").format(name))
        yield


def started(connection: psycopg.Connection[Any]) -> object:
    """When the server was started: another one has other snapshots, perhaps of the same name."""
    row = connection.execute("select pg_catalog.pg_postmaster_start_time()").fetchone()
    return row[0] if row else None


def hold(store: LogStore, dsn: str, pin: str, snapshot_name: str) -> Holder:
    """Import ``snapshot_name`` in a new session, export it, and record that in ``pin_holders``.

    ``dsn``: of the server that has the snapshot. Raises SnapshotLost when the snapshot is gone, or
    was another server's.
    """
    name = f"cdc_assets {store.source} pin"
    connection = connect(dsn, application_name=name, is_answered=True)
    try:
        of = store.connection.execute(
            "select server_started from pins where pin = %s", (pin,)
        ).fetchone()
        if of is not None and of[0] is not None and of[0] != started(connection):
            raise SnapshotLost(
                f"the exported snapshot {snapshot_name} was of a server that was started another"
                " time: it was restarted, or the address leads to another one now."
            )
        connection.execute("begin isolation level repeatable read read only")
        connection.execute(
            sql.SQL("set transaction snapshot {}").format(sql.Literal(snapshot_name))
        )
        row = connection.execute("select pg_export_snapshot(), pg_backend_pid()").fetchone()
        assert row is not None
        store.connection.execute(
            "insert into pin_holders (pin, snapshot_name, backend_pid) values (%s, %s, %s)",
            (pin, row[0], row[1]),
        )
        return Holder(pin, row[0], connection)
    except _SNAPSHOT_GONE as error:
        connection.close()
        raise SnapshotLost(
            f"the exported snapshot {snapshot_name} is gone: {first_line(error)}"
        ) from error
    except BaseException:
        connection.close()
        raise


def join_pin(store: LogStore, dsn: str, pin: str) -> Holder:
    """Become one more holder of ``pin``; raises SnapshotLost when none of its holders lives."""
    names = store.connection.execute(
        "select snapshot_name from pin_holders where pin = %s order by since desc", (pin,)
    ).fetchall()
    for (name,) in names:
        try:
            return hold(store, dsn, pin, name)
        except SnapshotLost:
            store.connection.execute(
                "delete from pin_holders where pin = %s and snapshot_name = %s", (pin, name)
            )
    raise SnapshotLost(f"no session holds the pin {pin} any more.")


def held_pins(store: LogStore, pins: Iterable[str]) -> frozenset[str]:
    """Those of the pins whose snapshot has to be held."""
    if not (asked := sorted(pins)):
        return frozenset()
    rows = store.connection.execute(
        "select pin::text from pins where pin = any(%s::uuid[]) and held", (asked,)
    ).fetchall()
    return frozenset(pin for (pin,) in rows)


def note_released(store: LogStore, pin: str) -> None:
    """Record that nothing is read under the pin any more."""
    store.connection.execute("update pins set released_at = now() where pin = %s", (pin,))
    store.connection.execute("delete from pin_holders where pin = %s", (pin,))
