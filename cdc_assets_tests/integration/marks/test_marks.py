"""Marks: every lake table gets a tag at one position of the source, and none is passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.errors import ConfigurationError, TableProblem
from cdc_assets.log.asked import marks as log
from cdc_assets.log.asked.marks import MarkState
from cdc_assets.log.asked.wishes import pause, resume
from cdc_assets.log.locks import write_lock
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.maintenance.run import maintain
from cdc_assets.marks.make import drop, mark, surplus
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

A, B = TableId("public", "a"), TableId("public", "b")
SETUP = """
create table a (id int primary key, n int);
insert into a select i, 10 from generate_series(1, 5) i;
create table b (id int primary key, n int);
insert into b select i, 10 from generate_series(1, 5) i;
"""


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "public.a", "public.b") as opened:
        yield opened


def made(source: Lake, name: str, **settings: Any) -> log.Mark:
    return mark(source.pipeline, source.session, name, **settings)


def sums(source: Lake, name: str) -> list[int | None]:
    """Of each table's column, as a reader of the tag has it."""
    return [
        source.session.sql(
            f"select sum(n) from {source.lake_table(table).sql_name} version as of 'mark_{name}'"
        ).collect()[0][0]
        for table in (A, B)
    ]


def test_every_table_is_tagged_with_what_was_committed_and_nothing_later(source: Lake) -> None:
    source.execute("update a set n = 20 where id = 1")
    found = made(source, "first")
    assert [t.state for t in found.tables] == [MarkState.TAGGED] * 2
    source.execute("update a set n = 30; update b set n = 40")
    source.catch_up()
    assert sums(source, "first") == [60, 50]
    made(source, "second")
    assert sums(source, "second") == [150, 200]
    assert sums(source, "first") == [60, 50]


def test_a_quiet_table_is_tagged_without_a_commit(source: Lake) -> None:
    before = [source.snapshots(table) for table in (A, B)]
    made(source, "quiet")
    assert [source.snapshots(table) for table in (A, B)] == before
    assert sums(source, "quiet") == [50, 50]


def states(source: Lake, name: str) -> list[MarkState]:
    [known] = log.marks(source.pipeline.store, name)
    return [table.state for table in known.tables]


def waits_for_its_tag(source: Lake, name: str = "waits") -> None:
    """A mark that both tables are yet to reach, with changes behind it."""
    source.execute("update a set n = 20 where id = 1")
    source.flush()
    log.make(source.pipeline.store, name, source.tables)
    source.execute("update a set n = 99; update b set n = 99")
    source.flush()


def test_no_merge_passes_a_mark_before_the_table_has_its_tag(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for_its_tag(source)

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    for place in ("patiently", "settle"):  # before the tag, and between it and its record
        with monkeypatch.context() as patched:
            patched.setattr(f"cdc_assets.materializer.marking.{place}", killed)
            for table in (A, B):
                with pytest.raises(RuntimeError, match="killed"):
                    source.drain(table)
        totals = [sum(n for _, n in source.rows(table)) for table in (A, B)]
        assert totals == [60, 50], f"nothing above the mark is merged: {place}"
    source.drain_all()
    assert states(source, "waits") == [MarkState.TAGGED] * 2
    assert sums(source, "waits") == [60, 50]
    assert [sum(n for _, n in source.rows(table)) for table in (A, B)] == [495, 495]


def test_whoever_merges_tags_it_and_a_mark_that_was_interrupted_is_gone_on_with(
    source: Lake,
) -> None:
    waits_for_its_tag(source)
    source.drain(A)
    [known] = log.marks(source.pipeline.store)
    assert [t.state for t in known.tables] == [MarkState.TAGGED, MarkState.PENDING]
    assert [t.state for t in made(source, "waits").tables] == [MarkState.TAGGED] * 2
    assert sums(source, "waits") == [60, 50]


def test_several_marks_are_reached_one_after_the_other(source: Lake) -> None:
    for number in range(3):
        source.execute("update a set n = n + 1")
        source.flush()
        log.make(source.pipeline.store, f"m{number}", source.tables)
    source.execute("update a set n = 0")
    source.catch_up()
    assert [sums(source, f"m{number}")[0] for number in range(3)] == [55, 60, 65]


def test_tags_outlive_expiry_compaction_a_schema_change_and_a_copy_anew(source: Lake) -> None:
    source.execute("update a set n = 20")
    made(source, "kept")
    source.execute("update a set n = 30; alter table a add m int; update a set m = 1")
    source.catch_up()
    for _ in range(3):
        source.execute("update a set n = n + 1")
        source.catch_up()
    source.config.maintenance.__dict__["keep_snapshots"].__dict__.update(count=1)
    done = list(maintain(source.pipeline, lambda: source.session, source.tables))
    assert [one.problem for one in done] == [None, None]
    assert sums(source, "kept") == [100, 50]
    for alter in ("", "alter table a alter n type bigint"):  # a copy on a branch, and a new table
        if alter:
            source.execute(alter)
        mark_for_copy(source.pipeline, [A])
        source.pin()
        source.copy()
        source.catch_up()
        assert sums(source, "kept") == [100, 50], alter
    made(source, "later")
    assert sums(source, "later")[0] == 165
    assert sums(source, "kept") == [100, 50]


def test_snapshots_that_marks_keep_are_not_taken_for_expired_again_and_again(
    source: Lake,
) -> None:
    settings = source.config.maintenance.__dict__["keep_snapshots"]
    settings.__dict__.update(count=1, age=timedelta(0))
    for number in range(2):
        made(source, f"m{number}")
        source.execute(f"insert into a values ({number + 10}, 10)")
        source.catch_up()
    list(maintain(source.pipeline, lambda: source.session, [A]))
    [again] = maintain(source.pipeline, lambda: source.session, [A])
    assert (again.expired.snapshots, again.snapshots) == (0, 3)


@pytest.mark.parametrize("mode", ["append", "soft_delete"])
def test_tables_that_keep_their_history_are_marked_like_mirrors(
    copied_lake: NewLake, mode: str
) -> None:
    with copied_lake(SETUP, {"name": "public.a", "mode": mode}, "public.b") as source:
        source.execute("delete from a where id = 1")
        made(source, "first")
        source.execute("delete from a; insert into a values (9, 9)")
        source.catch_up()
        name = source.lake_table(A).sql_name
        rows = source.session.sql(f"select * from {name} version as of 'mark_first'").count()
        assert rows == {"append": 6, "soft_delete": 5}[mode]


def test_what_has_no_state_of_that_moment_is_missed_with_the_reason(source: Lake) -> None:
    store = source.pipeline.store
    mark_for_copy(source.pipeline, [A])
    found = made(source, "copying")
    assert [t.state for t in found.tables] == [MarkState.MISSED, MarkState.TAGGED]
    # Whoever flushes pins what waits.
    assert found.tables[0].reason in ("it was waiting", "it was copying")
    source.pin()
    source.copy()
    source.catch_up()
    waits_for_its_tag(source, "anew")
    mark_for_copy(source.pipeline, [A])
    store.park(B, "it is told", source.row(B).epoch)
    assert [(t.state, t.reason) for t in made(source, "anew").tables] == [
        (MarkState.MISSED, "it was copied anew before it had the tag"),
        (MarkState.MISSED, "it was parked before it had the tag"),
    ]


def test_a_mark_that_a_merge_did_pass_is_missed_and_not_told_as_made(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a worker of an earlier version, which knows of no marks."""
    waits_for_its_tag(source)
    with monkeypatch.context() as patched:
        patched.setattr("cdc_assets.materializer.drain.pending_mark", lambda *_: None)
        source.drain(A)
    found = made(source, "waits")
    assert [t.state for t in found.tables] == [MarkState.MISSED, MarkState.TAGGED]
    assert "before they knew of it" in (found.tables[0].reason or "")


def test_a_copy_that_is_complete_only_later_is_no_state_of_that_moment(source: Lake) -> None:
    waits_for_its_tag(source)
    store = source.pipeline.store
    store.connection.execute(
        "update tables set complete_lsn = lsn + 1 from marks where table_name = 'public.a'"
    )
    source.drain_all()
    assert states(source, "waits") == [MarkState.MISSED, MarkState.TAGGED]


def test_rows_that_somebody_else_changed_are_not_marked(source: Lake) -> None:
    waits_for_its_tag(source)
    source.session.sql(f"delete from {source.lake_table(A).sql_name} where id = 2")
    with pytest.raises(TableProblem, match="somebody else changed rows"):
        source.drain(A)
    [known] = log.marks(source.pipeline.store)
    assert known.of(MarkState.PENDING)[0].table == A
    source.verify(repair=True)
    [known] = log.marks(source.pipeline.store)
    [missed] = known.of(MarkState.MISSED)
    assert missed.table == A
    assert "somebody else changed its rows" in (missed.reason or "")


def test_a_paused_table_is_tagged_at_the_mark_once_it_goes_on(source: Lake) -> None:
    source.execute("update a set n = 20")
    pause(source.pipeline.store, A)
    found = made(source, "paused")
    assert [t.state for t in found.tables] == [MarkState.PENDING, MarkState.TAGGED]
    source.execute("update a set n = 30")
    source.flush()
    resume(source.pipeline.store, A)
    source.drain(A)
    assert sums(source, "paused") == [100, 50]


def test_a_table_that_is_merged_for_long_is_not_waited_for(source: Lake) -> None:
    other = Pipeline.open(source.config)
    try:
        other.store.lock(write_lock(A))
        found = made(source, "busy", patience_seconds=1.0)
    finally:
        other.close()
    assert [t.state for t in found.tables] == [MarkState.PENDING, MarkState.TAGGED]


def test_a_table_that_fails_keeps_no_other_one_from_its_tag(source: Lake) -> None:
    metadata = Path(source.lake_table(A).loaded().metadata_location.removeprefix("file:"))
    kept, told = metadata.read_bytes(), list[str]()
    metadata.unlink()
    found = made(source, "one", on_progress=told.append)
    assert [t.state for t in found.tables] == [MarkState.PENDING, MarkState.TAGGED]
    assert [text for text in told if text.startswith(f"{A}: ")]
    metadata.write_bytes(kept)
    assert [t.state for t in made(source, "one").tables] == [MarkState.TAGGED] * 2


def test_names_are_told_apart_and_bad_ones_refused(source: Lake) -> None:
    made(source, "2026-12-31")
    with pytest.raises(ConfigurationError, match=r"already.*marks --drop 2026-12-31"):
        made(source, "2026-12-31")
    for bad in ("", "a b", "a`b", "-x", "é", "x" * 65):
        with pytest.raises(ConfigurationError, match="can't be the name of a mark"):
            made(source, bad)
    with pytest.raises(ConfigurationError, match=r"no mark 2026-12-13.*mean 2026-12-31\?"):
        drop(source.pipeline, source.session, "2026-12-13")


def test_a_dropped_mark_leaves_no_tag_and_holds_no_merge(source: Lake) -> None:
    made(source, "old")
    waits_for_its_tag(source)
    source.drain(A)
    for name in ("old", "waits"):
        drop(source.pipeline, source.session, name)
    assert log.marks(source.pipeline.store) == []
    source.drain_all()
    for table in (A, B):
        refs = source.lake_table(table).loaded().metadata.refs
        assert {*refs} == {"main"}
    made(source, "old")
    assert sums(source, "old") == [495, 495]


def test_a_table_that_is_merged_while_its_mark_is_dropped_keeps_no_tag(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for_its_tag(source)
    forget = log.forget

    def merged_before(store: LogStore, name: str) -> bool:
        source.drain_all()
        return forget(store, name)

    monkeypatch.setattr(log, "forget", merged_before)
    drop(source.pipeline, source.session, "waits")
    for table in (A, B):
        assert {*source.lake_table(table).loaded().metadata.refs} == {"main"}


def test_scheduled_marks_beyond_those_that_are_kept_are_surplus(copied_lake: NewLake) -> None:
    with copied_lake(SETUP, "public.a", marks={"keep": 2}) as source:
        made(source, "by-hand")
        for number in range(4):
            made(source, f"m{number}", scheduled=True)
        assert surplus(source.pipeline) == ["m0", "m1"]


def test_a_process_that_is_stopped_while_it_makes_a_mark_holds_up_no_flusher(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = source.pipeline.store.connection
    execute, held = connection.execute, threading.Event()

    def stopped(statement: Any, *given: Any) -> Any:
        if "insert into marked_tables" in str(statement):
            held.set()
            time.sleep(5.0)
        return execute(statement, *given)

    def register() -> float:
        held.wait(30.0)
        began = time.monotonic()
        with Pipeline.open(source.config) as other:
            other.store.advance(other.store.flushed_lsn() or Lsn.ZERO)
        return time.monotonic() - began

    monkeypatch.setattr(connection, "execute", stopped)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(register)
        with pytest.raises(psycopg.errors.IdleInTransactionSessionTimeout):
            log.make(source.pipeline.store, "stopped", source.tables)
        assert waited.result() < 5.0
    with Pipeline.open(source.config) as other:
        assert log.marks(other.store) == []


def test_a_source_without_a_log_has_no_marks_yet(new_lake: NewLake) -> None:
    with new_lake(SETUP, "public.a") as source:
        store = source.pipeline.store
        with pytest.raises(ConfigurationError, match="no log yet"):
            log.make(store, "early", source.tables)
        assert log.marks(store) == []
        source.pin()
        log.make(store, "begun", source.tables)
        [found] = log.marks(store)
        assert found.tables[0].reason == f"it was {TableState.COPYING}"
