"""A primary dies in the midst of an incremental copy, and its standby is promoted."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.states import TableState
from cdc_assets_tests.faults.test_failover import Pair, standby_pair
from cdc_assets_tests.integration.snapshot.sources import T
from cdc_assets_tests.support.incremental import INCREMENTAL, TOAST, between_parts, copy_here
from cdc_assets_tests.support.lake import Lake, lake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


def _synced(source: Lake, both: Pair) -> None:
    """Until the standby has the slot for good."""

    def look() -> list[tuple[object, ...]]:
        source.execute("select pg_log_standby_snapshot()")
        source.flush()
        return both.ask_standby("select 1 from pg_replication_slots where synced and not temporary")

    wait_for(look, 120)


def test_invariant_5_a_copy_in_parts_goes_on_at_the_promoted_standby(
    tmp_home: Path, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The log inside the source has to be on the standby as soon as it is committed.
    settings = {"synchronized_standby_slots": "standby", "synchronous_standby_names": "*"}
    with (
        standby_pair(tmp_home, {}, settings) as both,
        lake(
            both.dsn,
            spark_server.ensure(),
            TOAST,
            {"name": "t", "chunk_pages": 64},
            snapshot=INCREMENTAL,
        ) as source,
    ):
        source.pin()

        def pinned() -> bool:
            source.pins.tick()
            return source.row(T).state == TableState.COPYING

        wait_for(pinned)
        _synced(source, both)

        def change(part: int) -> None:
            with psycopg.connect(both.dsn, autocommit=True) as session:
                session.execute(f"update t set v = v || ' {part}' where id % 50 = {part}".encode())
            if part == 6:
                both.kill_primary()

        with (
            between_parts(monkeypatch, change),
            pytest.raises((AssertionError, psycopg.OperationalError)),
        ):
            copy_here(source)
        both.standby_dsn = both.standby.start()
        both.promote()
        both.ask_standby("alter system reset synchronous_standby_names")
        both.ask_standby("select pg_reload_conf()")
        with psycopg.connect(both.dsn, autocommit=True) as session:
            session.execute("update t set v = v || ' after' where id % 3 = 0")
            there = Lake(source.config, session)
            try:
                there.flush()
                there.copy()
                assert not there.equal(T), "the test needs rows that the copy has otherwise"
                there.catch_up()
                there.catch_up()
                assert there.row(T).epoch == 1, "it went on"
                assert there.equal(T)
            finally:
                there.close()
