"""Copies in many short transactions: nothing is lost, and nothing is held for long."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from cdc_assets.errors import SlotBusy
from cdc_assets.log.copies.claims import Claims, Written
from cdc_assets.log.states import TableState
from cdc_assets.observe.status import collect
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.snapshot.pace import Pace
from cdc_assets_tests.integration.snapshot.sources import WIDE, T
from cdc_assets_tests.support.incremental import INCREMENTAL, TOAST, between_parts, copy_here
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.synchronous import hanging_commits

pytestmark = pytest.mark.spark


@pytest.fixture
def source(new_lake: NewLake) -> Iterator[Lake]:
    with new_lake(TOAST, {"name": "t", "chunk_pages": 64}, snapshot=INCREMENTAL) as opened:
        opened.execute("vacuum (index_cleanup on) t")  # the first pages have room now
        yield opened


def held_pins(source: Lake) -> int:
    ((number,),) = source.execute("select count(*) from _pg2iceberg.pin_holders")
    return int(number)


class Writer:
    """Changes random rows: values, TOAST, keys; deletes and inserts some."""

    def __init__(self, dsn: str, seed: int) -> None:
        self._session = psycopg.connect(dsn, autocommit=True)
        self._random = random.Random(seed)
        self._next = 100_000

    def change(self, times: int) -> None:
        for _ in range(times):
            some = self._random.randint(1, 20_000)
            swap = (
                f"begin; update t set id = -1 where id = {some}; update t set id = {some} where"
                f" id = {some + 1}; update t set id = {some + 1} where id = -1; commit"
            )
            statement = self._random.choice(
                [
                    f"update t set v = v || ' {some}' where id between {some} and {some + 5}",
                    f"update t set pad = repeat('y', {some}) where id = {some}",
                    f"update t set id = {self._next} where id = {some}",
                    f"delete from t where id = {some}",
                    f"insert into t values ({self._next}, 'new', repeat('z', {some % 9000}))",
                    swap,
                ]
            )
            self._next += 1
            self._session.execute(statement.encode())

    def close(self) -> None:
        self._session.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_invariant_5_what_moves_between_short_transactions_is_evened_out_by_the_log(
    source: Lake, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    writer = Writer(source.pipeline.source_dsn, seed)
    source.pin()
    assert held_pins(source) == 0
    with between_parts(monkeypatch, lambda _: writer.change(20)):
        copy_here(source)
    writer.change(50)
    writer.close()
    point, complete = source.execute(
        "select snapshot_lsn::text, complete_lsn::text from _pg2iceberg.tables"
    )[0]
    assert Lsn.parse(point) < Lsn.parse(complete), "the log is applied as far as was read"
    assert not source.equal(T), "the test needs rows that the copy has otherwise"
    assert collect(source.pipeline).tables[0].applied_lsn is None, "not whole yet (invariant 10)"
    source.catch_up()
    source.catch_up()
    assert source.equal(T)
    assert [found.equal for found in source.verify()] == [True]


def test_invariant_5_a_row_that_moves_ahead_of_the_reader_keeps_its_toast(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its update leaves TOAST out, and it goes from a page that isn't read yet to one that is."""
    source.pin()

    def move(part: int) -> None:
        if part == 2:
            with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as session:
                session.execute("update t set v = repeat('m', 300) where id > 19990")
                found = session.execute(
                    "select count(*) from t where id > 19990 and ctid < '(48,0)'"
                )
                assert found.fetchone() != (0,), "the test needs rows that moved to the front"

    with between_parts(monkeypatch, move):
        copy_here(source)
    source.catch_up()
    source.catch_up()
    assert source.equal(T)


def test_invariant_5_a_commit_that_hangs_while_the_table_is_pinned(source: Lake) -> None:
    """Its record is below the point, so it isn't in the log; a snapshot of now lacks it."""
    dsn = source.pipeline.source_dsn
    source.execute("set synchronous_commit = local")
    source.pins.prepare()
    with hanging_commits(dsn, "update t set v = 'hung' where id = 5000"):
        source.pins = type(source.pins)(source.pipeline)
        source.pins.prepare()
        source.pins.tick()
        source.pins.tick()
        assert source.row(T).state == TableState.WAITING
    source.pins.tick()
    assert source.row(T).state == TableState.COPYING
    source.copy()
    source.catch_up()
    assert source.execute("select v from t where id = 5000") == [("hung",)]
    assert source.equal(T)


def test_what_a_copy_has_seen_is_flushed_before_it_counts(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash would take a commit back that nobody waited for, and the log would never have it."""
    source.execute("alter system set wal_writer_delay = '10s'")
    source.execute("select pg_reload_conf()")
    source.pin()
    wrote, seen = Claims.wrote, list[bool]()

    def check(claims: Claims, chunks: list[Written], file: str | None) -> bool:
        for chunk in chunks:
            ((flushed,),) = source.execute(
                f"select pg_current_wal_flush_lsn() >= '{chunk.read_lsn}'::pg_lsn"
            )
            seen.append(flushed)
        return wrote(claims, chunks, file)

    monkeypatch.setattr(Claims, "wrote", check)
    with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as writer:
        writer.execute("set synchronous_commit = off")
        with between_parts(
            monkeypatch, lambda part: writer.execute(f"delete from t where id = {part + 5000}")
        ):
            copy_here(source)
    source.execute("alter system reset wal_writer_delay")
    source.execute("select pg_reload_conf()")
    assert seen
    assert all(seen)


def test_who_holds_a_copy_up_is_told_where_it_takes_long(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.pins.prepare()
    monkeypatch.setattr("cdc_assets.pins.at_horizon._NOTED_SECONDS", 0)
    with psycopg.connect(source.pipeline.source_dsn, application_name="nightly") as writer:
        writer.execute("delete from t where id = 5000")
        for _ in range(2):  # the second one finds it said
            source.pins.tick()
            assert "before it. The oldest: " in str(source.row(T).reason)
            assert "nightly" in str(source.row(T).reason)
        monkeypatch.setattr("cdc_assets.pins.at_horizon.SLOT_PATIENCE_SECONDS", 0)
        with pytest.raises(SlotBusy, match=r"public\.t\. The oldest: .*nightly"):
            source.pins.tick()
    source.pins.tick()
    assert (source.row(T).state, source.row(T).reason) == (TableState.COPYING, None)


def test_a_horizon_of_before_the_table_was_published_anew_is_dropped(source: Lake) -> None:
    source.pins.prepare()
    with psycopg.connect(source.pipeline.source_dsn) as writer:
        writer.execute("update t set v = 'late' where id = 5000")
        source.pins.tick()
        assert source.row(T).state == TableState.WAITING
        source.execute("alter publication cdc_src drop table t")
        source.execute("alter publication cdc_src add table t")
        writer.execute("update t set v = 'later' where id = 5001")
        writer.commit()
        writer.execute("update t set v = 'later still' where id = 5002")
        source.pins.tick()
        assert source.row(T).state == TableState.WAITING, "a new horizon, which the writer holds"
    source.pins.tick()
    source.pins.tick()
    source.copy()
    source.catch_up()
    assert source.equal(T)


@pytest.mark.parametrize(
    "change",
    [
        "update t set pad = 'x'; alter table t drop column pad; alter table t add column pad text",
        "update t set v = 'x' where id = 5000; alter table t add column w int default 1",
        "update t set v = 'x' where id = 5000; truncate t; insert into t values (1, 'one', null)",
    ],
)
def test_a_horizon_of_before_the_table_was_altered_is_dropped(source: Lake, change: str) -> None:
    """Nor is one used where its rows lie elsewhere by now: the log of before isn't of them."""
    source.pins.prepare()
    source.execute("create table other (id int)")
    with psycopg.connect(source.pipeline.source_dsn) as writer:
        writer.execute("insert into other values (1)")
        source.pins.tick()
        for statement in change.split(";"):
            source.execute(statement)
    for _ in range(3):
        source.pins.tick()
    source.copy()
    source.catch_up()
    assert source.row(T).state == TableState.STREAMING
    assert [found.equal for found in source.verify()] == [True]


def test_a_horizon_of_before_a_partition_was_detached_is_dropped(new_lake: NewLake) -> None:
    setup = "create table t (id int primary key, v text) partition by range (id);"
    setup += "create table low partition of t for values from (0) to (10);"
    setup += "create table high partition of t for values from (10) to (20);"
    setup += "insert into t select i, 'old' from generate_series(0, 19) i; create table o (i int)"
    with new_lake(setup, "t", snapshot=INCREMENTAL) as source:
        source.pins.prepare()
        with psycopg.connect(source.pipeline.source_dsn) as writer:
            writer.execute("insert into o values (1)")
            source.pins.tick()
            source.execute("update t set v = 'new' where id = 7")
            source.execute("alter table t detach partition low")
        for _ in range(3):
            source.pins.tick()
        source.copy()
        source.catch_up()
        assert source.equal(T)
        assert len(source.rows(T)) == 10


def longest_snapshots(dsn: str, during: Callable[[], None]) -> float:
    """For how long one of our readers has held back VACUUM, at most, as was seen."""
    longest, over = 0.0, threading.Event()

    def look() -> None:
        nonlocal longest
        with psycopg.connect(dsn, autocommit=True) as session:
            while not over.is_set():
                ((seconds,),) = session.execute(
                    "select coalesce(max(extract(epoch from clock_timestamp() - xact_start)), 0)"
                    " from pg_stat_activity where backend_xmin is not null"
                    " and application_name like 'cdc_assets%%' and pid <> pg_backend_pid()"
                ).fetchall()
                longest = max(longest, float(seconds))
                time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        during()
    finally:
        over.set()
        thread.join()
    return longest


@pytest.mark.parametrize("strategy", ["incremental", "pinned"])
def test_no_session_holds_a_snapshot_for_long(new_lake: NewLake, strategy: str) -> None:
    setup = WIDE.replace("20000", "800000")
    snapshot: dict[str, Any] = {**INCREMENTAL, "strategy": strategy}
    with new_lake(setup, {"name": "t", "chunk_pages": 4096}, snapshot=snapshot) as source:
        source.pin()

        def copy() -> None:
            time.sleep(1)  # until its turn comes
            source.copy()

        longest = longest_snapshots(source.pipeline.source_dsn, copy)
        assert (longest < 0.5) == (strategy == "incremental"), longest
        assert [(found.equal, found.lake_rows) for found in source.verify()] == [(True, 800_000)]


def test_vacuum_removes_dead_rows_while_the_table_is_copied(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.pin()
    left = list[str]()

    def vacuum(part: int) -> None:
        with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as session:
            session.add_notice_handler(lambda note: left.append(note.message_primary or ""))
            session.execute(f"delete from t where id = {5000 + part}".encode())
            session.execute("vacuum (verbose) t")

    with between_parts(monkeypatch, vacuum, pages=200):
        copy_here(source)
    told = [text for text in left if "dead but not yet removable" in text and "tuples: " in text]
    assert told
    assert all(" 0 are dead but not yet removable" in text for text in told), told
    source.catch_up()
    assert source.equal(T)


@pytest.mark.parametrize("table", [{"mode": "append"}, {"mode": "soft_delete"}, {"keyless": True}])
def test_what_the_log_can_not_even_out_is_pinned(new_lake: NewLake, table: Any) -> None:
    setup = "create table t (id int primary key, v text); insert into t values (1, 'a'), (2, 'b')"
    if table.pop("keyless", None):
        setup = setup.replace(" primary key", "") + "; alter table t replica identity full"
    with new_lake(setup, {"name": "t", **table}, snapshot=INCREMENTAL) as source:
        source.pin()
        source.pins.tick()
        assert source.row(T).state == TableState.COPYING
        assert held_pins(source) == 1


def test_a_table_of_its_own_strategy_beside_others(new_lake: NewLake) -> None:
    setup = WIDE + "create table u (id int primary key); insert into u values (1), (2);"
    tables = {"name": "t", "strategy": "incremental", "chunk_pages": 8}, "u"
    with new_lake(setup, *tables) as source:
        source.pin()
        assert held_pins(source) == 1
        source.copy()
        source.catch_up()
        assert [found.equal for found in source.verify()] == [True, True]


@pytest.mark.parametrize(("large", "estimated"), [("t", True), ("u", True), ("u", False)])
def test_a_large_table_alone_is_incremental_with_auto(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch, large: str, estimated: bool
) -> None:
    setup = "create table t (id int primary key, pad text);"
    setup += "create table u (id int primary key, pad text) partition by range (id);"
    setup += "create table u1 partition of u for values from (0) to (99999);"
    setup += f"insert into {large} select i, repeat('x', 100) from generate_series(1, 20000) i;"
    setup += "analyze t, u" if estimated else ""
    monkeypatch.setattr("cdc_assets.readiness.strategy.LARGE_BYTES", 2_000_000)
    with new_lake(setup, "t", "u", snapshot={"strategy": "auto"}) as source:
        source.pin()
        assert source.execute(
            "select t.table_name from _pg2iceberg.pins p join _pg2iceberg.tables t using (pin)"
            " where not p.held"
        ) == [(f"public.{large}",)]


def test_parts_are_as_large_as_the_time_allows() -> None:
    pace, chunk = Pace(2.0), CtidRange(1000, 10_000)
    seconds = iter([0.1, 0.5, 8.0, 2.0])
    parts = []
    for part in pace.parts(chunk, 5):
        parts.append(part)
        assert part.end_block is not None
        pace.took(next(seconds, 1.0), part.end_block - part.first_block)
    ends = [part.end_block for part in parts]
    assert [part.first_block for part in parts] == [1000, *ends[:-1]]
    assert ends[:4] == [1256, 2280, 6376, 7400]
    assert ends[-1] == 10_000
    (last,) = pace.parts(CtidRange(100_000, None), 100_001)
    assert last == CtidRange(100_000, None)
