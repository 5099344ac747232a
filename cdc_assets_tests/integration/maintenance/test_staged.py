"""Staged files die last: when they go, when they don't, and what a crash leaves. No Spark."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc_assets.errors import SparkProblem
from cdc_assets.lake.copies import create_for_copy
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.locks import write_lock
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.staged.places import Place
from cdc_assets.log.staged.storage import SHARED_FOLDER, Storage, folder_name
from cdc_assets.maintenance import compact
from cdc_assets.maintenance.compact import step_aside
from cdc_assets.maintenance.run import maintain
from cdc_assets.maintenance.staged import (
    mark_passed,
    passed_offset,
    remove_passed,
    remove_staged_orphans,
    settle,
)
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.flusher import Bench

T = TableId("public", "t")
NO_GRACE, DAY = timedelta(0), timedelta(days=1)


@pytest.fixture
def source(source: Bench) -> Bench:
    source.execute("create table t (id int primary key, v text)")
    return source


@pytest.fixture
def pipeline(source: Bench) -> Iterator[Pipeline]:
    """Three files of ten rows each are in the log."""
    with Pipeline.open(source.config("t")) as found:
        found.store.add_table(describe(source.connection, T))
        source.execute("update _pg2iceberg.tables set state = 'streaming', snapshot_lsn = '0/1'")
        found.store.begin_at(Lsn.ZERO)
        folder = f"{found.config.staging_uri}/{source.name}/{folder_name(T)}/2026-01-01"
        for i in range(3):
            path = f"{folder}/{i}.parquet"
            local = Path(Storage().locate(path)[1])
            local.parent.mkdir(parents=True, exist_ok=True)
            local.write_bytes(b"staged")
            lsn = current_lsn(source.connection)
            found.store.register([StagedRows(T, path, 10, 6)], lsn, lsn, found.store.server_now())
        yield found


def flush(source: Bench, pipeline: Pipeline) -> None:
    """Everything that is committed now is in the log."""
    pipeline.store.advance(current_lsn(source.connection))


def cursor(offset: int) -> Cursor:
    return Cursor(offset, Lsn(2**40))


def passes(pipeline: Pipeline, offset: int, grace: timedelta = NO_GRACE) -> int:
    """How many files go once the lake is there."""
    row = pipeline.store.table(T)
    assert row is not None
    mark_passed(pipeline.store, row, passed_offset(pipeline.store, row, cursor(offset)))
    return remove_passed(pipeline.store, T, pipeline.store.places, grace).files


def test_invariant_11_a_file_goes_a_grace_after_every_group_is_past_it(
    source: Bench, pipeline: Pipeline
) -> None:
    files = [path for _, _, path in source.entries("public.t")]
    source.execute(
        'insert into _pg2iceberg.mat_cursor (consumer_group, source, table_name, "offset",'
        " applied_lsn) values ('other', %s, 'public.t', 10, '0/0')",
        source.name,
    )
    assert passes(pipeline, 30, DAY) == 0  # the grace isn't over
    assert passes(pipeline, 30) == 1  # the other group has read one file
    assert [path.exists() for path in files] == [False, True, True]
    source.execute('update _pg2iceberg.mat_cursor set "offset" = 30')
    assert passes(pipeline, 19) == 0  # a file half-way through is needed
    assert passes(pipeline, 20) == 1
    assert [path.exists() for path in files] == [False, False, True]
    assert [a for a, _, _ in source.entries("public.t")] == [20]


def test_invariant_11_a_group_that_has_read_nothing_yet_keeps_everything(
    source: Bench, pipeline: Pipeline
) -> None:
    source.execute(
        "insert into _pg2iceberg.claims (consumer_group, source, table_name)"
        " values ('other', %s, 'public.t')",
        source.name,
    )
    source.execute("update _pg2iceberg.tables set snapshot_lsn = 'FFFF/0'")
    assert passes(pipeline, 30) == 0


def test_invariant_11_the_grace_begins_anew_when_a_cursor_goes_back(
    source: Bench, pipeline: Pipeline
) -> None:
    assert passes(pipeline, 30, DAY) == 0
    source.execute("update _pg2iceberg.log_index set passed_at = passed_at - interval '2 days'")
    assert passes(pipeline, 10, DAY) == 1  # of the first file it is over; the others are back
    passed = source.execute("select passed_at from _pg2iceberg.log_index order by start_offset")
    assert passed == [(None,), (None,)]


def test_invariant_11_while_a_table_waits_or_is_copied_its_old_cursor_says_nothing(
    source: Bench, pipeline: Pipeline
) -> None:
    source.execute("update _pg2iceberg.tables set state = 'waiting', snapshot_lsn = null")
    assert passes(pipeline, 30) == 0
    lsn = source.execute(
        "select flushable_lsn::text from _pg2iceberg.log_index order by start_offset limit 1"
    )[0][0]
    source.execute(f"update _pg2iceberg.tables set state = 'copying', snapshot_lsn = '{lsn}'")
    assert passes(pipeline, 30) == 1  # it is in the copy


def test_invariant_7_the_first_cursor_passes_nothing_that_is_registered_meanwhile(
    source: Bench, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = current_lsn(source.connection)
    source.execute("update _pg2iceberg.tables set snapshot_lsn = %s", str(point))
    row = pipeline.store.table(T)
    assert row is not None
    assert pipeline.store.first_cursor(row) == Cursor(30, point)  # the copy holds all of it
    log_end = pipeline.store.log_end

    def flushed_just_before(table: TableId) -> int:
        above = Lsn(point.value + 1)
        late = StagedRows(T, "file:///late", 5, 6)
        pipeline.store.register([late], above, above, pipeline.store.server_now())
        return log_end(table)

    monkeypatch.setattr(pipeline.store, "log_end", flushed_just_before)
    assert pipeline.store.first_cursor(row) == Cursor(30, point)


def test_a_crash_between_entry_and_file_leaves_an_orphan_that_goes_later(
    source: Bench, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [path for _, _, path in source.entries("public.t")]

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(Place, "delete", dies)
        with pytest.raises(KeyboardInterrupt):
            passes(pipeline, 20)
    registered = [path for _, _, path in source.entries("public.t")]
    assert registered == files[2:]
    assert all(path.exists() for path in registered)  # never an entry without its file
    assert all(path.exists() for path in files)
    now = _settled(source, pipeline)
    assert remove_staged_orphans(pipeline, T, now, now).files == 0  # young ones stay
    _age(files, days=10)
    assert remove_staged_orphans(pipeline, T, now, now).files == 2
    assert [path.exists() for path in files] == [False, False, True]


def _age(files: list[Path], days: int) -> None:
    """Make files so old."""
    for path in files:
        then = time.time() - days * 86400
        os.utime(path, (then, then))


def _settled(source: Bench, pipeline: Pipeline) -> datetime:
    for _ in range(50):
        if (found := settle(pipeline)) is not None:
            return found
        flush(source, pipeline)
    raise AssertionError("it never settles")


U = TableId("public", "u")


@pytest.fixture
def shared(source: Bench, pipeline: Pipeline) -> Path:
    """Two files more: one that t and u share, and an orphan beside it."""
    source.execute("create table u (id int primary key)")
    pipeline.store.add_table(describe(source.connection, U))
    source.execute("update _pg2iceberg.tables set state = 'streaming', snapshot_lsn = '0/1'")
    uri = f"{pipeline.config.staging_uri}/{source.name}/{SHARED_FOLDER}/2026-01-01/0.parquet"
    local = Path(Storage().locate(uri)[1])
    local.parent.mkdir(parents=True)
    local.write_bytes(b"staged")
    local.with_name("1.parquet").write_bytes(b"orphan")
    lsn, now = current_lsn(source.connection), pipeline.store.server_now()
    pipeline.store.register(
        [StagedRows(U, uri, 4, 3, 0), StagedRows(T, uri, 10, 7, 4)], lsn, lsn, now
    )
    return local


def test_invariant_11_a_shared_file_goes_with_the_last_table(
    source: Bench, pipeline: Pipeline, shared: Path
) -> None:
    assert passes(pipeline, 40) == 3  # t's own ones
    assert source.entries("public.t") == []
    assert shared.exists()
    row = pipeline.store.table(U)
    assert row is not None
    mark_passed(pipeline.store, row, 4)
    assert remove_passed(pipeline.store, U, pipeline.store.places, NO_GRACE).files == 1
    assert not shared.exists()


def test_invariant_11_a_shared_file_with_an_entry_is_no_orphan(
    source: Bench, pipeline: Pipeline, shared: Path
) -> None:
    orphan = shared.with_name("1.parquet")
    _age([shared, orphan], days=10)
    now = _settled(source, pipeline)
    assert remove_staged_orphans(pipeline, T, now, now).files == 0
    assert remove_staged_orphans(pipeline, U, now, now).files == 0
    assert remove_staged_orphans(pipeline, None, now, now).files == 1
    assert (shared.exists(), orphan.exists()) == (True, False)


def test_orphans_stay_while_a_transaction_that_may_register_them_runs(
    source: Bench, pipeline: Pipeline
) -> None:
    before = _settled(source, pipeline)
    with pipeline.connect_source("test") as other:
        other.execute("begin")
        other.execute("insert into public.t values (1000, 'long')")
        began = pipeline.store.server_now()
        for _ in range(5):
            flush(source, pipeline)
            found = settle(pipeline)
            assert found is not None
            assert before <= found <= began
        other.execute("commit")
    flush(source, pipeline)
    settle(pipeline)
    flush(source, pipeline)
    after = _settled(source, pipeline)
    assert after > began


def test_orphans_dated_by_a_clock_that_is_behind_stay_as_long(
    source: Bench, pipeline: Pipeline
) -> None:
    """A transaction that began after all was settled staged it, and may take days."""
    stray = source.entries("public.t")[0][2].with_name("stray.parquet")
    stray.write_bytes(b"part of it")
    settled = _settled(source, pipeline)
    later = settled + 10 * DAY
    for behind, removed in ((timedelta(minutes=5), 0), (timedelta(minutes=20), 1)):
        os.utime(stray, (at := (settled - behind).timestamp(), at))
        assert remove_staged_orphans(pipeline, T, settled, later).files == removed


def test_only_files_without_an_entry_are_orphans(source: Bench, pipeline: Pipeline) -> None:
    files = [path for _, _, path in source.entries("public.t")]
    stray = files[0].with_name(".half.parquet.tmp")
    stray.write_bytes(b"half")
    _age([*files, stray], days=10)
    now = pipeline.store.server_now()
    assert remove_staged_orphans(pipeline, T, None, now).files == 0
    gone = remove_staged_orphans(pipeline, T, now, now)
    assert (gone.files, gone.bytes) == (1, 4)
    assert all(path.exists() for path in files)
    assert not stray.exists()


def test_a_lock_is_waited_for_in_turn_and_not_for_ever(pipeline: Pipeline) -> None:
    lock = write_lock(T)
    with Pipeline.open(pipeline.config) as other:
        other.store.lock(lock)
        assert not pipeline.store.lock_within(lock, 0.2)
        waiting = threading.Thread(target=pipeline.store.lock_within, args=(lock, 60))
        waiting.start()
        with Pipeline.open(pipeline.config) as merge:
            while other.store.connection.execute(
                "select count(*) from locks where wanted_until > clock_timestamp() + '1 s'"
            ).fetchone() == (0,):
                time.sleep(0.02)
            other.store.unlock(lock)
            # Whoever asks without waiting can't keep out who waits.
            assert not merge.store.try_lock(lock)
            waiting.join(60)
            assert not merge.store.try_lock(lock)
    assert pipeline.store.is_locked(lock)
    pipeline.store.unlock(lock)


@pytest.fixture
def untidy(pipeline: Pipeline) -> LakeTable:
    """The lake table, by whose cursor two of the files are passed, with something to be done."""
    row = pipeline.store.table(T)
    assert row is not None
    lake = LakeTable(pipeline.config, pipeline.config.table(T), row)
    made = create_for_copy(lake).transaction()
    made.remove_properties("write.metadata.previous-versions-max")
    with made.update_snapshot(lake.reached(cursor(20))).fast_append():
        pass
    made.commit_transaction()
    now = pipeline.store.server_now().isoformat()
    pipeline.store.set_meta(f"maintenance.orphans:{T}", now)  # none are due
    return lake


def test_a_table_that_somebody_writes_or_that_is_another_copy_is_left_to_the_next_run(
    pipeline: Pipeline, untidy: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact, "LOCK_SECONDS", 0.1)

    def no_session() -> SparkSession:
        raise AssertionError("it is left alone")

    with Pipeline.open(pipeline.config) as other:
        other.store.lock(write_lock(T))
        (found,) = maintain(pipeline, no_session, [T], thorough=False)
    assert (found.problem, found.left_alone) == (None, "somebody else writes it")
    # Its copy was begun anew since the run has read of it.
    pipeline.store.connection.execute("update tables set epoch = epoch + 1")
    with pytest.raises(compact.Busy, match="anew"):
        compact.set_limits(pipeline.store, untidy, no_session)
    assert not pipeline.store.is_locked(write_lock(T))


@pytest.mark.parametrize("error", [SparkProblem("no"), ValueError("no")], ids=["ours", "others"])
def test_a_step_that_fails_keeps_no_other_from_being_done(
    source: Bench, pipeline: Pipeline, untidy: LakeTable, error: Exception
) -> None:
    """Others' errors are of any kind: pyiceberg's of a table that it can't read, for one."""

    def no_session() -> SparkSession:
        raise error

    for removed in (0, 2):
        (found,) = maintain(pipeline, no_session, [T], thorough=False)
        assert re.search(r"its maintenance failed: (\w+: )?no", str(found.problem))
        assert found.staged.files == removed
        source.execute("update _pg2iceberg.log_index set passed_at = passed_at - interval '2 days'")


def test_after_a_slice_a_merge_that_waits_has_its_turn(source: Bench, pipeline: Pipeline) -> None:
    turned_away = threading.Event()

    def merge() -> None:
        with Pipeline.open(pipeline.config) as own:
            turned_away.wait(60)
            assert own.store.try_lock(write_lock(T))
            time.sleep(1)

    thread = threading.Thread(target=merge)
    thread.start()
    threading.Timer(0.5, turned_away.set).start()
    began = time.monotonic()
    step_aside(pipeline.store, T)  # thirty rows wait
    assert time.monotonic() - began >= 0.4
    assert pipeline.store.is_locked(write_lock(T))
    thread.join()
    pipeline.store.set_cursor(T, cursor(30))
    began = time.monotonic()
    step_aside(pipeline.store, T)
    assert time.monotonic() - began < 5  # nothing waits, nobody is waited for
