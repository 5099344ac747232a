"""Promise 5: locks are ours, whatever others take in the coordination database."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.log.store import LogStore
from cdc_assets.observe.status import collect
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.security.coordination import SCHEMA, Session, config_of, of, opened
from cdc_assets_tests.support.flusher import bench, flushing
from cdc_assets_tests.support.waiting import wait_for

# The advisory locks that decided before, of which anybody knows the keys.
OLD_KEYS = ("flusher:src", "pins", "heaps", "catalog", "write:public.t")


def _take_everything(stranger: Session) -> None:
    """Every key that was ours, and every one that is to be seen, now or once it is free."""
    for name in OLD_KEYS:
        stranger.execute(
            "select pg_try_advisory_lock(hashtextextended(%s, 0))",
            (f"cdc_assets:{SCHEMA}:src:{name}",),
        )
    stranger.execute("select pg_try_advisory_lock(%s, hashtext(%s))", (0x636463, SCHEMA))
    stranger.execute(
        "select pg_try_advisory_lock(classid::bigint << 32 | objid::bigint) from pg_locks"
        " where locktype = 'advisory' and objsubid = 1"
    )


def test_whoever_may_only_connect_takes_no_lock_of_ours(ours: str, stranger: Session) -> None:
    _take_everything(stranger)
    one, other = opened(ours), opened(ours)  # a stranger's lock doesn't keep it from being made
    for name in OLD_KEYS:
        assert one.try_lock(name)
        assert not other.try_lock(name)
        _take_everything(stranger)
        one.unlock(name)
        assert not other.is_locked(name)
        assert other.lock_within(name, 5)
    for forbidden in (
        "select * from _pg2iceberg.locks",
        "insert into _pg2iceberg.locks (source, name) values ('src', 'pins')",
        "lock table _pg2iceberg.locks in share mode",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege), stranger.transaction():
            stranger.execute(forbidden.encode())
    one.close()
    other.close()


def test_whoever_waits_for_the_end_of_a_session_of_ours_has_none_of_its_locks(
    ours: str, stranger: Session
) -> None:
    one, other = opened(ours), opened(ours)
    one.lock("pins")
    (key,) = stranger.execute(
        "select classid::bigint << 32 | objid::bigint from pg_locks where locktype = 'advisory'"
        " and pid = %s",
        (one.connection.info.backend_pid,),
    ).fetchall()[0]
    waits = threading.Thread(
        target=stranger.execute, args=("select pg_advisory_lock(%s)", (key,)), daemon=True
    )
    waits.start()
    wait_for(lambda: _waiting(other.connection))
    assert other.lock_holder("pins") == one.connection.info.backend_pid
    one.close()
    waits.join(20)
    assert not waits.is_alive()  # it has the key now, and that is all
    assert other.lock_holder("pins") is None
    assert other.try_lock("pins")
    other.close()


def _waiting(connection: Session) -> bool:
    row = connection.execute(
        "select exists (select from pg_locks where locktype = 'advisory' and not granted)"
    ).fetchone()
    return bool(row and row[0])


def test_replication_goes_on_whatever_locks_a_stranger_takes(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    dsn = postgres.dsn()
    assert dsn is not None
    with bench(dsn, "src", tmp_path) as source:
        source.execute("create table t (id int primary key)")
        source.execute("drop role if exists stranger; create role stranger login password 'p'")
        try:
            with psycopg.connect(of(source.dsn, "stranger"), autocommit=True) as stranger:
                _take_everything(stranger)
                with flushing(source.config("public.t")) as progress:
                    wait_for(lambda: progress.state == "streaming")
                    _take_everything(stranger)
                    source.execute("insert into t select generate_series(1, 3)")
                    wait_for(lambda: len(source.log("public.t")) == 3)
                source.execute("insert into t values (4)")
                source.flush(source.config("public.t"))
                assert len(source.log("public.t")) == 4
        finally:
            source.execute("drop role stranger")


def test_invariant_9_a_lock_is_one_sessions_however_many_want_it_and_wherever_they_die(
    ours: str,
) -> None:
    inside, most, turns, deaths = list[int](), 0, list[int](), 0
    chance = random.Random(5)

    def work(who: int) -> None:
        nonlocal most, deaths
        store = opened(ours)
        for _ in range(25):
            took = store.try_lock("x") if chance.random() < 0.5 else store.lock_within("x", 10)
            if not took:
                continue
            inside.append(who)
            most = max(most, len(inside))
            turns.append(who)
            time.sleep(chance.random() / 200)
            inside.remove(who)
            if chance.random() < 0.2:
                deaths += 1
                with pytest.raises(psycopg.OperationalError):
                    store.connection.execute("select pg_terminate_backend(pg_backend_pid())")
                store = opened(ours)
            else:
                store.unlock("x")
        store.close()

    threads = [threading.Thread(target=work, args=(who,)) for who in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert (most, inside) == (1, [])
    assert len(turns) > 50
    assert set(turns) == set(range(5))
    assert deaths > 5
    with opened(ours).connection as left:
        LogStore(left, "src", SCHEMA).forget_locks()
        assert left.execute("select count(*) from locks").fetchone() == (0,)


@pytest.mark.parametrize("before", ["nobody has had it", "its holder died", "it was given back"])
def test_invariant_9_who_has_just_seen_a_lock_free_does_not_take_it_from_who_has_it_by_now(
    ours: str, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    one, faster = opened(ours), opened(ours)
    if before != "nobody has had it":
        faster.lock("x")
        faster.connection.execute(f"update {SCHEMA}.locks set wanted_until = now()".encode())
        if before == "its holder died":
            faster.close()
            faster = opened(ours)
            wait_for(lambda: not one.is_locked("x"))
        else:  # while somebody waited who has gone
            faster.connection.execute("update locks set life = null")
            faster._held.clear()
    look = one._look

    def and_is_late(name: str, *, judge: bool) -> object:
        seen = look(name, judge=judge)
        assert faster.try_lock("x")
        return seen

    monkeypatch.setattr(one, "_look", and_is_late)
    assert not one.try_lock("x")
    assert faster.lock_holder("x") == faster.connection.info.backend_pid
    one.close()
    faster.close()


def test_a_pool_that_cleans_a_session_up_ends_its_locks(ours: str) -> None:
    """The backend lives on there, for another client."""
    one, other = opened(ours), opened(ours)
    one.lock("pins")
    assert not other.try_lock("pins")
    one.connection.execute("discard all")
    assert other.try_lock("pins")
    one.close()
    other.close()


def test_a_lock_does_not_make_what_is_registered_wait_less_for_the_disk(ours: str) -> None:
    store = opened(ours)
    assert store.try_lock("x")
    store.unlock("x")
    found = store.connection.execute("show synchronous_commit").fetchone()
    assert found == ("on",)
    with pytest.raises(AssertionError), store.connection.transaction():
        store.try_lock("x")
    store.close()


def test_a_lock_that_can_not_be_given_back_ends_its_session(ours: str, admin: Session) -> None:
    """It would keep the lock, and its process wouldn't know."""
    one, other = opened(ours), opened(ours)
    one.lock("x")
    one.connection.execute("set statement_timeout = '100ms'")
    with admin.transaction():
        admin.execute(f"select from {SCHEMA}.locks for update".encode())
        with pytest.raises(psycopg.errors.QueryCanceled):
            one.unlock("x")
    wait_for(lambda: other.try_lock("x"))
    assert one.connection.closed
    other.close()


def test_whoever_loses_its_session_under_a_lock_is_told_why(ours: str) -> None:
    """And not that the lock can't be given back, which the server has done."""
    one, other = opened(ours), opened(ours)
    with pytest.raises(psycopg.errors.AdminShutdown), one.locked("x"):
        one.connection.execute("select pg_terminate_backend(pg_backend_pid())")
    wait_for(lambda: other.try_lock("x"))
    other.close()


def test_a_session_that_was_interrupted_while_it_took_a_lock_has_it(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would wait for itself."""
    one, other = opened(ours), opened(ours)
    execute = one.connection.execute

    def interrupted(statement: str, *given: object) -> object:
        done = execute(statement, *given)  # type: ignore[call-overload]
        if statement.startswith("\ninsert into locks"):
            raise KeyboardInterrupt
        return done

    with monkeypatch.context() as signals:
        signals.setattr(one.connection, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.try_lock("x")
    assert not other.try_lock("x")
    assert one.lock_within("x", 1)
    one.unlock("x")
    assert other.try_lock("x")
    one.close()
    other.close()


@pytest.mark.parametrize("wish", ["'infinity'", "clock_timestamp() + interval '1 hour'"])
def test_a_wish_of_before_the_clock_was_set_back_is_over(
    ours: str, admin: Session, wish: str
) -> None:
    one, other = opened(ours), opened(ours)
    one.lock("x")
    admin.execute(f"update {SCHEMA}.locks set wanted_by = 1, wanted_until = {wish}".encode())
    one.unlock("x")
    assert other.try_lock("x")
    admin.execute(f"update {SCHEMA}.locks set wanted_by = 1, wanted_until = {wish}".encode())
    other.close()
    wait_for(lambda: one.lock_within("x", 1))
    admin.execute(f"update {SCHEMA}.locks set wanted_by = 1, wanted_until = {wish}".encode())
    one.close()
    third = opened(ours)
    wait_for(lambda: not third.is_locked("x"))
    third.forget_locks()
    assert third.connection.execute("select count(*) from locks").fetchone() == (0,)
    third.close()


def test_who_waits_for_a_row_goes_on_with_what_it_has_become(ours: str, admin: Session) -> None:
    """Whatever isolation the role has by default: else it would fail."""
    admin.execute("alter role cdc_state set default_transaction_isolation = 'serializable'")
    one, other = opened(ours), opened(ours)
    one.lock("x")
    one.connection.execute("update locks set life = null")
    one._held.clear()
    took = list[bool]()
    with admin.transaction():
        admin.execute(f"update {SCHEMA}.locks set pid = 0".encode())
        waits = threading.Thread(target=lambda: took.append(other.try_lock("x")), daemon=True)
        waits.start()
        wait_for(lambda: _row_waits(admin))
    waits.join(20)
    assert took == [True]
    one.close()
    other.close()


def _row_waits(connection: Session) -> bool:
    row = connection.execute(
        "select exists (select from pg_locks where locktype = 'transactionid' and not granted)"
    ).fetchone()
    return bool(row and row[0])


def test_who_waits_for_a_lock_of_ours_is_shown_with_its_holder(ours: str, admin: Session) -> None:
    one, other = opened(ours), opened(ours)
    one.lock("pins")
    assert one.lock_waits() == ()
    waits = threading.Thread(target=other.lock, args=("pins",), daemon=True)
    waits.start()
    wait_for(one.lock_waits)
    admin.execute("create table t (id int primary key)")
    with Pipeline.open(config_of(ours)) as pipeline:
        (told,) = collect(pipeline).lock_waits
    holds, wants = one.connection.info.backend_pid, other.connection.info.backend_pid
    assert told.sentence == f"session {wants} waits for our lock pins, held by session {holds}"
    one.unlock("pins")
    waits.join(20)
    assert one.lock_waits() == ()
    one.close()
    other.close()
