"""Pins by lock: exact for what they lock, in nobody's way for long, and told where they wait."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import ReplicationLost, SlotBusy
from cdc_assets.flusher.flusher import run
from cdc_assets.log.states import TableState
from cdc_assets.pins import pins, taking
from cdc_assets.pins.pins import Pins
from cdc_assets.pins.ways import by_lock
from cdc_assets.postgres import slots
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness import surroundings as readiness
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.pins.pinning import PARTED, PLAIN, T, U, V, pinning, stranger
from cdc_assets_tests.integration.snapshot.sources import role
from cdc_assets_tests.support.flusher import Bench, bench
from cdc_assets_tests.support.synchronous import hanging_commits
from cdc_assets_tests.support.threads import beside


@pytest.mark.parametrize("where", ["another database", "another table"])
def test_a_transaction_elsewhere_holds_up_a_slot_and_no_lock(
    any_source: Bench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(slots, "SLOT_PATIENCE_SECONDS", 1)
    with pinning(any_source, f"{PLAIN}; create table o (id int)") as here:
        here.ask_anew()
        away = {"dbname": "postgres"} if where == "another database" else {}
        with stranger(any_source.dsn, "select txid_current()", **away):
            monkeypatch.setattr(type(here.config), "pin_by", lambda *_: "slot")
            with pytest.raises(SlotBusy):
                here.pins.tick()
            monkeypatch.undo()
            begun = time.monotonic()
            assert here.pinned()
            assert time.monotonic() - begun < 5
            assert here.shown() == {-1}


def test_no_slot_is_needed_beside_the_streams(public_directory: Path, tmp_path: Path) -> None:
    settings = {"fsync": "off", "max_replication_slots": "1"}
    with (
        EmbeddedPostgres(public_directory / "one_slot", settings=settings) as server,
        bench(server.start(), "one_slot", tmp_path) as source,
        pinning(source, PLAIN) as here,
    ):
        here.ask_anew()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(here.config), "pin_by", lambda *_: "slot")
            with pytest.raises(ReplicationLost, match="all replication slots are in use"):
                here.pins.tick()
            found = {finding.code: finding for finding in readiness.review(here.config)}
            assert found["slots_exhausted"].severity == "error"
        found = {finding.code: finding for finding in readiness.review(here.config)}
        assert found["slots_exhausted"].severity == "warning", "a comparison makes one"
        assert here.pinned()


def write(dsn: str, numbers: Iterator[int], stop: threading.Event) -> None:
    """Insert a number at a time: by itself, in a subtransaction, prepared, or into a partition."""
    with psycopg.connect(dsn, autocommit=True) as session:
        parted = session.execute("select to_regclass('t0')").fetchone() != (None,)
        while not stop.is_set():
            number = next(numbers)
            undone = "begin; savepoint s; insert into t values (-9); rollback to s"
            kinds = [
                "insert into t values ({0})",
                "begin; savepoint s; insert into t values ({0}); release savepoint s; commit",
                undone + "; select pg_sleep(0.01); insert into t values ({0}); commit",
                "begin; insert into t values ({0}); prepare transaction 'p{0}'",
                "insert into t0 values ({0})" if parted else "insert into t values ({0})",
            ]
            kind = kinds[number % len(kinds)]
            session.execute(kind.format(number).encode())
            if "prepare" in kind:
                time.sleep(0.005)
                session.execute(f"commit prepared 'p{number}'".encode())


@pytest.mark.parametrize("setup", [PLAIN, PARTED], ids=["plain", "partitioned"])
def test_invariant_5_a_snapshot_shows_what_committed_below_its_point_and_nothing_else(
    any_source: Bench, setup: str
) -> None:
    """Under traffic, again and again; the log has the traffic with the LSNs of its commits."""
    numbers, seen = itertools.count(), list[tuple[Lsn, set[int]]]()
    with pinning(any_source, setup) as here:
        with (
            beside(lambda stop: write(any_source.dsn, numbers, stop)),
            beside(lambda stop: write(any_source.dsn, numbers, stop)),
            beside(lambda stop: write(any_source.dsn, numbers, stop)),
        ):
            while len(seen) < 12:
                here.ask_anew()
                while not here.pinned():
                    pass
                seen.append((here.point(), here.shown()))
        run(here.config, until=current_lsn(any_source.connection))
        log = [(row.commit_lsn, int(row.data["id"])) for row in any_source.log("public.t")]
        assert len(log) > 100
        assert len({frozenset(ids) for _, ids in seen}) > 8, "the test needs traffic"
        for point, ids in seen:
            assert ids == {-1} | {number for commit, number in log if commit < int(point)}


@pytest.mark.parametrize(
    ("setup", "statement"),
    [
        (PLAIN, "insert into t values (7)"),
        (PLAIN, "begin; savepoint s; insert into t values (7); release savepoint s; commit"),
        (PLAIN, "commit prepared 'seven'"),
        (PARTED, "insert into t0 values (7)"),
    ],
    ids=["plain", "subtransaction", "prepared", "partition"],
)
def test_invariant_5_a_commit_that_hangs_holds_the_table(
    source: Bench, setup: str, statement: str
) -> None:
    """Its record is below the WAL's end, and no snapshot shows it yet."""
    source.execute("set synchronous_commit = local")
    with pinning(source, setup) as here:
        if "prepared" in statement:
            source.execute("begin; insert into t values (7); prepare transaction 'seven'")
        here.ask_anew()
        with hanging_commits(source.dsn, statement):
            here.pins.close()
            here.pins = Pins(here.pipeline)
            assert not here.pinned()
            assert "its pin waits until nobody has written to it" in here.state()[1]
        assert here.pinned()
        assert here.shown() == {-1, 7}


def test_what_a_snapshot_shows_is_flushed_before_the_pin_counts(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash would take it back otherwise, and the log would never have what came instead."""
    flushed = list[bool]()

    def take(connection: Any, config: Any, store: Any, point: Lsn, *rest: Any, **more: Any) -> Any:
        ((now,),) = source.execute("select pg_current_wal_flush_lsn()::text")
        flushed.append(point <= Lsn.parse(now))
        return taking.take(connection, config, store, point, *rest, **more)

    def asynchronous(stop: threading.Event) -> None:
        with psycopg.connect(source.dsn, autocommit=True) as session:
            session.execute("set synchronous_commit = off")
            for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                session.execute(f"insert into t values ({number})".encode())

    monkeypatch.setattr(pins, "take", take)
    with pinning(source, PLAIN) as here:
        source.execute("alter system set wal_writer_delay = '10s'")
        source.execute("select pg_reload_conf()")
        try:
            with beside(asynchronous):
                while len(flushed) < 6:  # the first one is the slot's
                    here.ask_anew()
                    here.pins.tick()
        finally:
            source.execute("alter system reset wal_writer_delay")
            source.execute("select pg_reload_conf()")
    assert all(flushed)


def test_what_a_prepared_transaction_holds_up_is_told(source: Bench) -> None:
    with pinning(source, PLAIN, lock_at_most="20ms") as here:
        here.ask_anew()
        source.execute("begin; insert into t values (5); prepare transaction 'forgotten'")
        assert not here.pinned()
        assert "a prepared transaction (pg_prepared_xacts)" in here.state()[1]
        source.execute("commit prepared 'forgotten'")
        assert here.pinned()
        assert here.shown() == {-1, 5}


def test_tables_that_are_free_share_a_pin_and_one_that_is_not_has_its_own(source: Bench) -> None:
    setup = f"{PLAIN}; create table u (id int primary key); insert into u values (1);"
    setup += "create table v (id int primary key) partition by range (id);"
    setup += "create table v0 partition of v for values from (0) to (9); insert into v values (1)"
    with pinning(source, setup, "t", "u", "v", lock_at_most="20ms") as here:
        here.ask_anew(T, U, V)
        with stranger(source.dsn, "insert into u values (5)") as writer:
            assert not here.pinned(T, U, V)
            assert here.state(U)[0] == TableState.WAITING
            assert here.point(T) == here.point(V)
            writer.execute("insert into u values (6)")
            writer.commit()
        assert here.pinned(T, U, V)
        assert here.point(U) > here.point(T)
        assert here.shown("select id from u", U) == {1, 5, 6}


def test_no_more_pins_are_held_than_that(source: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_lock, "MOST_PINS", 1)
    monkeypatch.setattr(by_lock, "AT_ONCE", 1)
    setup = f"{PLAIN}; create table u (id int primary key); insert into u values (1)"
    with pinning(source, setup, "t", "u") as here:
        here.pins.tick()
        here.ask_anew(T, U)
        here.pins.tick()  # lets go of the first one
        here.pins.tick()
        states = {here.state(table) for table in (T, U)}
        full = "1 pins are held: its turn comes when other tables are copied"
        assert states == {(TableState.COPYING, ""), (TableState.WAITING, full)}


def test_a_table_that_is_another_one_by_now_holds_up_no_other(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = f"{PLAIN}; create table u (id int primary key); insert into u values (1)"
    with pinning(source, setup, "t", "u") as here:
        here.ask_anew(T, U)

        def renamed(*_: object) -> dict[Any, Any]:
            source.execute("alter table u rename to w")
            return {}

        monkeypatch.setattr(by_lock, "unlockable", renamed)
        assert here.pinned(T)
        assert here.state(U)[0] == TableState.WAITING
        assert 'relation "public.u" does not exist' in here.state(U)[1]


def test_the_right_that_is_missing_is_found_and_its_remedy_is_the_way_out(
    any_postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    dsn = any_postgres_dsn()
    with role(dsn) as (name, theirs), psycopg.connect(dsn, autocommit=True) as admin:
        source = Bench("src", theirs, tmp_path, admin)
        setup = f"{PARTED}; alter table t owner to {name}; grant select on t0, t1 to {name}"
        with pinning(source, setup) as here:
            assert "lock_privilege" not in {f.code for f in readiness.review(here.config)}
            admin.execute(f"alter table t owner to postgres; grant select on t to {name}".encode())
            here.ask_anew()
            assert not here.pinned()
            found = {f.code: f for f in readiness.review(here.config)}["lock_privilege"]
            assert found.table == "public.t"
            assert here.state() == (TableState.WAITING, f"{found.message} {found.remedy}")
            assert ("maintain" in found.remedy) == (admin.info.server_version >= 170000)
            admin.execute(found.remedy.encode())
            assert "lock_privilege" not in {f.code for f in readiness.review(here.config)}
            assert here.pinned()
