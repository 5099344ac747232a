"""Transactions that took their watermark early and commit late: no poll may pass them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.log.states import TableState
from cdc_assets.poller.bounds import Known
from cdc_assets.postgres.session.connect import connect
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, T, queried
from cdc_assets_tests.support.synchronous import hanging_commits

Opened = Callable[..., AbstractContextManager[Queried]]


@pytest.fixture
def source(postgres_dsn: NewDatabase, tmp_home: object) -> Iterator[Queried]:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule alone is to find them, and not some seconds more that are read."""
    monkeypatch.setattr("cdc_assets.poller.source.MARGIN", 0)


def late(source: Queried) -> None:
    """The older now() commits last, after a poll that found the younger one."""
    with source.session() as older, source.session() as younger:
        older.execute("begin")
        older.execute("insert into t values (1, 'older')")
        younger.execute("insert into t values (2, 'younger')")
        source.poll()
        assert source.found().keys() == {"2"}
        source.poll()
        older.execute("commit")
        source.poll()


def test_the_older_now_that_commits_last_is_found(source: Queried) -> None:
    late(source)
    assert source.is_level()


def test_the_bound_moved_at_once_would_lose_it(
    source: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: by the rule that others have."""
    monkeypatch.setattr(Known, "begin", lambda self, _: self.last)
    late(source)
    assert source.found().keys() == {"2"}


def test_the_bound_moved_before_the_last_read_would_lose_it(
    source: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once all of H have ended, the bound of H may be the next one; this poll needs the old one."""

    def begin(self: Known, running: object) -> int:
        still = [at for x, at in self.since.items() if x in running]  # type: ignore[operator]
        return min([self.last, *still])

    monkeypatch.setattr(Known, "begin", begin)
    late(source)
    assert source.found().keys() == {"2"}


def test_a_transaction_that_has_not_written_yet_counts(source: Queried) -> None:
    with source.session() as older:
        older.execute("begin")
        older.execute("select now()")
        for number in range(3):
            source.execute(f"insert into t values ({10 + number}, 'x')")
            source.poll()
        older.execute("insert into t values (1, 'late')")
        source.poll()
        older.execute("commit")
        source.poll()
    assert source.is_level()


def test_a_prepared_transaction_is_waited_for(source: Queried) -> None:
    with source.session() as older:
        older.execute("begin")
        older.execute("insert into t values (1, 'prepared')")
        source.poll()
        older.execute("prepare transaction 'late'")
        source.execute("insert into t values (2, 'x')")
        source.poll()
        source.poll()
    assert source.found().keys() == {"2"}
    source.execute("commit prepared 'late'")
    source.poll()
    assert source.is_level()


def test_a_pin_waits_for_who_was_prepared_meanwhile(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    """It has another id then than the one that was noted, and a watermark below the bound."""
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK, pinned=False) as source:
        with source.session() as older:
            older.execute("begin")
            older.execute("insert into t values (1, 'early')")
            source.pins.prepare()
            source.pins.tick()
            older.execute("prepare transaction 'early'")
        for _ in range(3):
            source.pins.tick()
            [row] = source.pipeline.store.tables()
            assert row.state == TableState.WAITING
        source.execute("commit prepared 'early'")
        source.pin()  # whose snapshot has the row


def test_a_copy_of_ours_is_no_transaction_that_writes(source: Queried) -> None:
    """Its session holds a snapshot for hours: what changed meanwhile would all be read again."""
    dsn = source.pipeline.source_dsn
    with connect(dsn, application_name="cdc_assets src pin") as holder:
        holder.execute("begin isolation level repeatable read read only")
        [(held,)] = holder.execute(
            "select virtualxid from pg_locks where virtualxid is not null"
            " and pid = pg_backend_pid()"
        ).fetchall()
        for number in range(3):
            source.execute(f"insert into t values ({number}, 'x')")
            source.poll()
        assert held not in source.poller._states[T].known.since
    source.poll()
    assert len(source.staged()) == 3


def test_a_commit_that_waits_for_a_standby_is_waited_for(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    """Its record is in the WAL, below positions that are noted, and no snapshot shows it."""
    dsn = postgres_dsn()
    local = f"alter database {conninfo_to_dict(dsn)['dbname']} set synchronous_commit = local;"
    with queried(dsn, local + CLOCKED, BY_CLOCK) as source:  # our own commits don't wait
        with hanging_commits(dsn, "insert into t values (1, 'hangs')"):
            source.poll()
            source.poll()
            assert not source.found()
        source.poll()
        assert source.is_level()


@pytest.mark.parametrize("restarts", [False, True])
def test_many_that_overlap(source: Queried, restarts: bool) -> None:
    """Each transaction is open over some polls; a process may begin anew at any of them."""
    sessions = [source.session() for _ in range(6)]
    for step in range(30):
        session = sessions[step % 6]
        if session.info.transaction_status.name == "INTRANS":
            session.execute("commit")
        session.execute("begin")
        session.execute(f"insert into t values ({step}, 'x')")
        session.execute(f"update t set v = v || 'y', updated_at = now() where id = {step - 12}")
        if restarts and step % 7 == 3:
            source.begin()
        source.poll()
    for session in sessions:
        session.execute("commit")
        session.close()
    source.poll()
    assert source.is_level()


def test_a_long_transaction_costs_one_longer_read(source: Queried) -> None:
    """While it lasts the polls read what is new; what it hid they read once, when it has ended."""
    with source.session() as long:
        long.execute("begin")
        long.execute("select 1")
        source.poll()
        source.execute("insert into t select i, 'x' from generate_series(1, 500) i")
        source.poll()
        for number in range(5):
            source.execute(f"insert into t values ({1000 + number}, 'x')")
            source.poll()
        assert len(source.staged()) == 505, "each row was staged once"
        long.execute("commit")
    source.poll()
    assert len(source.staged()) <= 2 * 505
    source.poll()
    source.poll()
    assert len(source.staged()) <= 2 * 505
