"""A source, its lake and the engine for each integration test, on real servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.spark.session import open_session
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.table_row import TableRow
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.drain import Drained, drain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.operations.repair import repairer
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.surroundings import review
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.verify.compare import verify
from cdc_assets.verify.difference import Comparison

NewLake = Callable[..., AbstractContextManager["Lake"]]
"""Opens a lake over tables that a script makes in a database of its own: ``lake`` or ``copied``."""


class Lake:
    """One source database with its pipeline, its pins and a Spark session."""

    def __init__(self, config: SourceConfig, source: psycopg.Connection[Any]) -> None:
        self.config = config
        self.source = source
        self.pipeline = Pipeline.open(config)
        self.pins = Pins(self.pipeline)
        self.session: SparkSession = open_session(config)
        self.tables = [table.id for table in config.tables]

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.source.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []

    def pin(self) -> None:
        self.pins.prepare()
        self.pins.tick()

    def copy(self) -> None:
        for table in self.tables:
            copy_table(self.pipeline, self.session, table)

    def flush(self) -> None:
        """Everything that is committed now goes into the log."""
        run(self.config, until=current_lsn(self.source))

    def drain(self, table: TableId) -> Drained:
        drained = drain(self.pipeline, self.session, table)
        assert drained is not None
        return drained

    def drain_all(self) -> None:
        for table in self.tables:
            self.drain(table)

    def catch_up(self, *tables: TableId) -> None:
        """What is committed now is applied to these tables, or to all."""
        self.flush()
        for table in tables or self.tables:
            self.drain(table)

    def row(self, table: TableId) -> TableRow:
        """What the log knows of the table."""
        row = self.pipeline.store.table(table)
        assert row is not None
        return row

    def lake_table(self, table: TableId) -> LakeTable:
        return LakeTable(self.config, self.config.table(table), self.row(table))

    def rows(self, table: TableId) -> list[tuple[Any, ...]]:
        found = self.session.table(self.lake_table(table).sql_name).collect()
        return sorted((tuple(row) for row in found), key=repr)

    def equal(self, table: TableId, columns: str = "*") -> bool:
        """Whether the lake has the source's rows, of whose columns these are in the lake."""
        there = self.execute(f"select {columns} from {table}")
        return self.rows(table) == sorted(there, key=repr)

    def snapshots(self, table: TableId) -> int:
        loaded = self.lake_table(table).load()
        return len(loaded.metadata.snapshots) if loaded is not None else 0

    def verify(
        self, on_flush: Callable[[], None] = lambda: None, *, repair: bool = False
    ) -> list[Comparison]:
        """``on_flush`` is called whenever the log is wanted up to some LSN."""

        def flush_to(lsn: object, *, seconds: float | None = None) -> None:
            on_flush()
            self.flush()

        mend = repairer(self.pipeline, self.session) if repair else None
        return verify(self.pipeline, self.session, self.tables, flush_to, show_keys=True, mend=mend)

    def close(self) -> None:
        self.session.stop()
        self.pins.close()
        self.pipeline.close()


def unhashed(keys: Iterable[str]) -> list[str]:
    """What a comparison that shows keys says of them, without their hashes."""
    return [re.sub(r"^#[0-9a-f]{12} ", "", key) for key in keys]


@contextmanager
def lake(dsn: str, spark_url: str, setup: str, *tables: Any, **settings: Any) -> Iterator[Lake]:
    """Run ``setup`` in the source, then open a pipeline over ``tables`` (names or mappings)."""
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": dsn},
            "spark": {"remote": spark_url},
            "tables": [{"name": t} if isinstance(t, str) else t for t in tables],
            **settings,
        },
        "test",
    )
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(setup.encode())
        opened = Lake(config, source)
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def copied(dsn: str, spark_url: str, setup: str, *tables: Any, **settings: Any) -> Iterator[Lake]:
    """``lake``, whose tables are copied."""
    with lake(dsn, spark_url, setup, *tables, **settings) as opened:
        opened.pin()
        opened.copy()
        yield opened


def used(source: Lake, table: TableId) -> None:
    """Everything that a catalog has to serve, after the copy of a table of ids and texts.

    Change, alter, merge, copy once more, merge, take care, compare, purge.
    """
    source.execute(f"update {table} set v = 'y' where id > 50; delete from {table} where id < 10")
    source.execute(f"alter table {table} add w int default 7")
    source.execute(f"insert into {table} values (100, 'z')")
    source.catch_up()
    mark_for_copy(source.pipeline, [table])
    source.pin()
    source.copy()
    source.execute(f"update {table} set v = 'later' where id = 60")
    source.catch_up()
    done = list(maintain(source.pipeline, lambda: source.session, [table]))
    assert [one.problem for one in done] == [None]
    assert [one.equal for one in source.verify()] == [True]
    codes = {finding.code for finding in review(source.config)}
    assert {"catalog_unwritable", "catalog_unreachable"}.isdisjoint(codes), codes
    loaded, there = source.lake_table(table).load(), source.lake_table(table).sql_name
    assert loaded is not None
    assert loaded.format_version == source.config.lake.format_version
    with Pipeline.open(source.config.model_copy(update={"tables": ()})) as pipeline:
        assert drop_table(pipeline, table, purge=True).purged == (there,)
