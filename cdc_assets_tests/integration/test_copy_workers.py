"""Several workers, claims that go stale, processes that are killed, pins that are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.errors import Fenced
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.copies import claims
from cdc_assets.log.copies.chunks import ChunkProgress, await_another_pin, chunks, restart_copy
from cdc_assets.log.copies.claims import Claims, ClaimScope, Written
from cdc_assets.observe.status import collect
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.home import home
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.snapshot.landing import Landing
from cdc_assets.snapshot.table_copy import TableCopy
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.test_embedded_postgres import eventually
from cdc_assets_tests.lake_support import Lake, lake

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = """
create table t (id int primary key, v text not null, pad text);
insert into t select i, 'old ' || i, repeat('x', 100) from generate_series(1, 20000) i;
"""


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> Iterator[Lake]:
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        SETUP,
        {"name": "t", "chunk_pages": 4},
        snapshot={"max_parallel_chunks": 2},
    ) as opened:
        yield opened


def scope(source: Lake) -> ClaimScope:
    row = source.pipeline.store.table(T)
    assert row is not None
    assert row.pin is not None
    return ClaimScope(
        source.pipeline.source_dsn, "_pg2iceberg", "src", str(T), row.epoch, row.pin, workers=2
    )


def equal(source: Lake) -> bool:
    return source.rows(T) == sorted(source.execute("select * from t"), key=repr)


# --- claims ---


def test_two_workers_never_hold_the_same_chunk(source: Lake) -> None:
    source.pin()
    one, two = Claims(scope(source), "one"), Claims(scope(source), "two")
    try:
        held: list[str] = []
        while True:
            mine, yours = one.take(), two.take()
            if not mine and not yours:
                break
            for worker, taken in ((one, mine), (two, yours)):
                held += [chunk.key for chunk in taken]
                assert worker.wrote([Written(chunk.key, 1, 1, 0.0) for chunk in taken], None)
        assert sorted(held) == [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    finally:
        one.close()
        two.close()


def test_a_claim_ends_with_the_session_of_its_worker(source: Lake) -> None:
    source.pin()
    gone = Claims(scope(source), "gone")
    taken = [chunk.key for chunk in gone.take()]
    other = Claims(scope(source), "other")
    try:
        assert not {chunk.key for chunk in other.take()} & set(taken)
        gone.close()
        again: list[str] = []

        def taken_over() -> bool:
            again.extend(chunk.key for chunk in other.take())
            return set(taken) <= set(again)

        assert eventually(taken_over)
    finally:
        other.close()


def test_a_worker_that_comes_back_late_is_fenced(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.pin()
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 3600.0)  # it hangs
    late, other = Claims(scope(source), "late"), Claims(scope(source), "other")
    late._stop.set()
    try:
        taken = late.take()
        source.execute(
            "update _pg2iceberg.snapshot_progress set heartbeat_at = now() - interval '31 seconds'"
            " where state = 'claimed'"
        )
        assert [chunk.key for chunk in other.take()] == [chunk.key for chunk in taken]
        assert not late.wrote([Written(chunk.key, 1, 1, 0.0) for chunk in taken], "file:///late")
        assert other.wrote([Written(chunk.key, 2, 2, 0.0) for chunk in taken], None)
        found = {c.key: c for c in chunks(source.pipeline.store, T, 1)}
        assert {found[chunk.key].rows for chunk in taken} == {2}
    finally:
        late.close()
        other.close()


def test_a_heartbeat_keeps_a_claim(source: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    source.pin()
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.2)
    worker, other = Claims(scope(source), "slow"), Claims(scope(source), "other")
    try:
        taken = worker.take()
        source.execute(
            "update _pg2iceberg.snapshot_progress set heartbeat_at = now() - interval '29 seconds'"
            " where state = 'claimed'"
        )
        time.sleep(1.5)
        assert not {chunk.key for chunk in other.take()} & {chunk.key for chunk in taken}
    finally:
        worker.close()
        other.close()


# --- landing ---


def test_invariant_9_a_coordinator_that_wakes_up_late_lands_nothing(source: Lake) -> None:
    source.pin()
    keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    written = _written_but_not_landed(source, keys[:10])
    row = source.pipeline.store.table(T)
    assert row is not None
    late = Landing(source.config, source.pipeline.store, row)
    late.open()
    asleep = late._loaded()
    prompt = Landing(source.config, source.pipeline.store, row)
    prompt.open()
    prompt.land(written)
    rows = len(source.rows(T))
    late._loaded = lambda: asleep  # type: ignore[method-assign] # it looked before the other landed
    with pytest.raises(Fenced):
        late.land(written)
    assert len(source.rows(T)) == rows
    copy_table(source.pipeline, source.session, T)
    assert equal(source)


def test_a_coordinator_of_an_earlier_copy_lands_nothing(source: Lake) -> None:
    source.pin()
    keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    written = _written_but_not_landed(source, keys[:10])
    row = source.pipeline.store.table(T)
    assert row is not None
    late = Landing(source.config, source.pipeline.store, row)
    late.open()
    assert restart_copy(source.pipeline.store, row)
    source.pin()
    source.copy()
    with pytest.raises(Fenced):
        late.land(written)
    assert equal(source)


def test_who_looked_before_a_copy_ended_does_not_begin_it_anew(source: Lake) -> None:
    source.pin()
    row = source.pipeline.store.table(T)
    assert row is not None
    source.copy()
    await_another_pin(source.pipeline.store, row)
    assert not restart_copy(source.pipeline.store, row, of_pin=row.pin)
    now = source.pipeline.store.table(T)
    assert now is not None
    assert (now.state, now.epoch) == ("streaming", 1)


def test_a_file_that_cannot_be_read_is_copied_again(source: Lake) -> None:
    source.pin()
    keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    written = _written_but_not_landed(source, keys[:10])
    for file in {chunk.file for chunk in written if chunk.file}:
        path = Path(file.removeprefix("file://"))
        path.write_bytes(path.read_bytes()[:100])  # the power went
    copy_table(source.pipeline, source.session, T)
    assert equal(source)


def _written_but_not_landed(source: Lake, keys: list[str]) -> list[ChunkProgress]:
    """Have the real workers write ``keys`` while nobody may commit."""
    lock = f"write:{T}"
    row = source.pipeline.store.table(T)
    assert row is not None
    opened = Landing(source.config, source.pipeline.store, row)
    opened.open()
    with Pipeline.open(source.config) as other:
        other.store.lock(lock)
        from cdc_assets.snapshot.coordinator import _Coordinator

        copy = TableCopy(source.pipeline, source.session, row, frozenset(keys), lambda _: None)
        copy._landing = opened
        coordinator = _Coordinator(source.pipeline, source.session, [copy], threading.Event())
        coordinator._job(coordinator._tasks())
        coordinator._let_go()
    return [c for c in chunks(source.pipeline.store, T, 1) if c.state == "written"]


# --- pins ---


def test_invariant_8_a_row_that_moved_between_two_pins_keeps_its_toast(source: Lake) -> None:
    """It moved from a chunk that wasn't copied into one that was, and its update left TOAST out."""
    source.execute("truncate t; alter table t alter pad set storage external")
    source.execute(
        "insert into t select i, 'old ' || i,"
        " repeat('x', case when i between 10000 and 10010 then 9000 else 100 end)"
        " from generate_series(1, 20000) i"
    )
    source.execute("delete from t where id <= 600")
    source.execute("vacuum (index_cleanup on) t")  # the first pages have room now
    source.pin()
    keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    copy_table(source.pipeline, source.session, T, only=keys[:3])
    with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as writer:
        # Too long for its own full page; a session that has written nowhere yet takes the first
        # page that has room.
        writer.execute("update t set v = repeat('m', 300) where id between 10000 and 10010")
    moved = source.execute("select count(*) from t where id > 9999 and ctid < '(12,0)'")
    assert moved[0][0] > 0, "the test needs rows that moved into the copied pages"
    source.pins.close()
    source.pins = Pins(source.pipeline)
    source.pin()
    source.copy()
    assert collect(source.pipeline).tables[0].applied_lsn is None, "not whole yet (invariant 10)"
    source.flush()
    drained = source.drain(T)
    assert drained.repaired > 0
    # What was read anew is of a moment that the log comes to.
    assert collect(source.pipeline).tables[0].applied_lsn is None
    source.flush()
    source.drain(T)
    assert collect(source.pipeline).tables[0].applied_lsn is not None
    assert equal(source)


def _copied_under_two_pins(source: Lake, between: str) -> None:
    """Few chunks, then the statements ``between`` in a transaction each, then the others."""
    source.execute("truncate t; alter table t alter pad set storage external")
    source.execute(
        "insert into t select i, 'old ' || i, repeat(i || ' ', 2000)"
        " from generate_series(1, 2000) i"
    )
    source.pin()
    first, *_ = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
    copy_table(source.pipeline, source.session, T, only=[first])
    source.execute(between)
    source.pins.close()
    source.pins = Pins(source.pipeline)
    source.pin()
    source.copy()


def test_invariant_8_a_key_that_went_to_another_row_between_two_pins(source: Lake) -> None:
    """The rows under the old keys are of after the second pin: not those that the keys had."""
    _copied_under_two_pins(
        source,
        "begin; update t set id = -1 where id = 1000; update t set id = 1000 where id = 1001;"
        " update t set id = 1001 where id = -1; commit;"
        " update t set id = 5000 where id = 1002; insert into t values (1002, 'new', 'short')",
    )
    source.flush()
    assert source.drain(T).repaired == 3
    source.flush()
    source.drain(T)
    assert equal(source)
    assert [c.equal for c in source.verify()] == [True]


def test_invariant_8_a_row_that_was_read_anew_and_got_another_key_since(source: Lake) -> None:
    """What was read under the key was of after that, and isn't the row that moved on."""
    _copied_under_two_pins(source, "update t set id = 5000 where id = 1000")
    source.flush()
    source.execute("update t set id = 6000 where id = 5000")
    source.execute("insert into t values (5000, 'new', repeat('new ', 2000))")
    assert source.drain(T).repaired == 1
    source.flush()
    assert source.drain(T).repaired == 1
    source.flush()
    source.execute("update t set id = 7000 where id = 6000")
    source.flush()
    assert source.drain(T).repaired == 0, "the log is where rows were read at: the lake is right"
    assert equal(source)


# --- processes ---


def configuration(source: Lake, folder: Path) -> Path:
    path = folder / "source.json"
    path.write_text(source.config.dump())
    return path


def snapshot_process(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cdc_assets", "--config", str(path), "snapshot"],
        env={**os.environ, "CDC_ASSETS_HOME": str(home())},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def large(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> Iterator[Lake]:
    setup = SETUP.replace("20000", "150000") + "create table u as table t; alter table u add"
    setup += " primary key (id);"
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        setup,
        {"name": "t", "chunk_pages": 8},
        {"name": "u", "chunk_pages": 8},
        snapshot={"max_parallel_chunks": 1, "max_parallel_tables": 1},
    ) as opened:
        yield opened


def claimers(source: Lake) -> set[Any]:
    rows = source.execute("select distinct claimed_by from _pg2iceberg.snapshot_progress")
    return {str(row[0]).rsplit("/", 1)[0] for row in rows if row[0]}


def test_two_processes_that_start_at_once_share_the_copy(large: Lake, tmp_path: Path) -> None:
    path = configuration(large, tmp_path)
    both = [snapshot_process(path) for _ in range(2)]
    for process in both:
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert {row.state for row in large.pipeline.store.tables()} == {"streaming"}
    assert len(claimers(large)) == 2
    large.flush()
    large.drain_all()
    assert all(comparison.equal for comparison in large.verify())


def test_a_killed_process_is_made_up_for_by_the_other(large: Lake, tmp_path: Path) -> None:
    path = configuration(large, tmp_path)
    victim, survivor = snapshot_process(path), snapshot_process(path)

    def both_work() -> bool:
        rows = large.execute(
            "select count(distinct claimed_by) from _pg2iceberg.snapshot_progress"
            " where state = 'claimed'"
        )
        return bool(rows and rows[0][0])

    assert eventually(lambda: bool(large.execute("select to_regclass('_pg2iceberg.tables')")))
    assert eventually(both_work, 60.0)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    _, said = survivor.communicate()
    assert survivor.returncode == 0, said
    large.execute("update t set v = 'changed' where id % 7 = 0")
    large.flush()
    large.drain_all()
    assert equal(large)


def test_a_copy_killed_again_and_again_ends_with_the_truth(large: Lake, tmp_path: Path) -> None:
    """The only process is killed at moments that come closer; changes go on all the while."""
    path = configuration(large, tmp_path)
    delay = 3.0
    for round_ in range(4):
        process = snapshot_process(path)
        time.sleep(delay + round_)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        marker = uuid.uuid4().hex[:8]
        large.execute(f"update t set v = '{marker}' where id % 1000 = {round_}")
        large.execute(f"delete from t where id % 1001 = {round_}")
    process = snapshot_process(path)
    _, said = process.communicate()
    assert process.returncode == 0, said
    large.flush()
    large.drain_all()
    assert all(comparison.equal for comparison in large.verify())


def test_progress_is_seen_in_the_status_and_somebody_streams_meanwhile(
    large: Lake, tmp_path: Path
) -> None:
    path = configuration(large, tmp_path)
    process = snapshot_process(path)
    seen: list[dict[str, Any]] = []
    streamed = False
    # Not by the command: its start takes as long as half of the copy.
    while process.poll() is None:
        found = collect(large.pipeline).to_json()
        seen += found["tables"]
        streamed = streamed or found["slot"]["active"]
        time.sleep(0.05)
    assert process.stderr is not None
    process.stderr.close()
    rates = [table["copy_rows_per_second"] for table in seen if table["state"] == "copying"]
    assert any(rate for rate in rates), seen[-2:]
    assert streamed, "else WAL would pile up while a large table is copied"
