"""What a process of a group is given after another one ended at an awkward moment. No Spark."""

from __future__ import annotations

import time

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.consumers import Begin, follow, tables
from cdc_assets.log.store import LogEntry, LogStore
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.discovery import discovered
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.groups import TABLES, begin, change, changed, given


def test_what_is_registered_while_the_log_is_read_is_no_gap_of_it(
    source: Bench, config: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(config)
    change(source, config, 0)
    read, more = LogStore.entries, [100]

    def entries(store: LogStore, table: TableId, offset: int) -> list[LogEntry]:
        found = read(store, table, offset)
        if more:
            change(source, config, more.pop())
        return found

    monkeypatch.setattr(LogStore, "entries", entries)
    with given(config) as (_, events):
        assert not [event for event in events if isinstance(event, Begin)]
    with given(config) as (_, events):
        assert len(changed(events)) == 20 * len(TABLES)


def test_a_beginning_that_wasn_t_committed_is_told_once_more(
    source: Bench, config: SourceConfig
) -> None:
    for number in range(2):
        with given(config) as (_, events):
            begun = [event for event in events if isinstance(event, Begin)]
            assert len(begun) == len(TABLES)
            assert len(changed(events)) == 10 * number * len(TABLES)
        change(source, config, 100 * number)
    with given(config) as (stream, events):
        assert len(changed(events)) == 20 * len(TABLES)
        stream.commit()
    with given(config) as (_, events):
        assert events == []


def test_a_copy_made_anew_begins_behind_the_token_that_the_program_has(
    source: Bench, config: SourceConfig
) -> None:
    begin(config)
    change(source, config, 0)
    with given(config) as (stream, events):
        kept = {event.table: event.token for event in events}
        stream.commit()
    source.execute("update _pg2iceberg.tables set epoch = epoch + 1")
    change(source, config, 100)
    with follow(config, "search", token=kept.get, wait=False) as stream:
        events = list(stream)
    begun = [event for event in events if isinstance(event, Begin)]
    assert {event.table: event.since for event in begun} == kept
    assert {event.why for event in begun} == {"the table was copied anew"}
    assert len(changed(events)) == 10 * len(TABLES)


def test_the_source_isn_t_asked_again_for_a_table_that_it_has_no_more(
    source: Bench, config: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = parse_config(
        {
            **source.settings(),
            "tables": ["public.*"],
            "consumers": [{"name": "search", "start": "now"}],
        },
        "test",
    )
    source.execute("drop table d")
    asked = list[str]()

    def ask(of: SourceConfig) -> SourceConfig:
        asked.append(of.name)
        return discovered(of)

    monkeypatch.setattr(tables, "discovered", ask)
    with follow(written, "search") as stream:
        until = time.monotonic() + 3
        source.execute("insert into a values (1)")
        for event in stream:
            event.commit()
            if time.monotonic() > until:
                break
            source.execute("insert into a select max(id) + 1 from a")
            source.flush(config)
    assert len(asked) <= 2


def test_a_table_that_waits_for_its_lake_table_isn_t_read_at_every_look(
    source: Bench, config: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(config)
    source.execute("alter table a add w int; insert into a values (1, 'v', 2)")
    source.flush(config)
    read, times = LogStore.entries, list[TableId]()

    def entries(store: LogStore, table: TableId, offset: int) -> list[LogEntry]:
        times.append(table)
        return read(store, table, offset)

    monkeypatch.setattr(LogStore, "entries", entries)
    with follow(config, "search", wait=False) as stream:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert list(stream) == []
            assert "public.a" in stream.waits
            time.sleep(0.2)
    assert len(times) == 1
