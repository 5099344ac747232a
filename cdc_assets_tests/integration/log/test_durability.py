"""What the log has registered is there after a crash, whatever the server's default is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.config.source import parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.log.copies.claims import Claims, ClaimScope
from cdc_assets.log.sessions.connection import connect_log
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase

SCHEMA = "_pg2iceberg"


@pytest.fixture
def careless(public_directory: Path) -> Iterator[EmbeddedPostgres]:
    """A server that says "committed" long before it is so."""
    late = {"synchronous_commit": "off", "wal_writer_delay": "10s", "full_page_writes": "off"}
    server = EmbeddedPostgres(public_directory / "careless", settings=late)
    server.start()
    yield server
    server.remove()


def test_what_is_registered_outlives_a_crash_of_a_server_that_commits_late(
    careless: EmbeddedPostgres,
) -> None:
    store = LogStore.open(careless.start(), "src", SCHEMA)
    store.connection.execute("checkpoint")
    rows = StagedRows(TableId("public", "t"), "file:///f", 7, 100)
    store.begin_at(Lsn.ZERO)
    store.register([rows], Lsn(1), Lsn(2), datetime.now(UTC))
    os.kill(json.loads((careless.directory / "server.json").read_text())["pid"], signal.SIGKILL)
    while not store.connection.closed:  # the sessions end just after the server
        with suppress(psycopg.OperationalError):
            store.server_now()
    careless.stop()
    with closing(LogStore.open(careless.start(), "src", SCHEMA)) as again:
        assert again.flushed_lsn() == Lsn(2)
        assert again.log_end(rows.table) == 7


@pytest.mark.parametrize(
    ("default", "ours"), [("off", "on"), ("local", "local"), ("remote_apply", "remote_apply")]
)
def test_every_session_of_the_log_commits_durably(
    postgres_dsn: NewDatabase, default: str, ours: str
) -> None:
    dsn = postgres_dsn()
    LogStore.open(dsn, "src", SCHEMA).close()
    name = conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"alter database {name} set synchronous_commit = '{default}'".encode())
    config = parse_config(
        {"name": "src", "postgres": {"dsn": dsn}, "tables": [{"name": "t"}]}, "test"
    )
    claims = Claims(ClaimScope(dsn, SCHEMA, "src", "t", 0, ""), "worker")
    peeked = LogStore.peek(dsn, "src", SCHEMA)
    assert peeked is not None
    opened = LogStore.open(dsn, "src", SCHEMA)
    sessions = [claims._connection, peeked.connection, opened.connection, connect_log(config, "x")]
    for session in sessions:
        with session:
            assert session.execute("show synchronous_commit").fetchone() == (ours,)
            assert session.execute("select count(*) from log_index").fetchone() == (0,)
    claims.close()
