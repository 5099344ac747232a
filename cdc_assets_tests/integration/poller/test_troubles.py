"""Tables that can't be read hold up no other one, are tried ever later, and do no harm."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.flusher.flusher import run
from cdc_assets.log.staged.storage import store
from cdc_assets.observe.status import TableStatus, collect
from cdc_assets.poller.poller import Poller
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, T, queried
from cdc_assets_tests.support.waiting import wait_for

U = TableId("public", "u")
BOTH = CLOCKED + CLOCKED.replace(" t ", " u ")
OF_U = BY_CLOCK | {"name": "u"}


@pytest.fixture
def source(postgres_dsn: NewDatabase, tmp_home: object) -> Iterator[Queried]:
    with queried(postgres_dsn(), BOTH, BY_CLOCK, OF_U) as opened:
        yield opened


def reader(admin: psycopg.Connection[Any], dsn: str) -> str:
    """The address of a role that has no right yet."""
    name = f"reader_{conninfo_to_dict(dsn)['dbname']}"
    admin.execute(f"create role {name} login password 'secret'".encode())
    admin.execute(b"grant usage on schema public to public")
    return make_conninfo(dsn, user=name, password="secret")


def statuses(source: Queried) -> dict[str, TableStatus]:
    return {table.name: table for table in collect(source.pipeline).tables}


@pytest.mark.parametrize("partitioned", [False, True])
def test_rights_to_some_columns_of_a_read_only_role_are_enough(
    postgres_dsn: NewDatabase, tmp_home: object, partitioned: bool
) -> None:
    """LOCK TABLE demands a right to the whole table, for one."""
    dsn = postgres_dsn()
    made = "create table t (id int primary key, v text, secret text, updated_at timestamptz not"
    made += " null default now())"
    if partitioned:
        made += " partition by range (id); create table p partition of t for values from (0) to (9)"
    with psycopg.connect(dsn, autocommit=True) as admin:
        reads = reader(admin, dsn)
        role, columns = conninfo_to_dict(reads)["user"], "id, v, updated_at, ctid, xmin, cmin"
        made += f"; grant select ({columns}) on t to {role}"
        if partitioned:
            made += f"; grant select ({columns}) on p to {role}; grant select (tableoid) on t"
            made += f" to {role}"
        made += f"; alter role {role} set default_transaction_read_only = on"
        table = BY_CLOCK | {"columns": {"exclude": ["secret"]}}
        state = {"postgres_url": dsn}
        with queried(reads, "select 1", table, state=state, created=(admin, made)) as source:
            assert not [f for f in source_findings(source.config) if f.severity == "error"]
            admin.execute("insert into t values (1, 'x', 'secret')")
            source.poll()
            assert source.found().keys() == {"1"}
            assert "secret" not in source.found()["1"]
            if partitioned:
                admin.execute(f"revoke select (tableoid) on t from {role}".encode())
                [found] = [f for f in source_findings(source.config) if f.severity == "error"]
                assert (found.code, "tableoid" in found.remedy) == ("select_privilege", True)


def test_a_table_that_may_not_be_read_any_more_holds_up_no_other(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as admin:
        reads = reader(admin, dsn)
        role = conninfo_to_dict(reads)["user"]
        created = (admin, f"{BOTH} grant select on t, u to {role}")
        state = {"postgres_url": dsn}
        with queried(reads, "select 1", BY_CLOCK, OF_U, state=state, created=created) as source:
            for wrong, mended in (
                (f"revoke select on u from {role}", f"grant select on u to {role}"),
                (
                    "alter table u enable row level security",
                    "alter table u disable row level security",
                ),
            ):
                admin.execute(wrong.encode())
                admin.execute("insert into u values ((select count(*) from u), 'x')")
                admin.execute("insert into t values ((select count(*) from t), 'x')")
                assert not source.poll(), wrong
                assert "public.u wasn't read" in source.progress.troubles["queries"]
                assert source.is_level(T)
                admin.execute(mended.encode())
                wait_for(source.poll)
                assert {*source.found(U)} == {str(n) for (n,) in admin.execute("select id from u")}


def test_a_table_that_is_held_up_leaves_the_others_fresh(source: Queried) -> None:
    """The log as a whole isn't level with the source; each table's own log is told."""
    source.poll()
    with source.session() as locking:
        locking.execute("begin; lock table u")
        source.execute("insert into t values (1, 'x')")
        assert not source.poll()
        told = source.progress.troubles["queries"]
        assert "it is locked, or about to be" in told, "a lock that is known isn't waited for"
        flushed = source.pipeline.store.flushed_lsn()
        assert flushed is not None
        source.execute("select pg_logical_emit_message(false, 'x', repeat('x', 10000))")
        for table in (T, U):  # as if it were merged
            source.pipeline.store.connection.execute(
                "update tables set snapshot_lsn = '0/1' where table_name = %s", (str(table),)
            )
        assert not source.poll()
        assert source.pipeline.store.flushed_lsn() == flushed
        source.pipeline.store.connection.execute("delete from log_index")
        found = statuses(source)
        t, u = found["public.t"], found["public.u"]
        assert t.lag_bytes is not None
        assert u.lag_bytes is not None
        assert t.lag_bytes < 10_000 <= u.lag_bytes
        assert t.lag_seconds is not None
        assert u.lag_seconds is not None
        assert t.lag_seconds <= u.lag_seconds
    wait_for(source.poll)
    level = source.pipeline.store.flushed_lsn()
    assert level is not None
    assert level > flushed


def test_a_table_that_fails_again_and_again_is_tried_ever_later(source: Queried) -> None:
    with source.session() as locking:
        locking.execute("begin; lock table u")
        tries = 0
        with source.pipeline.connect_source("poll") as session:
            ends = time.monotonic() + 5
            while time.monotonic() < ends:
                before = source.poller.again_at
                source.polling.poll(source.poller, session)
                tries += source.poller.again_at != before
                time.sleep(0.05)
        assert 1 <= tries <= 4, "of many polls"
    wait_for(source.poll)


def test_a_table_that_fails_has_no_other_one_read_more_often(
    postgres_dsn: NewDatabase, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table was asked every two seconds while one was locked, whatever query.every says."""
    asked = list[tuple[bool, set[TableId]]]()
    note = Poller.note

    def noted(self: Poller, session: Any, *, whole: bool = True) -> Any:
        poll = note(self, session, whole=whole)
        asked.append((whole, {*poll.asked}))
        return poll

    monkeypatch.setattr(Poller, "note", noted)
    freshness = {"freshness": {"warn": "2h", "fail": "3h"}}
    with queried(
        postgres_dsn(), BOTH, BY_CLOCK | freshness, OF_U | freshness, query={"every": "1h"}
    ) as source:
        stop = threading.Event()
        thread = threading.Thread(target=run, args=(source.config,), kwargs={"stop": stop})
        with source.session() as locking:
            locking.execute("begin; lock table u")
            thread.start()
            wait_for(lambda: len(asked) >= 3)
            locking.execute("rollback")
        wait_for(lambda: (False, {U}) in asked)
        stop.set()
        thread.join()
    assert [tables for whole, tables in asked if whole] == [{T}]


def test_a_lost_session_in_the_midst_of_a_page_loses_nothing(
    source: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc_assets.poller.rows.PART_BYTES", 1_000)
    source.execute("insert into t select i, repeat('x', 1000) from generate_series(1, 9000) i")
    with source.pipeline.connect_source("poll") as session:
        poll = source.poller.note(session)
        parts = poll.read(session)
        next(parts)
        source.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'cdc_assets src poll'"
        )
        with pytest.raises(psycopg.OperationalError):
            for _ in parts:
                pass
    source.begin()
    source.poll()
    assert source.is_level()


def test_nobody_waits_for_a_file_that_can_not_be_stored(
    postgres_dsn: NewDatabase, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is read while its files are written: its lock would last as long as an outage."""
    monkeypatch.setattr("cdc_assets.poller.rows.PART_BYTES", 10_000)
    works = threading.Event()

    def stored(*given: Any) -> None:
        if not works.is_set():
            raise OSError("the place of staged files is out")
        store(*given)

    monkeypatch.setattr("cdc_assets.flusher.stage.staging.store", stored)
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK, staging={"flush_bytes": 20_000}) as source:
        source.execute("insert into t select i, repeat('x', 1000) from generate_series(1, 9000) i")
        thread = threading.Thread(target=source.poll)
        thread.start()
        wait_for(lambda: source.progress.staging_retries >= 2)
        source.execute("set lock_timeout = '2s'; alter table t add w int")
        works.set()
        thread.join()
        source.begin()
        source.poll()
        assert source.is_level()
