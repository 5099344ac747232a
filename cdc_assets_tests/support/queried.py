"""A source in query mode without a lake: what its polls put into the log."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.flusher.flusher import run
from cdc_assets.flusher.polling import Polling
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.reach import flush_target
from cdc_assets.log.staged.storage import Storage
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.poller.poller import Poller
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.waiting import wait_for

T = TableId("public", "t")
CLOCKED = """
create table t (id int primary key, v text, updated_at timestamptz not null default now());
create index on t (updated_at);
"""
BY_CLOCK = {"name": "t", "watermark": {"column": "updated_at"}}


class Queried:
    """A source whose tables were empty when they were pinned, so that polls find every row."""

    def __init__(self, config: SourceConfig, client: psycopg.Connection[Any]) -> None:
        self.config = config
        self.client = client
        self.pipeline = Pipeline.open(config)
        self.pins = Pins(self.pipeline)
        self.progress = Progress()
        self.begin()

    def begin(self) -> None:
        """As a process does that has no memory of polls."""
        flushed = self.pipeline.store.flushed_lsn() or Lsn.ZERO
        if self.config.query is not None:
            self.polling = Polling(self.pipeline, flushed, self.progress, stop=threading.Event())
        self.poller = Poller(self.config, self.pipeline.store)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.client.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []

    def session(self) -> psycopg.Connection[Any]:
        """Another client, whose statements are transactions until it says otherwise."""
        return psycopg.connect(self.config.postgres.dsn.get_secret_value(), autocommit=True)  # type: ignore[union-attr]

    def pin(self) -> None:
        self.pins.prepare()
        wait_for(self._is_pinned)
        for row in self.pipeline.store.tables():
            self.pipeline.store.finish_copy(row.table, row.epoch, Lsn.ZERO, streams=True)
        self.pins.tick()  # no snapshot is held any more: its session would count as running
        self.begin()

    def _is_pinned(self) -> bool:
        self.pins.tick()
        return all(row.snapshot_lsn is not None for row in self.pipeline.store.tables())

    def poll(self) -> bool:
        with self.polling.connect() as source:
            return self.polling.poll(self.poller, source)

    def flush(self) -> None:
        """As ``cdc-assets flush --until current``: what is visible now goes into the log."""
        run(self.config, until=flush_target(self.pipeline, "current"))

    def staged(self, table: TableId = T) -> list[dict[str, Any]]:
        """Every row of the table's log, in order."""
        storage = Storage.of(self.config.s3)
        return [
            json.loads(data)
            for entry in self.pipeline.store.entries(table, 0)
            for data in entry.rows.read(storage, ["_data"])["_data"].to_pylist()
        ]

    def found(self, table: TableId = T) -> dict[str, Any]:
        """The rows that the log leaves, by their key."""
        return {row["id"]: row for row in self.staged(table)}

    def is_level(self, table: TableId = T) -> bool:
        """Whether the log leaves what the source has, but for what was deleted there."""
        there = dict(self.execute(f"select id::text, v from {table}"))
        return {key: row["v"] for key, row in self.found(table).items()} == there

    def close(self) -> None:
        self.pins.close()
        self.pipeline.close()


@contextmanager
def queried(
    dsn: str,
    setup: str,
    *tables: Any,
    pinned: bool = True,
    created: tuple[psycopg.Connection[Any], str] | None = None,
    **settings: Any,
) -> Iterator[Queried]:
    """Run ``setup`` in the source, and pin its tables, which have no rows yet.

    ``created``: what another session, of its primary, say, does before.
    """
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": dsn},
            "query": {"every": "1s"},
            "tables": list(tables),
            **settings,
        },
        "test",
    )
    if created is not None:
        created[0].execute(created[1].encode())
    with psycopg.connect(dsn, autocommit=True) as client:
        client.execute(setup.encode())
        opened = Queried(config, client)
        try:
            if pinned:
                opened.pin()
            yield opened
        finally:
            opened.close()
