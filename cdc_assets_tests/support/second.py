"""A second lake beside a first one, and a second log beside a first one without a lake."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.flusher.flusher import run
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.states import TableState
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.relay.first import beside
from cdc_assets.relay.passing import let_go
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.lake import Lake
from cdc_assets_tests.support.waiting import wait_for

GROUP = "eu"


def second_config(first: SourceConfig, **settings: object) -> SourceConfig:
    """That of a second lake of the same database; ``settings`` differ from the first one's."""
    data = json.loads(first.dump())
    data |= {"slot": "", "publication": "", "name": f"{first.name}_eu", "snapshot": {}}
    data |= {"log": {"of": first.name, "group": GROUP}, **settings}
    return parse_config(data, "test", expanded=True)


class SecondLake(Lake):
    def __init__(self, first: Lake, config: SourceConfig) -> None:
        super().__init__(config, first.source)
        self.first = first

    def flush(self) -> None:
        """Everything that is committed now goes into both logs."""
        self.first.flush()
        run(self.config, until=self.first.pipeline.store.flushed_lsn())


@contextmanager
def second_lake(first: Lake, **settings: object) -> Iterator[SecondLake]:
    """Its tables are pinned and copied when it is given, unless ``pinned`` is false."""
    pinned = settings.pop("pinned", True)
    opened = SecondLake(first, second_config(first.config, **settings))
    try:
        if pinned:
            begin(opened)
        yield opened
    finally:
        opened.close()


def begin(second: Lake) -> None:
    """Pin and copy what waits for it."""
    second.pins.prepare()
    second.pins.tick()
    second.copy()


class SecondLog:
    """A second log of a bench's, whose tables count as copied as soon as they are pinned."""

    def __init__(self, source: Bench, config: SourceConfig) -> None:
        self.source, self.config = source, config
        self.pipeline = Pipeline.open(config)
        self.store = self.pipeline.store
        self.pins = Pins(self.pipeline)

    def pin(self) -> None:
        self.pins.prepare()
        wait_for(self._is_pinned)
        for row in self.store.tables(None, TableState.COPYING):
            self.store.finish_copy(row.table, row.epoch, row.snapshot_lsn or Lsn.ZERO)
        self.pins.tick()

    def _is_pinned(self) -> bool:
        self.pins.tick()
        return not self.store.tables(None, TableState.WAITING)

    def flush(self) -> None:
        """What the first log has goes into this one."""
        flushed = beside(self.store, str(self.of)).flushed_lsn()
        assert flushed is not None
        run(self.config, until=flushed)

    def let_go(self) -> None:
        let_go(self.config, self.store, beside(self.store, str(self.of)))

    @property
    def of(self) -> str:
        assert self.config.log is not None
        return self.config.log.of

    def state(self, table: str) -> tuple[str, str | None]:
        row = self.store.table(TableId.parse(table))
        assert row is not None
        return row.state, row.reason

    def held(self) -> Mapping[str, int]:
        """Up to where the group lets go of the first log, by table."""
        return dict(
            self.source.ask_log(
                'select table_name, "offset" from _pg2iceberg.mat_cursor'
                " where consumer_group = %s and source = %s",
                GROUP,
                self.of,
            )
        )

    def entries(self, table: str, *, of: str | None = None) -> list[tuple[Any, ...]]:
        """What the log has of the table; ``of``: or another one."""
        return self.source.ask_log(
            "select start_offset, end_offset, path, first_row, flushable_lsn::text"
            " from _pg2iceberg.log_index where source = %s and table_name = %s"
            " order by start_offset",
            of or self.config.name,
            str(TableId.parse(table)),
        )

    def is_whole(self, table: str) -> bool:
        """Whether its log since the pin is the first one's, to the row."""
        row = self.store.table(TableId.parse(table))
        assert row is not None and row.snapshot_lsn is not None
        first = [e for e in self.entries(table, of=self.of) if Lsn.parse(e[4]) > row.snapshot_lsn]
        mine = [e for e in self.entries(table) if Lsn.parse(e[4]) > row.snapshot_lsn]
        return first == mine

    def close(self) -> None:
        self.pins.close()
        self.pipeline.close()


@contextmanager
def second_log(source: Bench, first: SourceConfig, **settings: object) -> Iterator[SecondLog]:
    opened = SecondLog(source, second_config(first, **settings))
    try:
        yield opened
    finally:
        opened.close()


def pinned(config: SourceConfig) -> None:
    """A flusher runs until no table of the first waits for its pin."""
    with flushing(config), Pipeline.open(config) as pipeline:
        wait_for(
            lambda: len(pipeline.store.tables(None, TableState.STREAMING)) == len(config.tables)
        )


def copied_anew(config: SourceConfig, table: str = "public.a") -> None:
    with Pipeline.open(config) as pipeline:
        row = pipeline.store.table(TableId.parse(table))
        assert row is not None
        restart_copy(pipeline.store, row)
