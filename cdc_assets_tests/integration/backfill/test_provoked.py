"""What an adversary does to a backfill: it goes on, or says why not, and no row is wrong."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from cdc_assets.backfill import apply as applying
from cdc_assets.backfill import carry_out as carrying
from cdc_assets.backfill import reader, surplus
from cdc_assets.backfill import round as rounds
from cdc_assets.backfill.request import request
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import Fenced, TableProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log import backfills as record
from cdc_assets.materializer import corrections, reread
from cdc_assets.materializer import merge as merging
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.backfilling import wish
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.backfills import (
    SETUP,
    T,
    after_reading,
    backfilled,
    carried_out,
    damage,
)
from cdc_assets_tests.support.lake import Lake, NewLake, copied
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "_AGAIN_SECONDS", 0.1)


def test_a_key_that_is_renamed_there_and_back_hides_no_change(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        source.execute("alter table t rename id to x")
        source.execute("update t set v = 'new' where x = 7; delete from t where x = 8")
        source.catch_up(T)
        source.execute("alter table t rename x to id")
        source.execute("update t set v = 'last' where id = 9")
        source.catch_up(T)

    after_reading(monkeypatch, change)
    assert backfilled(source).state == "done"
    assert source.equal(T)


def test_parts_are_not_written_over_the_merges_of_who_has_the_lock_by_now(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(source, "update lake.src.t set big = concat(big, '!')")
    monkeypatch.setattr(corrections, "_TEXT_BYTES", 60_000)
    merge, todo = merging.merge, [1]

    def then_lost(change: Any) -> Any:
        done = merge(change)
        while todo:
            todo.pop()
            pid = source.pipeline.store.connection.info.backend_pid
            with Pipeline.open(source.config) as other:
                other.store.connection.execute("select pg_terminate_backend(%s)", (pid,))
                source.execute("update t set v = 'new' where id > 20")
                source.flush()
                assert wait_for(lambda: drain(other, source.session, T))
        return done

    monkeypatch.setattr(corrections, "merge", then_lost)
    with pytest.raises((Fenced, psycopg.OperationalError)):
        backfilled(source)
    source.pipeline.close()
    source.pipeline = Pipeline.open(source.config)
    there = source.execute("select id, v from t")
    assert {row[:2] for row in source.rows(T)} == set(there)  # no merge was undone
    assert carried_out(source, 1).state == "done"
    assert source.equal(T)


def test_a_commit_that_a_crash_takes_back_is_not_in_the_lake(
    public_directory: Path,
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asynchronous, and the WAL goes on with other changes at the same LSNs."""
    late = {"wal_writer_delay": "10s", "full_page_writes": "off"}
    server = EmbeddedPostgres(public_directory / "careless", settings=late)
    dsn, elsewhere = server.start(), {"postgres_url": postgres_dsn()}
    try:
        with copied(dsn, spark_server.ensure(), SETUP, "t", state=elsewhere) as source:
            source.catch_up()
            read, todo = reader._Reader._read, [1]

            def careless(self: Any, *about: Any) -> Any:
                while todo:
                    todo.pop()
                    source.execute("checkpoint; set synchronous_commit = off")
                    source.execute("update t set v = 'lost' where id = 3")
                    source.execute("insert into t values (500, 'lost')")
                    crashes.append(1)
                return read(self, *about)

            crashes = list[int]()

            def flush_to(lsn: object, *, seconds: float | None = None) -> None:
                while crashes:
                    crashes.pop()
                    state = json.loads((server.directory / "server.json").read_text())
                    os.kill(state["pid"], signal.SIGKILL)
                    while not source.source.closed:
                        with suppress(psycopg.OperationalError):
                            source.execute("select 1")
                    server.stop()
                    server.start()
                with psycopg.connect(dsn, autocommit=True) as again:
                    for _ in range(30):
                        again.execute("update t set v = 'traffic' where id = 9")
                    run(source.config, until=current_lsn(again))

            monkeypatch.setattr(reader._Reader, "_read", careless)
            number = request(source.pipeline, T).number
            said = list[str]()
            done = carrying.carry_out(
                source.pipeline, source.session, number, flush_to, said.append
            )
            assert done.state == "done" and done.read == 300, said
            with psycopg.connect(dsn, autocommit=True) as again:
                there = Lake(source.config, again)
                try:
                    there.catch_up()
                    assert there.execute("select count(*) from t where v = 'lost'") == [(0,)]
                    assert there.equal(T)
                finally:
                    there.close()
    finally:
        server.remove()


def test_what_an_update_left_out_is_healed_where_no_reader_saw_the_row(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves from a page that isn't read yet to one that was read."""
    setup = SETUP.replace("repeat('long ', 500)", "repeat('long ', 1000)")
    setup += "insert into t select i, repeat('v', 2000), 'big' from generate_series(301, 400) i;"
    setup += "delete from t where id between 301 and 310;"
    with new_lake(setup, {"name": "t", "chunk_pages": 8}) as source:
        source.pin()
        source.copy()
        source.execute("vacuum t")  # there is room in front
        damage(source, "update lake.src.t set big = 'wrong' where id > 390 or id < 10")

        def moves() -> None:
            source.execute("update t set v = v || 'w' where id in (1, 2, 395)")

        after_reading(monkeypatch, moves)
        assert backfilled(source).state == "done"
        source.catch_up(T)
        assert source.equal(T)


def test_a_lake_that_lost_its_rows_is_filled_under_traffic(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each merge has to read rows again at the source, as of later than what was read."""
    damage(source, "delete from lake.src.t")
    applied, number = applying.apply, [0]

    def apply(*about: Any) -> Any:
        number[0] += 1
        source.execute(f"update t set v = 'traffic' where id = {number[0]}")
        return applied(*about)

    monkeypatch.setattr(rounds, "apply", apply)
    monkeypatch.setattr(carrying, "_TRIES", 2)
    assert backfilled(source).state == "done"
    source.catch_up(T)
    assert source.equal(T)


def test_an_alter_under_way_when_a_part_begins_is_waited_for(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, todo = reread.column_names, ["alter table t rename v to w"]

    def before_the_lock(*about: Any) -> Any:
        found = names(*about)
        while todo:
            source.execute(todo.pop())
        return found

    monkeypatch.setattr(reader, "column_names", before_the_lock)
    assert backfilled(source).state == "done"
    assert source.equal(T)


def test_a_table_that_is_gone_fails_it_and_a_failed_one_can_go_on(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "_TRIES", 1)
    number = request(source.pipeline, T).number
    source.execute("alter table t rename to u")
    with pytest.raises(TableProblem, match=r"public\.t"):
        carried_out(source, number)
    failed = record.backfill(source.pipeline.store, number)
    assert failed.state == "failed" and "backup" not in str(failed.reason)
    source.execute("alter table u rename to t")
    assert wish(source.pipeline, "resume", number).state == "requested"
    assert carried_out(source, number).state == "done"


def test_a_backfill_that_looks_for_surplus_rows_or_waits_for_a_lock_is_stopped(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surplus, "_KEYS", 10)
    monkeypatch.setattr(carrying, "_LOOK_SECONDS", 0.0)
    there, looked = reread.there, list[int]()

    def stopped(*about: Any) -> Any:
        looked.append(1)
        if len(looked) == 2:
            with Pipeline.open(source.config) as other:
                wish(other, "stop", 1)
        return there(*about)

    monkeypatch.setattr(surplus, "there", stopped)
    assert backfilled(source, replaces=True).state == "stopped"
    assert len(looked) == 2
    number = request(source.pipeline, T).number
    patience = reader._PATIENCE.as_string(None).replace("10s", "500ms")
    monkeypatch.setattr(reader, "_PATIENCE", sql.SQL(patience).format())
    with psycopg.connect(source.pipeline.source_dsn) as stranger:
        stranger.execute("lock table t")
        timer = threading.Timer(3.0, _pause, (source, number))
        timer.start()
        assert carried_out(source, number).state == "paused"
        timer.join()
    wish(source.pipeline, "resume", number)
    assert carried_out(source, number).state == "done"


def _pause(source: Lake, number: int) -> None:
    with Pipeline.open(source.config) as other:
        wish(other, "pause", number)


def test_a_condition_that_no_row_meets_makes_no_commit(new_lake: NewLake) -> None:
    with new_lake(SETUP, {"name": "t", "chunk_pages": 1}) as source:
        source.pin()
        source.copy()
        source.catch_up()
        before = source.snapshots(T)
        assert backfilled(source, where="id = -1").read == 0
        assert source.snapshots(T) == before


def test_partitions_may_come_and_go_meanwhile(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = "create table p (id int primary key, v text) partition by range (id);"
    for number in range(3):
        begin, end = number * 100, number * 100 + 100
        setup += f"create table p{number} partition of p for values from ({begin}) to ({end});"
    setup += "insert into p select i, 'v' from generate_series(0, 299) i;"
    table = TableId("public", "p")
    with new_lake(setup, "p") as source:
        source.pin()
        source.copy()
        made = "create table p3 partition of p for values from (300) to (400);"
        after_reading(
            monkeypatch, lambda: source.execute(f"{made} insert into p values (301, 'n')")
        )
        done = backfilled(source, table)
        assert (done.state, done.read) == ("done", 300)  # nothing is read again for it
        source.catch_up(table)
        assert source.equal(table)
