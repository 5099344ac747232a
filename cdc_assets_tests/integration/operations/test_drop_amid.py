"""A source is given up in the midst of its first preparation, of a registration, of a check."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, SlotBusy, SourceMismatch
from cdc_assets.flusher.flusher import run
from cdc_assets.log.asked.wishes import take_up_again
from cdc_assets.log.locks import PINS_LOCK
from cdc_assets.log.store import LogStore
from cdc_assets.operations.drop import Dropped, drop_source
from cdc_assets.pins import pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.readiness import admission
from cdc_assets_tests.support.flusher import Bench
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

LEFT = (
    "select 'log' from _pg2iceberg.log_index"
    " union all select 'flushed' from _pg2iceberg.flushed_lsn"
    " union all select key from _pg2iceberg.pipeline_meta"
    " where key in ('timeline', 'database', 'publication', 'slot_restart_lsn')"
    " union all select slot_name from pg_replication_slots"
    " union all select pubname from pg_publication"
)
STREAMED = "select 1 from pg_replication_slots where active"


def drop(config: SourceConfig) -> Dropped:
    with Pipeline.open(config) as pipeline:
        return drop_source(pipeline)


class Midst:
    """Where a flusher stands still, and why it ended."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.ended = list[CdcError]()

    def end(self) -> CdcError:
        self.go_on.set()
        wait_for(lambda: self.ended)
        return self.ended[0]


@contextmanager
def flushing_until(
    config: SourceConfig, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> Iterator[Midst]:
    """A flusher that begins, and stands still where it calls that for the first time."""
    midst, inner = Midst(), getattr(owner, name)

    def waits(*given: Any, **how: Any) -> Any:
        midst.reached.set()
        assert midst.go_on.wait(60)
        return inner(*given, **how)

    def flusher(stop: threading.Event) -> None:
        try:
            run(config, stop=stop)
        except CdcError as error:
            midst.ended.append(error)

    with monkeypatch.context() as patched, beside(flusher):
        patched.setattr(owner, name, waits)
        try:
            yield midst
        finally:
            midst.go_on.set()


def test_who_makes_its_slot_is_waited_for(
    source: Bench, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is made after that would keep WAL for ever."""
    source.execute("create table t (id int primary key)")
    config = source.config("t")
    dropped = list[Dropped]()
    wished = "select 1 from _pg2iceberg.locks where name = 'pins' and wanted_by is not null"
    with flushing_until(config, monkeypatch, pins, "publish_tables") as midst:
        assert midst.reached.wait(60)
        with beside(lambda _: dropped.append(drop(config))):
            wait_for(lambda: source.execute(wished))
            assert isinstance(midst.end(), SourceMismatch)
            wait_for(lambda: dropped)
    assert source.execute(LEFT) == []
    assert dropped[0].slot == config.slot


def test_who_goes_on_making_it_is_named_and_another_try_drops_it(
    source: Bench, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.operations.drop._PINS_SECONDS", 1.0)
    source.execute("create table t (id int primary key)")
    config = source.config("t")
    source.flush(config)
    with Pipeline.open(config) as pinning:
        with (
            pinning.store.locked(PINS_LOCK),
            pytest.raises(SlotBusy, match="is being made, which waits for"),
        ):
            drop(config)
        assert source.execute("select 1 from pg_replication_slots") != []
    drop(config)
    assert source.execute(LEFT) == []


def test_nothing_is_registered_after_it(
    source: Bench, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream was lost, so nobody waits for the slot any more."""
    source.execute("create table t (id int primary key)")
    config = source.config("t")
    source.flush(config)
    with flushing_until(config, monkeypatch, LogStore, "register") as midst:
        wait_for(lambda: source.execute(STREAMED))
        source.execute("insert into t values (1)")
        assert midst.reached.wait(60)
        source.execute(STREAMED.replace("1", "pg_terminate_backend(active_pid)", 1))
        wait_for(lambda: not source.execute(STREAMED))
        drop(config)
        assert source.execute(LEFT) == []
        error = midst.end()
        assert isinstance(error, SourceMismatch)
        assert error.codes == ("source_dropped",)
    assert source.execute(LEFT) == []


def test_what_a_check_found_isnt_recorded_after_it(
    source: Bench, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken up again it would be compared with a publication that is gone."""
    source.execute("create table t (id int primary key)")
    config = source.config("t")
    source.flush(config)
    with flushing_until(config, monkeypatch, admission, "remember") as midst:
        assert midst.reached.wait(60)
        drop(config)
        assert isinstance(midst.end(), SourceMismatch)
    assert source.execute(LEFT) == []
    with Pipeline.open(config) as pipeline:
        take_up_again(pipeline.store)
    source.flush(config)
