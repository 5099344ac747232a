"""A source in query mode is given up while its flusher polls."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from cdc_assets.errors import ReplicationLost, SourceMismatch
from cdc_assets.operations.drop import drop_source
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, T, queried
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

AFTER_READING = "cdc_assets.flusher.polling.secured"
AFTER_REGISTERING = "cdc_assets.poller.poller.Poller.register"


def drop(source: Queried) -> bool:
    with Pipeline.open(source.config) as pipeline:
        drop_source(pipeline)
    return True


def is_gone(source: Queried) -> bool:
    store = source.pipeline.store
    left = source.execute("select 1 from _pg2iceberg.query_watermarks")
    return (store.flushed_lsn(), store.entries(T, 0), left) == (None, [], [])


def test_between_polls(postgres_dsn: NewDatabase, tmp_home: object) -> None:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as source:
        source.pins.close()
        source.poll()
        source.execute("insert into t values (1, 'x')")
        drop(source)
        with pytest.raises(SourceMismatch, match="was dropped"):
            source.poll()
        assert is_gone(source)


def test_when_its_rows_were_read(
    postgres_dsn: NewDatabase, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as source:
        source.pins.close()
        source.execute("insert into t values (1, 'x')")
        monkeypatch.setattr(AFTER_READING, lambda *_: drop(source))
        with pytest.raises(ReplicationLost, match="begun anew"):
            source.poll()
        assert is_gone(source)


def test_while_they_are_registered(
    postgres_dsn: NewDatabase, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as source:
        source.pins.close()
        source.execute("insert into t values (1, 'x')")
        dropped = threading.Event()

        def drops(_: threading.Event) -> None:
            drop(source)
            dropped.set()

        def registers(*_: object) -> None:
            stack.enter_context(beside(drops))
            assert not dropped.wait(3), "who drops it waits for who registers"

        monkeypatch.setattr(AFTER_REGISTERING, registers)
        with ExitStack() as stack:
            source.poll()
            wait_for(dropped.is_set)
        assert is_gone(source)
