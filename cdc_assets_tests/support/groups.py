"""Processes of a group that follow some tables, which none of them merges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cdc_assets.config.source import SourceConfig
from cdc_assets.consumers import Begin, Changes, Event, Stream, follow
from cdc_assets_tests.support.flusher import Bench

TABLES = ("a", "b", "c", "d")


def begin(config: SourceConfig, group: str = "search") -> None:
    """The group has begun with all tables."""
    with given(config, group) as (stream, events):
        assert sum(isinstance(event, Begin) for event in events) == len(TABLES)
        stream.commit()


def change(source: Bench, config: SourceConfig, first: int, count: int = 10) -> None:
    """Some inserts into each table, in one staged file a table."""
    for name in TABLES:
        source.execute(f"insert into {name} select generate_series({first}, {first + count - 1})")
    source.flush(config)


@contextmanager
def given(config: SourceConfig, group: str = "search") -> Iterator[tuple[Stream, list[Event]]]:
    """A process of the group that has been given all there is, and has committed nothing."""
    with follow(config, group, wait=False) as opened:
        yield opened, list(opened)


def changed(events: list[Event]) -> list[tuple[str, int]]:
    return [
        (event.table, row["id"])
        for event in events
        if isinstance(event, Changes)
        for row in event.rows.to_pylist()
    ]
