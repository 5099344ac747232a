"""A source whose tables are pinned by a lock, again and again, beside its stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from cdc_assets.config.source import parse_config
from cdc_assets.log.states import TableState
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import Bench

T, U, V = TableId("public", "t"), TableId("public", "u"), TableId("public", "v")
PLAIN = "create table t (id bigint primary key); insert into t values (-1)"
PARTED = """
create table t (id bigint primary key) partition by range (id);
create table t0 partition of t for values from (-9) to (maxvalue);
create table t1 partition of t for values from (minvalue) to (-9);
insert into t values (-1)
"""


class Pinning:
    """A source whose stream has begun, and whose tables can be pinned anew, again and again."""

    def __init__(self, source: Bench, *tables: str, **snapshot: object) -> None:
        settings = source.settings(*tables)
        settings["snapshot"] = {"pin": "lock", **snapshot}
        self.source = source
        self.config = parse_config(settings, "test")
        self.pipeline = Pipeline.open(self.config)
        self.pins = Pins(self.pipeline)
        self.pins.prepare()

    def ask_anew(self, *tables: TableId) -> None:
        mark_for_copy(self.pipeline, tables or [T])

    def state(self, table: TableId = T) -> tuple[TableState, str]:
        row = self.pipeline.store.table(table)
        assert row is not None
        return row.state, row.reason or ""

    def pinned(self, *tables: TableId) -> bool:
        """Whether they are after a tick."""
        self.pins.tick()
        return all(self.state(table)[0] == TableState.COPYING for table in tables or [T])

    def point(self, table: TableId = T) -> Lsn:
        row = self.pipeline.store.table(table)
        assert row is not None and row.snapshot_lsn is not None
        return row.snapshot_lsn

    def shown(self, query: str = "select id from t", table: TableId = T) -> set[Any]:
        """Of the table's snapshot."""
        row = self.pipeline.store.table(table)
        assert row is not None
        ((name,),) = self.source.ask_log(
            "select snapshot_name from _pg2iceberg.pin_holders where pin = %s", row.pin
        )
        with psycopg.connect(self.source.dsn) as session:
            session.execute("set transaction isolation level repeatable read read only")
            session.execute(f"set transaction snapshot '{name}'".encode())
            return {value for (value,) in session.execute(query.encode())}

    def close(self) -> None:
        self.pins.close()
        self.pipeline.close()


@contextmanager
def pinning(source: Bench, setup: str, *tables: str, **snapshot: object) -> Iterator[Pinning]:
    source.execute(setup)
    opened = Pinning(source, *(tables or ("t",)), **snapshot)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def stranger(dsn: str, statement: str, **more: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that has written and goes on."""
    with psycopg.connect(make_conninfo(dsn, **more), application_name="nightly") as session:
        session.execute(statement.encode())
        yield session
        session.rollback()
