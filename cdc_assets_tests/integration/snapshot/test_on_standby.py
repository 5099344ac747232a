"""A source that is a hot standby, copied and followed under its primary's traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.log.states import TableState
from cdc_assets.marks.make import mark
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.faults.test_failover import Pair
from cdc_assets_tests.integration.snapshot.elsewhere import (
    SETUP,
    TABLES,
    check_exact,
    reached,
    writing,
)
from cdc_assets_tests.integration.snapshot.sources import T, chunk_keys
from cdc_assets_tests.support.backfills import backfilled, damage
from cdc_assets_tests.support.lake import Lake
from cdc_assets_tests.support.standby import of_standby, published
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark

STATE = "select pg_get_wal_replay_pause_state()"
# A table that Postgres would refuse updates of if they were published.
INSERTS = (
    "create publication cdc_src_inserts for table a"
    " with (publish = 'insert, truncate', publish_via_partition_root = true)"
)
SLOTS = "select slot_name from pg_replication_slots where slot_name <> 'standby'"


@contextmanager
def opened(
    home: Path,
    spark: SparkServer,
    log: str,
    folder: Path,
    tables: Sequence[Any] = TABLES,
    **pair: Any,
) -> Iterator[tuple[Lake, Pair]]:
    with published(home, SETUP, "t, s", **pair) as (both, client):
        client.execute(INSERTS)
        both.await_replay()
        address = {"remote": spark.ensure()}
        config = of_standby(both, log, folder, *tables, spark=address)
        with closing(Lake(config, client)) as source:
            yield source, both


def is_pinned(source: Lake) -> bool:
    source.pins.tick()
    return source.row(T).state == TableState.COPYING


def copied(source: Lake) -> None:
    source.pins.prepare()
    wait_for(lambda: reached(source, TableState.COPYING))
    source.copy()
    source.catch_up()


def test_invariant_4_a_standbys_copies_and_its_stream_are_the_primarys_tables(
    tmp_home: Path, spark_server: SparkServer, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    """Mirror, history, and one that keeps its rows; compared under traffic, copied once more."""
    with opened(tmp_home, spark_server, postgres_dsn(), tmp_path) as (source, both):
        with writing(source, both.primary.start()) as done:
            wait_for(lambda: done[0] > 50)
            source.pins.prepare()
            wait_for(lambda: reached(source, TableState.COPYING))
            source.copy()
            before = done[0]
            wait_for(lambda: done[0] > before + 50)
            source.catch_up()
            found = source.verify()
            assert [(one.equal, one.problem) for one in found] == [(True, None)] * 3
            mark_for_copy(source.pipeline, [T])
            wait_for(lambda: is_pinned(source))
            copy_table(source.pipeline, source.session, T)
        assert both.ask_standby(STATE) == [("not paused",)]
        assert source.execute(SLOTS) == [], "nothing is made at the primary"
        source.catch_up()
        check_exact(source)
        assert [one.equal for one in source.verify()] == [True] * 3


def test_a_standby_that_is_promoted_while_it_is_pinned_is_copied_and_followed_on(
    tmp_home: Path, spark_server: SparkServer, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    """Its snapshot lives on; what is copied later is copied as from any primary."""
    with opened(tmp_home, spark_server, postgres_dsn(), tmp_path, TABLES[:1], version=16) as (
        source,
        both,
    ):
        source.pins.prepare()
        with writing(source, both.primary.start()) as done:
            wait_for(lambda: reached(source, TableState.COPYING))
            copy_table(source.pipeline, source.session, T, only=chunk_keys(source)[:1])
            wait_for(lambda: done[0] > 50)
        both.await_replay()
        both.kill_primary()
        both.promote()
        source.source.close()
        source.source = psycopg.connect(both.standby_dsn, autocommit=True)
        source.execute("delete from t where id >= 100000; delete from s where id >= 100000")
        with writing(source) as done:
            source.copy()
            wait_for(lambda: done[0] > 50)
        source.catch_up()
        assert source.row(T).epoch == 1
        assert source.equal(T)
        mark_for_copy(source.pipeline, [T])
        wait_for(lambda: reached(source, TableState.COPYING))
        source.copy()
        source.execute("update t set v = 'later' where id < 100")
        source.catch_up()
        assert source.equal(T)
        assert [one.equal for one in source.verify()] == [True]


def test_rows_of_a_standby_are_read_again(
    tmp_home: Path, spark_server: SparkServer, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with opened(tmp_home, spark_server, postgres_dsn(), tmp_path, TABLES[:1]) as (source, both):
        copied(source)
        name = source.lake_table(T).sql_name
        damage(source, f"update {name} set v = 'wrong' where id between 9000 and 9009")
        with writing(source, both.primary.start(), most=2000) as done:
            wait_for(lambda: done[0] > 50)
            backfilled(source)
        source.catch_up()
        assert source.equal(T)


def test_rows_of_a_standby_are_repaired_and_marked(
    tmp_home: Path, spark_server: SparkServer, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with opened(tmp_home, spark_server, postgres_dsn(), tmp_path, TABLES[:1]) as (source, _):
        copied(source)
        name = source.lake_table(T).sql_name
        damage(source, f"delete from {name} where id between 9000 and 9009")
        (found,) = source.verify(repair=True)
        assert found.repaired
        assert source.equal(T)
        made = mark(source.pipeline, source.session, "m")
        assert [str(table.state) for table in made.tables] == ["tagged"]


def test_a_column_that_came_is_filled_from_the_standby(
    tmp_home: Path, spark_server: SparkServer, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with opened(tmp_home, spark_server, postgres_dsn(), tmp_path, TABLES[:1]) as (source, _):
        copied(source)
        source.execute("alter table t add w int default 7")
        source.execute("update t set v = 'x' where id < 100")
        source.catch_up()
        assert source.equal(T)
