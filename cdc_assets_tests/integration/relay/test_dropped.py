"""A second lake is given up while its log is passed on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import SourceMismatch
from cdc_assets.flusher.flusher import run
from cdc_assets.log.groups.lakes import LOG_OF
from cdc_assets.log.store import LogStore
from cdc_assets.operations.drop import drop_source
from cdc_assets.pipeline import Pipeline
from cdc_assets.relay import beginning
from cdc_assets.relay.first import first_log
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.second import second_log
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for


def flusher(config: SourceConfig, told: list[SourceMismatch]) -> Callable[[object], None]:
    """A flusher that says in ``told`` why it ended."""

    def runs(_: object) -> None:
        try:
            run(config)
        except SourceMismatch as error:
            told.append(error)

    return runs


def drops(config: SourceConfig, dropped: threading.Event) -> Callable[[object], None]:
    def drop(_: object) -> None:
        with Pipeline.open(config) as pipeline:
            drop_source(pipeline)
        dropped.set()

    return drop


@pytest.mark.parametrize("when", ["before", "after"])
def test_in_the_midst_of_a_step(
    source: Bench, first: SourceConfig, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Before ``flushed_lsn`` is moved, the step comes to nothing; after that it is waited for."""
    inside, go_on, dropped = threading.Event(), threading.Event(), threading.Event()
    advance, told = LogStore.advance, list[SourceMismatch]()

    def waits(*about: Any) -> None:
        if when == "after":
            advance(*about)
        inside.set()
        assert go_on.wait(60)
        if when == "before":
            advance(*about)

    with second_log(source, first) as second:
        second.pin()
        second.flush()
        source.execute("insert into a select generate_series(1, 9)")
        source.flush(first)
        monkeypatch.setattr(LogStore, "advance", waits)
        with beside(flusher(second.config, told)):
            assert inside.wait(60)
            with beside(drops(second.config, dropped)):
                assert dropped.wait(3 if when == "after" else 60) is (when == "before")
                go_on.set()
            wait_for(lambda: told)
        assert told[0].codes == ("source_dropped",)
        assert second.entries("a") == []
        assert second.store.flushed_lsn() is None
        assert second.held() == {}


def test_while_its_log_begins(
    source: Bench, first: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does once the first one has begun anew."""
    inside, go_on, dropped = threading.Event(), threading.Event(), threading.Event()
    look, told = first_log, list[SourceMismatch]()

    def waits(*about: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return look(*about)

    with second_log(source, first) as second:
        second.pin()
        second.pins.close()
        with beside(flusher(second.config, told)):
            wait_for(lambda: source.ask_log("select 1 from _pg2iceberg.consumer"))
            monkeypatch.setattr(beginning, "first_log", waits)
            second.store.begin_anew()
            assert inside.wait(60)
            with beside(drops(second.config, dropped)):
                dropped.wait(3)
                go_on.set()
            wait_for(lambda: told)
        assert told[0].codes == ("source_dropped",)
        assert (second.store.flushed_lsn(), second.store.meta(LOG_OF)) == (None, None)
