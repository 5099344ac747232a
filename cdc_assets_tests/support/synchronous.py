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
        psycopg.connect(dsn, autocommit=True) as writer,
    ):
        name = admin.info.dbname
        admin.execute("set synchronous_commit = local")
        admin.execute(f'alter database "{name}" set synchronous_commit = local'.encode())
        writer.execute("set synchronous_commit = on")
        pid = writer.info.backend_pid

        def waits() -> bool:
            found = admin.execute(
                "select wait_event = 'SyncRep' from pg_stat_activity where pid = %s", (pid,)
            ).fetchone()
            return bool(found and found[0])

        try:
            _names(admin, "nobody")
            writer.pgconn.send_query(statement.encode())
            wait_for(waits)
            yield admin
        finally:
            _names(admin, "")
            while (result := writer.pgconn.get_result()) is not None:
                assert result.status == psycopg.pq.ExecStatus.COMMAND_OK, result.error_message


def _names(admin: psycopg.Connection, names: str) -> None:
    admin.execute(f"alter system set synchronous_standby_names = '{names}'".encode())
    admin.execute("select pg_reload_conf()")
    wait_for(
        lambda: admin.execute("show synchronous_standby_names").fetchone() == (names,),
    )
