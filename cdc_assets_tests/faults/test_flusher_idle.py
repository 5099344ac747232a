"""Quiet sources: the slot follows the end of the WAL, and what it retains stays bounded."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc_assets.flusher import registrar
from cdc_assets.flusher.reach import reach
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for

logger = logging.getLogger(__name__)

# What a user may rely on: how far an idle source's slot stays behind the end of the WAL.
NEAR_BYTES = 8 * 10**6
WRITTEN_BYTES = 64 * 10**6


@pytest.fixture
def source(source: Bench) -> Bench:
    source.execute("create table t (id int primary key)")
    return source


@contextmanager
def _another_database(source: Bench) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    name = f"{source.name}_busy"
    source.execute(f"create database {name}")
    try:
        with psycopg.connect(make_conninfo(source.dsn, dbname=name), autocommit=True) as busy:
            busy.execute("create table other (id int, v text)")
            yield busy
    finally:
        with psycopg.connect(source.dsn, autocommit=True) as admin:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@contextmanager
def _the_same_database(source: Bench) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with psycopg.connect(source.dsn, autocommit=True) as busy:
        busy.execute("create table other (id int, v text)")
        yield busy


WRITERS = {"another database": _another_database, "another table": _the_same_database}


def _end(source: Bench) -> Lsn:
    return Lsn.parse(source.execute("select pg_current_wal_insert_lsn()::text")[0][0])


def _behind(source: Bench) -> int:
    return _end(source) - source.confirmed()


def _retained(source: Bench) -> int:
    (bytes_,) = source.execute(
        "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn)::bigint"
        " from pg_replication_slots where slot_name = %s",
        f"cdc_{source.name}",
    )[0]
    return int(bytes_)


def _fill(busy: psycopg.Connection[tuple[object, ...]]) -> None:
    """About 14 MB of WAL, in a table that stays small."""
    busy.execute("insert into other select g, repeat('x', 100) from generate_series(1, 100000) g")
    busy.execute("truncate other")


def _settled(source: Bench) -> bool:
    """A checkpoint writes down what runs, as the background writer does every 15 seconds."""
    source.execute("checkpoint")
    return _behind(source) < NEAR_BYTES and _retained(source) < NEAR_BYTES


@pytest.mark.parametrize(
    "where",
    ["another database", pytest.param("another table", marks=pytest.mark.soak)],
)
def test_a_quiet_source_keeps_its_slot_near(source: Bench, where: str) -> None:
    config = source.config("public.t")
    source.flush(config)
    with WRITERS[where](source) as busy, flushing(config):
        began = _end(source)
        while _end(source) - began < WRITTEN_BYTES:
            _fill(busy)
        # Nothing else is written to the WAL from here on, and still it gets there.
        wait_for(lambda: _behind(source) < NEAR_BYTES)
        wait_for(lambda: _settled(source))
        (updates,) = source.execute(
            "select pg_stat_get_tuples_updated('_pg2iceberg.flushed_lsn'::regclass)"
        )[0]
    assert updates < 200  # not one a keepalive
    assert source.log("public.t") == []


@pytest.mark.soak
def test_an_open_transaction_elsewhere_holds_up_restart_but_not_the_flusher(source: Bench) -> None:
    config = source.config("public.t", flush_interval="50ms")
    source.flush(config)
    with _another_database(source) as busy, flushing(config):
        busy.execute("create table another (id int)")
        with psycopg.connect(make_conninfo(source.dsn, dbname=busy.info.dbname)) as long:
            long.execute("insert into another values (1)")
            began = _end(source)
            while _end(source) - began < WRITTEN_BYTES / 4:
                _fill(busy)
            source.execute("insert into t values (1)")
            wait_for(lambda: len(source.log("public.t")) == 1)
            wait_for(lambda: _behind(source) < NEAR_BYTES)
            source.execute("checkpoint")
            # The server has to decode that transaction from its beginning when it ends.
            assert _retained(source) >= WRITTEN_BYTES / 4
            long.rollback()
        wait_for(lambda: _settled(source))


def test_an_idle_flusher_moves_for_who_waits_for_it(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar, "IDLE_STEP_SECONDS", 3600)
    config = source.config("public.t")
    source.flush(config)
    with (
        flushing(config) as progress,
        psycopg.connect(source.dsn, autocommit=True) as client,
        Pipeline.open(config) as pipeline,
    ):
        wait_for(lambda: progress.state == "streaming")
        client.execute("create table quiet as select 1")
        pipeline.store.note_awaited(Lsn.parse("FFFF/0"))  # nothing will ever be there
        wanted, stop = _end(source), threading.Event()
        waiting = threading.Thread(target=reach, args=(pipeline, wanted, stop))
        waiting.start()
        try:
            wait_for(lambda: source.flushed() >= wanted)
        finally:
            stop.set()
            waiting.join()


def test_an_idle_server_is_left_in_peace(source: Bench) -> None:
    """Our own bookkeeping writes WAL; that mustn't keep itself going."""
    config = source.config("public.t")
    source.flush(config)
    with flushing(config):
        wait_for(lambda: _behind(source) < 10_000)
        began = _end(source)
        time.sleep(12)
        assert _end(source) - began < 200_000
        assert _behind(source) < NEAR_BYTES


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("where", list(WRITERS))
def test_retained_wal_stays_bounded_for_minutes(source: Bench, where: str) -> None:
    """Steady writes of others, a transaction of a minute now and then, five minutes long."""
    config = source.config("public.t")
    source.flush(config)
    stop, worst_behind, worst_retained = threading.Event(), 0, 0

    def write(busy: psycopg.Connection[tuple[object, ...]]) -> None:
        while not stop.wait(1.0):
            _fill(busy)

    with WRITERS[where](source) as busy, flushing(config):
        writer = threading.Thread(target=write, args=(busy,))
        writer.start()
        try:
            began = time.monotonic()
            while time.monotonic() - began < 300:
                time.sleep(1)
                worst_behind = max(worst_behind, _behind(source))
                worst_retained = max(worst_retained, _retained(source))
        finally:
            stop.set()
            writer.join()
        wait_for(lambda: _settled(source), 120)
    # 14 MB/s; the background writer says what runs every 15 s, and only that moves the restart.
    assert worst_behind < 100e6, worst_behind
    assert worst_retained < 1000e6, worst_retained
    logger.info("%s: at most %d bytes behind, %d retained", where, worst_behind, worst_retained)
