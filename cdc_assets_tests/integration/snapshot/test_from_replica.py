"""First copies that are read from a hot standby: it goes on, or stands still for a moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.errors import EnvironmentProblem, SnapshotLost
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.copies.claims import Written
from cdc_assets.log.states import TableState
from cdc_assets.pins.holders import join_pin
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session import connect
from cdc_assets.postgres.slots import NewSlot, export_snapshot
from cdc_assets.readiness.surroundings import review
from cdc_assets.snapshot import worker
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets.snapshot.table_copy import TableCopy
from cdc_assets_tests.faults.test_failover import Pair, standby_pair
from cdc_assets_tests.integration.snapshot.elsewhere import (
    HELD,
    PARTS,
    READ,
    SETUP,
    STANDBY,
    TABLES,
    A,
    begin,
    check_exact,
    copy_by,
    lead_to,
    opened,
    reached,
    waits_for,
    writing,
)
from cdc_assets_tests.integration.snapshot.sources import T, chunk_keys, role
from cdc_assets_tests.support.lake import Lake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

MIRROR = TABLES[:1]
STATE = "select pg_get_wal_replay_pause_state()"


def test_invariant_4_a_replica_that_goes_on_and_the_log_are_the_table(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshot shows commits from after its replay was looked at; the log has them, too."""

    def late(dsn: str) -> NewSlot:
        time.sleep(0.5)
        return export_snapshot(dsn)

    monkeypatch.setattr("cdc_assets.pins.elsewhere.copies.export_snapshot", late)
    with opened(tmp_home, spark_server, kind="replica", tables=MIRROR) as (source, both):
        source.pins.prepare()
        with writing(source) as done:
            wait_for(lambda: done[0] > 50)
            wait_for(lambda: reached(source, TableState.COPYING))
            assert both.ask_standby(STATE) == [("not paused",)]
            source.copy()
            before = done[0]
            wait_for(lambda: done[0] > before + 50)
        point, complete = source.row(T).snapshot_lsn, source.row(T).complete_lsn
        assert point is not None
        assert complete is not None
        assert point < complete, "it isn't the source's table before all that was read is applied"
        source.catch_up()
        assert source.equal(T)
        assert source.row(T).epoch == 1


def test_invariant_4_a_table_that_the_log_can_not_even_out_is_read_as_of_a_stop(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server, kind="replica") as (source, both):
        source.pins.prepare()
        with writing(source) as done:
            wait_for(lambda: reached(source, TableState.COPYING))
            assert both.ask_standby(STATE) == [("not paused",)], "it goes on"
            source.copy()
            before = done[0]
            wait_for(lambda: done[0] > before + 50)
        assert source.row(A).complete_lsn == source.row(A).snapshot_lsn
        source.catch_up()
        check_exact(source)


def replay_a_vacuum(source: Lake, both: Pair) -> None:
    """Have the standby remove rows that whoever began before it still needs."""
    source.execute("update t set v = v || '!' where id % 3 = 0")
    source.execute("vacuum t")
    both.await_replay()


def test_a_conflict_with_recovery_costs_the_pin_and_the_rest_is_read_under_another(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    hasty = {"max_standby_streaming_delay": "0"}
    with opened(tmp_home, spark_server, kind="replica", tables=MIRROR, standby=hasty) as (
        source,
        both,
    ):
        assert "replica_conflicts" in {finding.code for finding in review(source.config)}
        source.pins.prepare()
        wait_for(lambda: reached(source, TableState.COPYING))
        first, *_ = chunk_keys(source)
        copy_table(source.pipeline, source.session, T, only=[first])
        replay_a_vacuum(source, both)
        with pytest.raises(SnapshotLost):
            source.copy()
        before = source.row(T).pin
        wait_for(lambda: reached(source, TableState.COPYING) and source.row(T).pin != before)
        (shown,) = source.execute("select max(read_lsn)::text from _pg2iceberg.snapshot_progress")
        source.copy()
        complete = source.row(T).complete_lsn
        assert complete is not None
        assert complete >= Lsn.parse(shown[0]), "what the lost snapshot showed counts, too"
        source.catch_up()
        assert source.equal(T)
        assert source.row(T).epoch == 1


def test_a_conflict_with_recovery_while_a_replica_is_pinned_is_told(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = {"max_standby_streaming_delay": "0"}
    with opened(tmp_home, spark_server, kind="replica", tables=MIRROR, standby=hasty) as (
        source,
        both,
    ):

        def conflicts(dsn: str) -> NewSlot:
            made = export_snapshot(dsn)
            replay_a_vacuum(source, both)
            return made

        begin(source)
        with monkeypatch.context() as patch:
            patch.setattr("cdc_assets.pins.elsewhere.copies.export_snapshot", conflicts)
            wait_for(lambda: waits_for(source) == "replica_conflicts")
        assert not source.pins.has_refused(T), "it is tried again"
        wait_for(lambda: reached(source, TableState.COPYING))


def test_copying_from_a_replica_without_feedback_is_no_load_for_the_source(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server, kind="replica") as (source, both):
        source.pins.prepare()
        source.execute("select pg_stat_force_next_flush()")
        before = source.execute(READ)
        wait_for(lambda: reached(source, TableState.COPYING))
        assert source.execute(HELD) == [(0, 0)]
        source.copy()
        assert source.execute(HELD) == [(0, 0)]
        time.sleep(1.5)  # sessions report at most every second
        assert source.execute(READ) == before
        assert both.ask_standby(READ) != before


def test_who_may_not_stop_the_replay_copies_only_what_the_log_evens_out(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with (
        opened(tmp_home, spark_server, kind="replica") as (source, both),
        role(both.primary.start()) as (name, dsn),
    ):
        source.execute(f"grant select on t, a to {name}")
        wait_for(lambda: both.ask_standby(f"select 1 from pg_roles where rolname = '{name}'"))
        password = conninfo_to_dict(dsn)["password"]
        lead_to(source, make_conninfo(both.standby_dsn, user=name, password=password))
        begin(source)
        wait_for(lambda: waits_for(source, A) == "replica_not_paused")
        assert source.row(T).state == TableState.COPYING
        source.pins.close()


@pytest.mark.usefixtures("looked_at_each_tick")
def test_a_replica_that_somebody_else_stopped_stays_so(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    with opened(tmp_home, spark_server, kind="replica") as (source, both):
        both.ask_standby("select pg_wal_replay_pause()")
        wait_for(lambda: both.ask_standby(STATE) == [("paused",)])
        begin(source)
        assert waits_for(source) == "replica_behind"
        assert not source.pins.has_refused(T), "it will get there"
        assert both.ask_standby(STATE) == [("paused",)]
        both.ask_standby("select pg_wal_replay_resume()")
        wait_for(lambda: reached(source, TableState.COPYING))
        assert both.ask_standby(STATE) == [("not paused",)]


DIES = """
import os, signal, sys
from cdc_assets.pins.elsewhere import replay
from cdc_assets.postgres.session.connect import connect
replay.LONGEST_SECONDS = 3
there, aside = connect(sys.argv[1]), connect(sys.argv[1])
with replay.stopped(there, aside) as stands:
    print(stands, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_replica_goes_on_by_itself_though_who_stopped_it_is_killed(tmp_home: Path) -> None:
    """Even if its server looks whether its clients are there."""
    looks = {"client_connection_check_interval": "100ms"}
    with standby_pair(tmp_home, {**STANDBY, **looks}, {}) as both:
        done = subprocess.run(
            [sys.executable, "-c", DIES, both.standby_dsn], capture_output=True, check=False
        )
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"True\n"), done.stderr
        assert both.ask_standby(STATE) == [("paused",)]
        wait_for(lambda: both.ask_standby(STATE) == [("not paused",)], 10)


def test_a_replica_goes_on_though_the_log_is_lost_while_it_is_stopped(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[object]()
    ends = (
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where application_name = 'cdc_assets src log'"
    )
    with opened(tmp_home, spark_server, kind="replica") as (source, both):

        def lost(dsn: str) -> NewSlot:
            seen.extend(both.ask_standby(STATE))
            source.execute(ends)
            return export_snapshot(dsn)

        begin(source)
        monkeypatch.setattr("cdc_assets.pins.elsewhere.copies.export_snapshot", lost)
        with pytest.raises(psycopg.OperationalError, match="closed"):
            wait_for(lambda: reached(source, TableState.COPYING))
        assert seen == [("paused",)]
        assert both.ask_standby(STATE) == [("not paused",)]


@pytest.mark.parametrize("held", [True, False])
def test_a_replica_that_hangs_is_left_alone_after_a_minute(
    held: bool, tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel acknowledges whatever is sent to a server that is stopped."""
    with opened(tmp_home, spark_server, kind="replica", tables=MIRROR) as (source, both):
        begin(source)
        if held:
            wait_for(lambda: reached(source, TableState.COPYING))
        monkeypatch.setattr(connect, "ANSWER_SECONDS", 1.0)
        with both.hanging_standby() as hang, monkeypatch.context() as patches:

            def then_it_hangs(dsn: str) -> NewSlot:
                slot = export_snapshot(dsn)
                hang()
                return slot

            if held:
                hang()
            else:
                patches.setattr("cdc_assets.pins.elsewhere.copies.export_snapshot", then_it_hangs)
            said = "can't be asked: connection timeout" if held else "without an answer for 1 s"
            with pytest.raises((psycopg.OperationalError, EnvironmentProblem), match=said):
                wait_for(lambda: reached(source, TableState.COPIED))
        wait_for(lambda: reached(source, TableState.COPYING))
        assert both.ask_standby(STATE) == [("not paused",)]
        copy_table(source.pipeline, source.session, T)
        assert source.equal(T)


def test_invariant_4_a_history_that_was_begun_at_a_replica_is_copied_anew_at_the_source(
    tmp_home: Path, spark_server: SparkServer
) -> None:
    """Its log has what changed between the two pins: the rest of the rows would be there twice."""
    setup = f"{SETUP} insert into a (v) select repeat('o', 200) from generate_series(1, 20000)"
    table = {"name": "a", "mode": "append", "chunk_pages": 64}
    with opened(tmp_home, spark_server, kind="replica", setup=setup, tables=[table]) as (
        source,
        both,
    ):
        begin(source)
        wait_for(lambda: reached(source, TableState.COPYING))
        first, *_ = chunk_keys(source, A)
        copy_table(source.pipeline, source.session, A, only=[first])
        source.execute("insert into a (v) select 'new' from generate_series(1, 500)")
        both.promote()
        lead_to(source, both.standby_dsn)  # no session has the snapshot any more
        assert waits_for(source, A) == "replica_promoted"
        copy_by(source, source.config.snapshot.model_copy(update={"from_": None}))
        wait_for(lambda: reached(source, TableState.COPYING))
        source.copy()
        source.catch_up()
        assert [found.equal for found in source.verify()] == [True]


def test_invariant_4_a_partition_that_is_truncated_while_a_replica_is_pinned(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has its row from the point on, and not that it was truncated."""
    with opened(tmp_home, spark_server, kind="replica", setup=PARTS, tables=["p"]) as (
        source,
        both,
    ):
        done = list[object]()

        def late(dsn: str) -> NewSlot:
            if not done:
                done.extend(source.execute("update p set v = 'new' where id = 7 returning id"))
                source.execute("truncate p1")
                both.await_replay()
            return export_snapshot(dsn)

        begin(source)
        monkeypatch.setattr("cdc_assets.pins.elsewhere.copies.export_snapshot", late)
        wait_for(lambda: reached(source, TableState.COPYING))
        assert done
        source.copy()
        source.catch_up()
        assert source.equal(source.tables[0])


def test_a_replica_that_was_promoted_is_refused(tmp_home: Path, spark_server: SparkServer) -> None:
    with opened(tmp_home, spark_server, kind="replica") as (source, both):
        begin(source)
        both.promote()
        assert waits_for(source) == "replica_promoted"


def test_a_worker_that_a_conflict_with_recovery_ends_has_lost_its_snapshot(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = {"max_standby_streaming_delay": "0"}
    with opened(tmp_home, spark_server, kind="replica", tables=MIRROR, standby=hasty) as (
        source,
        both,
    ):
        source.pins.prepare()
        wait_for(lambda: reached(source, TableState.COPYING))
        row, copied = source.row(T), worker._copy

        def then_a_conflict(*given: Any) -> Written:
            done = copied(*given)
            replay_a_vacuum(source, both)
            return done

        monkeypatch.setattr(worker, "_copy", then_a_conflict)
        copy = TableCopy(source.pipeline, source.session, row, None, lambda _: None)
        copy.open()
        assert row.pin is not None
        with closing(join_pin(source.pipeline.store, both.standby_dsn, row.pin)) as holder:
            task = copy.task(holder.snapshot_name, "test")
            (found,) = worker.copy_worker([task])([pa.record_batch({"id": [0]})])
        assert found.to_pylist()[0]["outcome"] == "lost", found.to_pylist()
