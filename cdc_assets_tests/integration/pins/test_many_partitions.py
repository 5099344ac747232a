"""Pins of partitioned tables on a server that has few locks to give."""

from __future__ import annotations

from pathlib import Path

import psycopg

from cdc_assets.config.source import parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher.flusher import run
from cdc_assets.log.states import TableState
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn

# Some 500 locks, of all sessions together (a server's default is some 7,000).
FEW_LOCKS = {"max_locks_per_transaction": "10", "max_connections": "30", "fsync": "off"}
TABLES, PARTITIONS = 16, 150


def test_tables_are_pinned_however_many_partitions_they_have_together(
    public_directory: Path, tmp_home: Path
) -> None:
    """Each partition that is asked for is a lock; once they are out, nobody gets one."""
    server = EmbeddedPostgres(public_directory / "few-locks", settings=FEW_LOCKS)
    with server:
        dsn = server.dsn()
        assert dsn is not None
        with psycopg.connect(dsn, autocommit=True) as source:
            names = [f"t{number}" for number in range(TABLES)]
            for name in names:
                source.execute(
                    f"create table {name} (id int primary key) partition by range (id)".encode()
                )
                for part in range(PARTITIONS):
                    source.execute(
                        f"create table {name}_{part} partition of {name}"
                        f" for values from ({part}) to ({part + 1})".encode()
                    )
            source.execute("create table plain (id int primary key)")
            config = parse_config(
                {"name": "locks", "postgres": {"dsn": dsn}, "tables": [*names, "plain"]}, "test"
            )
            run(config, until=current_lsn(source))
            with Pipeline.open(config) as pipeline:
                states = {row.table.name: row.state for row in pipeline.store.tables()}
            assert states == dict.fromkeys([*names, "plain"], TableState.COPYING)
