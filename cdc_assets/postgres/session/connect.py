"""The only place where connections to Postgres are opened.

Every session that reads or decodes pins the settings that decide a value's text form, so that the
snapshot and the log send the same text for the same value, clears the role's time-outs, which
would end a copy half-way, and looks for names in ``pg_catalog`` alone. The same settings go to the
replication connection: the walsender's output functions obey them too.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from threading import Event, Timer
from typing import Any, LiteralString
from urllib.parse import quote, urlencode

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.errors import ReplicationLost
from cdc_assets.postgres.session.parameters import resolved
from cdc_assets.postgres.session.tls import tls_problem

Connection = psycopg.Connection[tuple[Any, ...]]
"""An ordinary connection, whose rows are tuples."""

# One text form for each value, independent of the settings of role and database.
TEXT_FORM = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    "xmlbinary": "base64",
}
# A role's time-outs are meant for its applications, not for a copy that takes hours. An idle
# transaction of ours holds a pin open on purpose.
NO_TIMEOUTS = {
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
# A session that looks at many tables waits at most this long for the lock of one: longer than the
# second after which the server ends an autovacuum that is in the way.
LOCK_SECONDS = 2.0
# Where a policy would hide rows from the role, a query fails instead: a copy whose table gets
# row-level security half-way would silently lack rows.
NO_HIDDEN_ROWS = {"row_security": "off"}
# Unqualified names are Postgres's own, even if others planted objects in a schema of the role's
# path: an operator for oids, a function with a built-in one's name.
OWN_NAMES = {"search_path": "pg_catalog"}
# Statements over the catalogs of hundreds of tables seem dear to the planner: compiling them takes
# seconds, running them a tenth of one.
UNCOMPILED = {"jit": "off"}
# A setting of our own: without it a server in recovery is one that an address leads to by mistake,
# or for a moment, as a failover goes on.
STANDBY = "cdc_assets.standby"
# Time-outs that older servers don't know, so that they can't be part of a connection's options.
NO_NEW_TIMEOUTS = (
    "select pg_catalog.set_config(name, '0', false) from pg_catalog.pg_settings"
    " where name in ('transaction_timeout', 'idle_session_timeout') and setting <> '0'"
)
# A view may have functions that write, or lock the rows that it shows (FOR UPDATE).
ONLY_READS: LiteralString = "set default_transaction_read_only = on"
# A dead peer is noticed after about 30 + 3 * 10 seconds instead of the kernel's two hours; after 30
# if sent data isn't acknowledged.
KEEPALIVES = {
    "keepalives": "1",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "connect_timeout": "10",
}


def conninfo(
    dsn: str, application_name: str, *, lock_seconds: float | None = None, **extra: str
) -> str:
    """``dsn`` with our session settings; the DSN's own parameters (keepalives…) win.

    ``lock_seconds``: how long a statement waits for a lock; None: for as long as it takes.
    """
    given = conninfo_to_dict(dsn)
    pinned = TEXT_FORM | NO_TIMEOUTS | NO_HIDDEN_ROWS | OWN_NAMES | UNCOMPILED
    pinned |= {"lock_timeout": str(round(1000 * (lock_seconds or 0)))}
    settings = " ".join(f"-c {key}={value}" for key, value in pinned.items())
    options = f"{given.pop('options', '') or ''} {settings}".strip()
    params = KEEPALIVES | {k: str(v) for k, v in given.items() if v is not None}
    params |= {"options": options, "client_encoding": "UTF8"}
    params |= {"application_name": application_name, **extra}
    return make_conninfo("", **params)


def of_standby(dsn: str) -> str:
    """``dsn`` of a server that is meant to be a hot standby: what asks there finds STANDBY on."""
    given = conninfo_to_dict(dsn).get("options") or ""
    return make_conninfo(dsn, options=f"{given} -c {STANDBY}=on".strip())


def uri(dsn: str, application_name: str) -> str:
    """The same connection as a libpq URI, whole: for another machine."""
    # The machine that it connects from may have other PG… variables.
    params = resolved(conninfo(dsn, application_name))
    given = {key: value for key, value in params.items() if value or key not in ("host", "port")}
    return "postgresql://?" + urlencode(given, quote_via=quote)


# Other clients of the pooler may spoil a try.
_POOLER_TRIES = 3
# A server whose processes are stopped keeps its connections, acknowledges, and answers nothing.
ANSWER_SECONDS = 60.0


class _Answered(psycopg.Connection[tuple[Any, ...]]):
    """A connection that ends where the server owes an answer for ``ANSWER_SECONDS``."""

    def wait(self, *given: Any, **named: Any) -> Any:
        cut = Event()
        with socket.socket(fileno=os.dup(self.fileno())) as same:

            def hang_up() -> None:
                cut.set()
                with suppress(OSError):  # it is over in this moment
                    same.shutdown(socket.SHUT_RDWR)

            timer = Timer(ANSWER_SECONDS, hang_up)
            timer.daemon = True
            timer.start()
            try:
                return super().wait(*given, **named)
            except psycopg.OperationalError as error:
                if not cut.is_set():
                    raise
                raise psycopg.OperationalError(
                    f"the server at {self.info.host or 'its address'} has left a statement without"
                    f" an answer for {ANSWER_SECONDS:.0f} s, and the connection was ended"
                ) from error
            finally:
                timer.cancel()
                timer.join()  # or it hangs up on whoever gets the number next


def connect(
    dsn: str,
    *,
    application_name: str = "cdc_assets",
    lock_seconds: float | None = None,
    is_answered: bool = False,
) -> Connection:
    """An ordinary session with the pinned text form. Raises psycopg.OperationalError.

    The error is a TlsProblem where certificates are to blame. ``lock_seconds``: a statement waits
    this long for a lock, then raises LockNotAvailable. ``is_answered``: it asks short questions
    alone, and the connection is ended if one has no answer within ``ANSWER_SECONDS``.
    """
    address = conninfo(dsn, application_name, lock_seconds=lock_seconds)
    opened = _Answered if is_answered else psycopg.Connection
    try:
        connection = opened.connect(address, autocommit=True)
    except psycopg.OperationalError as error:
        if (problem := tls_problem(str(error))) is not None:
            raise problem from error
        raise
    connection.execute(NO_NEW_TIMEOUTS)
    return connection


def pools_transactions(connection: psycopg.Connection[Any], dsn: str) -> bool:
    """Whether a transaction pooler is between us and the server of ``connection``, by ``dsn``.

    Such a pooler lends the backend that was used last. So a second session that begins a
    transaction gets the first one's, and the first one is then given another, or has to wait.
    """

    def backend(session: psycopg.Connection[Any]) -> object:
        row = session.execute("select pg_backend_pid()").fetchone()
        return row[0] if row else None

    with connect(dsn, application_name="cdc_assets pooler?") as other:
        for _ in range(_POOLER_TRIES):
            before = backend(connection)
            with other.transaction():
                if backend(other) == before or backend(connection) != before:
                    return True
    return False


def replication_connect(dsn: str, application_name: str = "cdc_assets") -> Connection:
    """A replication session (``replication=database``), which only libpq's calls can use.

    Other threads go on meanwhile, as they don't beside libpq's own call. Of several hosts the first
    that lets it in is taken, as by :func:`connect`. Raises ReplicationLost, or TlsProblem.
    """
    try:
        connection = psycopg.connect(
            conninfo(dsn, application_name, replication="database"), autocommit=True
        )
    except psycopg.OperationalError as error:
        said = str(error).strip()
        said, _, _ = (problem := said).partition("\nMultiple connection attempts failed")
        raise tls_problem(problem) or ReplicationLost(
            "can't open a replication connection: " + said,
            "The role needs REPLICATION, pg_hba.conf must let it in, and a transaction pooler"
            " (PgBouncer) can't be in between: give the database's own address.",
        ) from error
    cleared = connection.pgconn.exec_(NO_NEW_TIMEOUTS.encode())
    if cleared.status != pq.ExecStatus.TUPLES_OK:
        connection.close()
        raise ReplicationLost(
            "can't clear the role's time-outs: " + cleared.get_error_message().strip()
        )
    return connection


def is_outage(state: bytes | None) -> bool:
    """Whether a command failed because of the connection or the server's state: SQLSTATE classes.

    57: shutdown, 53: out of resources, 08: connection. libpq gives none if the connection is gone.
    """
    return state is None or state[:2] in (b"57", b"53", b"08")
