"""Coordinators that wake up late land nothing, and a file that can't be read is copied again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyiceberg.table import snapshots
from pyspark.errors import PySparkException

from cdc_assets.errors import Fenced, NotReady, TableProblem
from cdc_assets.lake import copies
from cdc_assets.lake.tables import RETRIES
from cdc_assets.log.copies.chunks import ChunkProgress, await_another_pin, chunks, restart_copy
from cdc_assets.log.locks import write_lock
from cdc_assets.pipeline import Pipeline
from cdc_assets.readiness.executors import clocks
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.snapshot.landing import Landing
from cdc_assets.snapshot.table_copy import TableCopy
from cdc_assets_tests.integration.snapshot.sources import T, chunk_keys
from cdc_assets_tests.support.lake import Lake

pytestmark = pytest.mark.spark


def test_invariant_9_a_coordinator_that_wakes_up_late_lands_nothing(source: Lake) -> None:
    written = _written_but_not_landed(source)
    late = _landing(source)
    asleep = late._loaded()
    _landing(source).land(written)
    rows = len(source.rows(T))
    late._loaded = lambda: asleep  # type: ignore[method-assign] # it looked before the other landed
    with pytest.raises(Fenced):
        late.land(written)
    assert len(source.rows(T)) == rows
    copy_table(source.pipeline, source.session, T)
    assert source.equal(T)


def test_a_coordinator_of_an_earlier_copy_lands_nothing(source: Lake) -> None:
    written = _written_but_not_landed(source)
    row = source.row(T)
    late = _landing(source)
    assert restart_copy(source.pipeline.store, row)
    source.pin()
    source.copy()
    with pytest.raises(Fenced):
        late.land(written)
    assert source.equal(T)


def test_who_looked_before_a_copy_ended_does_not_begin_it_anew(source: Lake) -> None:
    source.pin()
    row = source.row(T)
    source.copy()
    await_another_pin(source.pipeline.store, row)
    assert not restart_copy(source.pipeline.store, row, of_pin=row.pin)
    now = source.row(T)
    assert (now.state, now.epoch) == ("streaming", 1)


def test_only_a_copys_own_commits_are_not_tried_again(source: Lake) -> None:
    source.pin()
    source.copy()
    loaded, lake = source.lake_table(T).load(), source.lake_table(T)
    assert loaded is not None and loaded.properties[RETRIES] == lake.properties()[RETRIES] != "0"


def test_a_file_that_cannot_be_read_is_copied_again(source: Lake) -> None:
    written = _written_but_not_landed(source)
    for file in {chunk.file for chunk in written if chunk.file}:
        path = Path(file.removeprefix("file://"))
        path.write_bytes(path.read_bytes()[:100])  # the power went
    copy_table(source.pipeline, source.session, T)
    assert source.equal(T)


@pytest.mark.parametrize("apart", [-300, 300])
def test_a_copy_is_refused_where_the_clock_is_far_off_sparks(
    source: Lake, monkeypatch: pytest.MonkeyPatch, apart: int
) -> None:
    """Iceberg would refuse what Spark commits after it."""
    source.pin()
    with monkeypatch.context() as patch:
        _set_clock(patch, apart)
        with pytest.raises(NotReady, match=r"lake_clock: the clock of this machine is 300 s"):
            source.copy()
    source.copy()
    assert source.equal(T)


def test_no_clock_is_blamed_where_spark_takes_its_time(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its slots may be taken for as long as a copy goes on: it is asked without one."""

    def idle(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(6)
            yield batch

    monkeypatch.setattr(clocks, "MOST_APART_SECONDS", 1.0)
    assert not [*clocks.clock_findings(source.session)]
    many = 16
    with ThreadPoolExecutor(1) as pool:
        busy = source.session.range(0, many, 1, many).mapInArrow(idle, "id long")
        done = pool.submit(busy.collect)
        time.sleep(2)
        assert not [*clocks.clock_findings(source.session)]
        assert not done.done()
        source.session.interruptAll()
        with suppress(PySparkException):
            done.result()


def test_no_copy_goes_on_at_an_earlier_time(source: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Spark would read the table any more."""
    written = _written_but_not_landed(source)
    with monkeypatch.context() as patch:
        _set_clock(patch, 300)
        _landing(source).land(written[:1])
    with pytest.raises(TableProblem, match=r"by a clock that is (300|299) s ahead"):
        _landing(source).land(written[1:])
    assert source.session.table(source.lake_table(T).sql_name).count() > 0


def _set_clock(patch: pytest.MonkeyPatch, apart: int) -> None:
    """Of this machine, as far as it matters here."""
    other = SimpleNamespace(time=lambda: time.time() + apart)
    for module in (copies, clocks, snapshots):
        patch.setattr(module, "time", other)


def _landing(source: Lake) -> Landing:
    opened = Landing(source.config, source.pipeline.store, source.row(T))
    opened.open()
    return opened


def _written_but_not_landed(source: Lake) -> list[ChunkProgress]:
    """Have the real workers write ten chunks of a new pin while nobody may commit."""
    source.pin()
    keys, lock, row = chunk_keys(source)[:10], write_lock(T), source.row(T)
    opened = _landing(source)
    with Pipeline.open(source.config) as other:
        other.store.lock(lock)
        from cdc_assets.snapshot.coordinator import _Coordinator

        only = frozenset(keys)
        copy = TableCopy(source.pipeline, source.session, row, only, lambda _: None)
        copy._landing = opened
        coordinator = _Coordinator(source.pipeline, source.session, [copy], only, threading.Event())
        coordinator._job(coordinator._tasks())
        coordinator._let_go()
    return [c for c in chunks(source.pipeline.store, T, 1) if c.state == "written"]
