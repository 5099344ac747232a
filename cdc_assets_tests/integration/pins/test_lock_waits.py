"""What a pin by lock costs others: how long they wait, and that none of their statements fails."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.log.states import TableState
from cdc_assets.pins.ways import by_lock
from cdc_assets_tests.integration.pins.pinning import PARTED, PLAIN, T, V, pinning, stranger
from cdc_assets_tests.support.flusher import Bench, bench
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

AT_MOST = 0.3
# For the machine, which others use as well.
EPSILON = 0.25


@contextmanager
def longest_wait(dsn: str) -> Iterator[list[float]]:
    """For how long a writer's statement lasted at most, in seconds; the last of the list."""
    longest = [0.0]

    def work(stop: threading.Event) -> None:
        with psycopg.connect(dsn, autocommit=True) as session:
            for number in itertools.count(10**9):
                if stop.is_set():
                    return
                begun = time.monotonic()
                session.execute(f"insert into t values ({number})".encode())
                longest.append(max(longest[-1], time.monotonic() - begun))

    with beside(work):
        yield longest


def overlapping(dsn: str, numbers: Iterator[int], seconds: float, stop: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as session:
        while not stop.is_set():
            insert = f"insert into t values ({next(numbers)})"
            session.execute(f"begin; {insert}; select pg_sleep({seconds}); commit".encode())


@pytest.mark.parametrize("setup", [PLAIN, PARTED], ids=["plain", "partitioned"])
def test_where_somebody_always_writes_others_wait_for_the_bound_at_most(
    source: Bench, setup: str
) -> None:
    """Of three writers one is always at it, so the lock has to wait, and they wait behind it."""
    numbers = itertools.count()
    with pinning(source, setup, lock_at_most=f"{AT_MOST}s") as here:
        each = (source.dsn, numbers, 0.05)
        with (
            beside(lambda stop: overlapping(*each, stop)),
            beside(lambda stop: overlapping(*each, stop)),
            beside(lambda stop: overlapping(*each, stop)),
            longest_wait(source.dsn) as longest,
        ):
            for _ in range(5):
                here.ask_anew()
                assert here.pinned() or here.pinned()
        assert len(longest) > 100
        assert longest[-1] < AT_MOST + EPSILON


@pytest.mark.parametrize("setup", [PLAIN, PARTED], ids=["plain", "partitioned"])
def test_a_lock_that_waits_in_vain_is_given_up_at_the_bound(
    source: Bench, monkeypatch: pytest.MonkeyPatch, setup: str
) -> None:
    """A long transaction began since it was looked for: each try waits, and writers behind it."""
    looks = itertools.count()
    monkeypatch.setattr(
        by_lock, "writers_of", lambda _, oids: {oid: {str(next(looks)): "somebody"} for oid in oids}
    )
    monkeypatch.setattr(by_lock, "_PAUSES", (0.1, 0.2))
    with (
        pinning(source, setup, lock_at_most=f"{AT_MOST}s") as here,
        stranger(source.dsn, "insert into t values (5)"),
        longest_wait(source.dsn) as longest,
    ):
        here.ask_anew()
        assert not here.pinned()
    assert AT_MOST / 3 < longest[-1] < AT_MOST + EPSILON


def test_a_transaction_that_goes_on_is_told_and_nobody_waits_behind_it(source: Bench) -> None:
    with (
        pinning(source, PLAIN, lock_at_most="1s") as here,
        stranger(source.dsn, "insert into t values (5)"),
        longest_wait(source.dsn) as longest,
    ):
        here.ask_anew()
        begun = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(by_lock, "_PAUSES", (0.1, 0.2))
            assert not here.pinned()
        assert time.monotonic() - begun < 10, "it gives up, and the next tick tries again"
        state, reason = here.state()
        assert state == TableState.WAITING
        assert "nightly" in reason and "its pin waits until nobody has written to it" in reason
        assert longest[-1] < EPSILON, "the lock isn't waited for"
    assert len(longest) > 100


def test_a_lock_that_waits_is_no_part_of_a_deadlock(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is built concurrently waits at its end for whoever reads, as ours does."""
    looks = itertools.count()
    monkeypatch.setattr(
        by_lock, "writers_of", lambda _, oids: {oid: {str(next(looks)): "somebody"} for oid in oids}
    )
    monkeypatch.setattr(by_lock, "_PAUSES", (0.1, 0.2))

    def build() -> None:
        with psycopg.connect(source.dsn, autocommit=True) as session:
            session.execute("create index concurrently t_again on t (id)")

    def waits(mode: str) -> bool:
        asked = "select 1 from pg_locks where relation = 't'::regclass and mode = %s"
        return bool(source.execute(asked, mode))

    source.execute("alter system set deadlock_timeout = '300ms'")
    source.execute("select pg_reload_conf()")
    try:
        with pinning(source, PLAIN, lock_at_most="2s") as here, ThreadPoolExecutor(2) as pool:
            here.ask_anew()
            with stranger(source.dsn, "insert into t values (5)") as writer:
                built = pool.submit(build)
                wait_for(lambda: waits("ShareUpdateExclusiveLock"), 10)
                ticks = pool.submit(here.pinned)
                wait_for(lambda: waits("ShareLock"), 10)
                time.sleep(0.6)
                writer.commit()
            built.result(60)
            ticks.result(60)
            assert here.pinned() or here.pinned()
    finally:
        source.execute("alter system reset deadlock_timeout")
        source.execute("select pg_reload_conf()")
    valid = "select indisvalid from pg_index where indexrelid = 't_again'::regclass"
    assert source.execute(valid) == [(True,)]


def test_a_table_that_would_fill_the_servers_locks_holds_up_nobody(
    public_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"fsync": "off", "max_locks_per_transaction": "10", "max_connections": "20"}
    setup = f"{PLAIN}; create table v (id int primary key) partition by range (id)"
    many = 400
    with (
        EmbeddedPostgres(public_directory / "few_locks", settings=settings) as server,
        bench(server.start(), "few_locks", tmp_path) as source,
        psycopg.connect(source.dsn, autocommit=True) as other,
    ):
        source.execute(setup)
        for number in range(many):
            part = f"create table v{number} partition of v for values from ({number}) to"
            source.execute(f"{part} ({number + 1})")
        with pinning(source, "select 1", "t", "v") as here:
            here.ask_anew(T, V)
            assert here.pinned(T)
            why = "its pin would take 401 locks at once, and the server has room for 200"
            assert here.state(V)[0] == TableState.WAITING and why in here.state(V)[1]
            # Nor does one for whose locks others have left no room.
            monkeypatch.setattr(by_lock, "_ROOM_SHARE", 10)
            here.ask_anew(T)
            with pytest.raises(psycopg.errors.OutOfMemory):
                other.execute("select pg_advisory_lock(i) from generate_series(0, 1000000) i")
            for number in range(many // 2):
                other.execute("select pg_advisory_unlock(%s)", (number,))
            assert here.pinned(T)
            assert here.state(V) == (TableState.WAITING, "out of shared memory")
            other.execute("select pg_advisory_unlock_all()")
            assert here.pinned(V)
