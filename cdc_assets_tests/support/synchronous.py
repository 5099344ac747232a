"""A server whose commits wait for a standby that there is none of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from cdc_assets_tests.support.waiting import wait_for


@contextmanager
def hanging_commits(dsn: str, statement: str) -> Iterator[psycopg.Connection]:
    """``statement``'s COMMIT hangs, its record written, until the context ends; then it is done.

    All sessions of the server that don't set ``synchronous_commit`` to local wait as well: those of
    this database do. Yields a superuser's session.
    """
    with (
        psycopg.connect(dsn, autocommit=True) as admin,
        psycopg.connect(dsn, autocommit=True) as first,
        psycopg.connect(dsn, autocommit=True) as writer,
    ):
        name = admin.info.dbname
        admin.execute("set synchronous_commit = local")
        admin.execute(f'alter database "{name}" set synchronous_commit = local'.encode())

        def hangs(session: psycopg.Connection, sent: bytes) -> bool:
            """Whether its COMMIT does by now; sends the statement while it is idle."""
            if session.pgconn.transaction_status != psycopg.pq.TransactionStatus.ACTIVE:
                session.pgconn.send_query(sent)
            session.pgconn.consume_input()
            if not session.pgconn.is_busy():
                _end(session)
            found = admin.execute(
                "select wait_event = 'SyncRep' from pg_stat_activity where pid = %s",
                (session.info.backend_pid,),
            ).fetchone()
            return bool(found and found[0])

        try:
            _names(admin, "nobody")
            for session in (first, writer):
                session.execute("set synchronous_commit = on")
            # The setting counts once the checkpointer has read it.
            wait_for(lambda: hangs(first, b"select pg_logical_emit_message(true, 'hangs', '')"))
            wait_for(lambda: hangs(writer, statement.encode()))
            yield admin
        finally:
            _names(admin, "")
            for session in (first, writer):
                _end(session)


def _end(session: psycopg.Connection) -> None:
    while (result := session.pgconn.get_result()) is not None:
        done = result.status in (psycopg.pq.ExecStatus.COMMAND_OK, psycopg.pq.ExecStatus.TUPLES_OK)
        assert done, result.error_message


def _names(admin: psycopg.Connection, names: str) -> None:
    admin.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
    admin.execute("select pg_reload_conf()")
    wait_for(
        lambda: admin.execute("show synchronous_standby_names").fetchone() == (names,),
    )
