"""Totals of work: counted with what records it, once, whoever else counts at that moment."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cdc_assets.errors import Fenced
from cdc_assets.log.copies.chunks import mark_landed
from cdc_assets.log.cursors import Claim, Cursor
from cdc_assets.log.figures.work import KINDS, OUTCOMES, Work, failures_counted, totals
from cdc_assets.log.store import LogStore
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.flusher import Bench

T = TableId("public", "t")


@pytest.fixture
def store(source: Bench) -> Iterator[LogStore]:
    with Pipeline.open(source.config("public.t")) as pipeline:
        yield pipeline.store


def done(store: LogStore) -> list[Work]:
    found = totals(store.connection, store.source)
    assert [(w.kind, w.outcome) for w in found] == [(k, o) for k in KINDS for o in OUTCOMES]
    return [work for work in found if work.count]


def test_a_merge_is_counted_if_its_cursor_is_recorded(store: LogStore) -> None:
    work = Work("merge", rows=10, bytes=100, seconds=0.5)
    store.set_cursor(T, Cursor(10, Lsn(1)), None, work)
    store.set_cursor(T, Cursor(10, Lsn(1)))  # the end of a turn: nothing more was merged
    with pytest.raises(Fenced):
        store.set_cursor(T, Cursor(20, Lsn(2)), Claim(uuid.uuid4(), 1), work)
    assert done(store) == [work]
    store.set_cursor(T, Cursor(20, Lsn(2)), None, work)
    assert done(store) == [Work("merge", count=2, rows=20, bytes=200, seconds=1.0)]
    store.forget_cursor(T)  # as for a new copy
    assert done(store)[0].count == 2


def test_a_chunk_is_counted_when_it_is_marked_the_first_time(store: LogStore) -> None:
    for chunk in ("a", "b", "c"):
        store.connection.execute(
            "insert into snapshot_progress (source, table_name, epoch, chunk, first_block, state,"
            " rows, bytes, seconds) values (%s, %s, 1, %s, 0, 'written', 5, 50, 0.25)",
            (store.source, str(T), chunk),
        )
    mark_landed(store, T, 1, [])
    assert done(store) == []
    mark_landed(store, T, 1, ["a", "b"])
    mark_landed(store, T, 1, ["a", "b", "c"])
    assert done(store) == [Work("copy", count=3, rows=15, bytes=150, seconds=0.75)]


def test_errors_are_counted_but_for_those_that_are_none(store: LogStore) -> None:
    for error, counts in ((ValueError, 1), (Fenced, 1), (RuntimeError, 2)):
        with (
            pytest.raises(error),
            failures_counted(store.connection, store.source, "merge", Fenced),
        ):
            raise error("x")
        assert done(store) == [Work("merge", "failed", counts)]
    store.connection.close()
    told = failures_counted(store.connection, store.source, "merge")
    with pytest.raises(ValueError, match="it is this"), told:
        raise ValueError("it is this that is told")


def test_of_those_who_count_at_once_none_is_lost(source: Bench, store: LogStore) -> None:
    def merges(number: int) -> None:
        with Pipeline.open(source.config("public.t")) as pipeline:
            table = TableId("public", f"t{number}")
            for offset in range(50):
                work = Work("merge", rows=2)
                pipeline.store.set_cursor(table, Cursor(offset, Lsn(offset)), None, work)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(merges, range(4)))
    assert done(store) == [Work("merge", count=200, rows=400)]
