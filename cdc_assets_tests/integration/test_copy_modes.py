"""Modes, tables added later, re-syncs: what a copy does beside a stream that goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import Fenced, SourceMismatch, TableProblem, TablesFailed
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.standing import pending
from cdc_assets.log.copies.chunks import chunks, restart_copy
from cdc_assets.materializer import drain as draining
from cdc_assets.materializer.drain import Drained
from cdc_assets.operations import copying, merging, running
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import slot_status
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.test_embedded_postgres import eventually
from cdc_assets_tests.lake_support import Lake, lake

pytestmark = pytest.mark.spark

T, U = TableId("public", "t"), TableId("public", "u")
SETUP = """
create table t (id int primary key, v text not null);
insert into t select i, 'old ' || i from generate_series(1, 5000) i;
create table u (id int primary key, v text not null);
insert into u select i, 'old ' || i from generate_series(1, 5000) i;
"""


@contextmanager
def streaming(config: SourceConfig) -> Iterator[threading.Thread]:
    """A flusher beside the test, as a process of its own would be."""
    stop = threading.Event()
    flusher = threading.Thread(target=run, args=(config,), kwargs={"stop": stop})
    flusher.start()
    try:
        yield flusher
    finally:
        stop.set()
        flusher.join()


def equal(source: Lake, table: TableId) -> bool:
    return source.rows(table) == sorted(source.execute(f"select * from {table}"), key=repr)


def test_snapshot_only_copies_once_and_leaves_nothing_at_the_source(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    with lake(
        postgres_dsn(), spark_server.ensure(), SETUP, "t", "u", snapshot={"mode": "snapshot_only"}
    ) as source:
        source.pin()
        source.copy()
        assert {row.state for row in source.pipeline.store.tables()} == {"copied"}
        assert equal(source, T)
        assert equal(source, U)
        assert slot_status(source.source, "cdc_src") is None
        assert not source.execute("select pubname from pg_publication")
        assert all(comparison.equal for comparison in source.verify())


def test_never_starts_with_an_empty_table_and_follows(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    with lake(
        postgres_dsn(), spark_server.ensure(), SETUP, "t", snapshot={"mode": "never"}
    ) as source:
        source.pin()
        source.execute("insert into t values (9001, 'new')")
        source.execute("update t set v = 'changed' where id = 1")
        source.flush()
        source.drain_all()
        assert source.rows(T) == [(1, "changed"), (9001, "new")]


def test_what_never_was_copied_is_not_begun_twice(
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the log of before removed, it would be a table that lacks rows, or has them twice."""
    tables = {"name": "t", "mode": "append"}
    with lake(
        postgres_dsn(), spark_server.ensure(), SETUP, tables, snapshot={"mode": "never"}
    ) as source:

        def insert(number: int) -> None:
            source.execute(f"insert into t values ({number}, 'new')")
            source.flush()

        def resync_first(*arguments: Any) -> Any:
            monkeypatch.setattr(draining, "pending", pending)
            row = source.pipeline.store.table(T)
            assert row is not None
            restart_copy(source.pipeline.store, row)
            source.pin()
            insert(9002)
            return pending(*arguments)

        source.pin()
        insert(9001)
        source.drain(T)
        monkeypatch.setattr(draining, "pending", resync_first)
        with suppress(Fenced):
            source.drain(T)
        source.drain(T)
        assert [row[0] for row in source.rows(T)] == [9001, 9002]

        source.execute("delete from _pg2iceberg.log_index")  # as maintenance does, a day later
        open_catalog(source.config).drop_table(("src", "t"))
        insert(9003)
        with pytest.raises(TableProblem, match="is gone from the catalog"):
            source.drain(T)
        row = source.pipeline.store.table(T)
        assert row is not None
        restart_copy(source.pipeline.store, row)
        source.pin()
        insert(9004)
        source.drain(T)
        assert [row[0] for row in source.rows(T)] == [9004]


def test_a_command_does_not_wait_for_a_copy_that_nobody_makes(
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[Drained | None]()

    def resync_first(pipeline: Pipeline, *arguments: Any, **options: Any) -> Drained | None:
        if not calls:
            row = pipeline.store.table(T)
            assert row is not None
            restart_copy(pipeline.store, row)
        assert len(calls) < 3, "it waits"
        calls.append(draining.drain(pipeline, *arguments, **options))
        return calls[-1]

    with lake(postgres_dsn(), spark_server.ensure(), SETUP, "t") as source:
        source.pin()
        source.copy()
        source.execute("delete from t where id > 4000")
        source.flush()
        monkeypatch.setattr(merging, "drain", resync_first)
        with running.Spark(source.config) as spark, pytest.raises(TablesFailed, match="anew"):
            merging.materialize(source.pipeline, spark, [T])


def test_a_resync_shows_the_old_rows_until_the_new_copy_is_complete(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    with lake(postgres_dsn(), spark_server.ensure(), SETUP, "t", "u") as source:
        source.pin()
        source.copy()
        with streaming(source.config):
            source.execute("update t set v = 'streamed' where id <= 10")
            source.execute("alter table t add column extra int")
            source.execute("update t set extra = id where id <= 2500")
            row = source.pipeline.store.table(T)
            assert row is not None
            restart_copy(source.pipeline.store, row)
            before = source.rows(T)
            source.execute("insert into u values (9001, 'goes on')")

            def pinned() -> bool:
                found = source.pipeline.store.table(T)
                return found is not None and found.state == "copying"

            assert eventually(pinned), "the flusher pins what waits"
            source.execute("delete from t where id between 4000 and 4100")
            assert source.rows(T) == before
            copy_table(source.pipeline, source.session, T)
            assert len(source.rows(T)[0]) == 3
        assert source.lake_table(T).load() is not None
        state = source.lake_table(T).state()
        assert state.copy is not None
        assert state.copy.startswith("public.t@2:")
        source.flush()
        source.drain_all()
        assert equal(source, T)
        assert equal(source, U)
        names = {
            str(row[0])
            for row in source.execute("select table_name from _pg2iceberg.iceberg_tables")
        }
        assert names == {"t", "u"}, "nothing is left of the copy"


def test_a_table_added_while_others_stream_loses_no_change(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    with lake(postgres_dsn(), spark_server.ensure(), SETUP, "t", "u") as source:
        only_t = source.config.model_copy(update={"tables": source.config.tables[:1]})
        stop = threading.Event()

        def write() -> None:
            import psycopg

            number = 10_000
            with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as connection:
                while not stop.is_set():
                    connection.execute("insert into u values (%s, 'live')", (number,))
                    connection.execute("update t set v = v || '.' where id = %s", (number % 5000,))
                    number += 1

        with streaming(only_t):
            # Whoever makes the slot has it, too, for a moment.
            streams = (
                "select pid from pg_stat_replication where state <> 'startup' and pid ="
                " (select active_pid from pg_replication_slots where slot_name = 'cdc_src')"
            )
            assert eventually(lambda: bool(source.execute(streams)))
            streamer = slot_status(source.source, "cdc_src")
            writer = threading.Thread(target=write)
            writer.start()
            try:
                # Another process, whose configuration has u too.
                source.pins.prepare()

                def pinned() -> bool:
                    source.pins.tick()
                    found = source.pipeline.store.table(U)
                    return found is not None and found.state == "copying"

                assert eventually(pinned)
                source.copy()
            finally:
                stop.set()
                writer.join()
            same = slot_status(source.source, "cdc_src")
            assert same is not None
            assert streamer is not None
            assert same.active_pid == streamer.active_pid, "the stream went on"
        source.flush()
        source.drain_all()
        assert equal(source, U)
        assert equal(source, T)


def test_a_table_that_is_truncated_while_it_is_copied_is_left_to_the_log(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    with lake(
        postgres_dsn(), spark_server.ensure(), SETUP, {"name": "t", "chunk_pages": 4}, "u"
    ) as source:
        source.pin()
        keys = [chunk.key for chunk in chunks(source.pipeline.store, T, 1)]
        copy_table(source.pipeline, source.session, T, only=keys[:3])
        with streaming(source.config):
            source.execute("truncate t")
            source.execute("insert into t select i, 'after' from generate_series(1, 300) i")
            assert eventually(lambda: source.pipeline.store.is_locked("flusher:src"))
            copy_table(source.pipeline, source.session, T)
        row = source.pipeline.store.table(T)
        assert row is not None
        assert (row.state, row.epoch) == ("streaming", 1)
        assert row.complete_lsn is not None
        assert row.snapshot_lsn is not None
        assert row.complete_lsn > row.snapshot_lsn
        source.flush()
        source.drain(T)
        assert len(source.rows(T)) == 300
        assert equal(source, T)


def test_a_copy_into_partitions_is_clustered_and_appears_at_once(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = """
    create table t (id int primary key, day date not null, v text);
    insert into t select i, date '2024-01-01' + i % 10, 'v' || i from generate_series(1, 20000) i;
    """
    with lake(
        postgres_dsn(),
        spark_server.ensure(),
        setup,
        {"name": "t", "chunk_pages": 4, "partition_by": ["day(day)"]},
    ) as source:
        source.pin()
        source.copy()
        loaded = source.lake_table(T).load()
        assert loaded is not None
        assert loaded.metadata.format_version == 3
        files = loaded.scan().plan_files()
        assert len(list(files)) == 10, "one file a day, not one a chunk and day"
        source.execute("update t set day = date '2024-02-01' where id = 1")
        source.execute("delete from t where id = 2")
        source.flush()
        source.drain_all()
        assert equal(source, T)


def test_partitions_of_the_source_are_one_table_in_the_lake(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = """
    create table t (id int, region text, v text, primary key (id, region))
      partition by list (region);
    create table t_north partition of t for values in ('n');
    create table t_south (v text, region text not null, id int not null);
    alter table t attach partition t_south for values in ('s');
    create table t_other partition of t default partition by range (id);
    create table t_other_low partition of t_other for values from (0) to (1000);
    create table t_other_high partition of t_other for values from (1000) to (100000);
    create table t_empty partition of t for values in ('e');
    insert into t select i, (array['n', 's', 'x'])[1 + i % 3], 'v' || i
      from generate_series(1, 9000) i;
    """
    with lake(
        postgres_dsn(), spark_server.ensure(), setup, {"name": "t", "chunk_pages": 4}
    ) as source:
        source.pin()
        source.execute("update t set v = 'moved', region = 's' where id <= 300 and region = 'n'")
        source.copy()
        source.execute("create table t_west partition of t for values in ('w')")
        source.execute("insert into t values (20001, 'w', 'new partition')")
        source.flush()
        source.drain_all()
        assert equal(source, T)
        assert source.verify()[0].equal


def test_inheritance_children_are_not_copied_with_their_parent(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = """
    create table t (id int primary key, v text); create table child () inherits (t);
    insert into t values (1, 'parent'); insert into child values (2, 'child');
    """
    table = {"name": "t", "only": True}
    with lake(postgres_dsn(), spark_server.ensure(), setup, table) as source:
        source.pin()
        source.copy()
        assert source.rows(T) == [(1, "parent")]


def test_a_lake_table_of_somebody_else_is_left_alone(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    with lake(postgres_dsn(), spark_server.ensure(), SETUP, "t") as source:
        open_catalog(source.config).create_namespace("src")
        source.session.sql("create table lake.src.t (mine int) using iceberg")
        source.session.sql("insert into lake.src.t values (1)")
        source.pin()
        with pytest.raises(TableProblem, match="wasn't made from it"):
            source.copy()
        assert source.rows(T) == [(1,)]


def test_a_table_that_takes_anothers_place_in_the_lake_is_refused(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = SETUP + "create schema other; create table other.t (id int primary key, v text);"
    dsn = postgres_dsn()
    with lake(dsn, spark_server.ensure(), setup, "t") as source:
        source.pin()
        source.copy()
    with lake(dsn, spark_server.ensure(), "select 1", "other.t") as source:
        source.pin()
        with pytest.raises(TableProblem, match="wasn't made from it"):
            source.copy()


def test_a_copied_table_that_is_followed_from_now_on_is_copied_anew(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    dsn = postgres_dsn()
    with lake(
        dsn, spark_server.ensure(), SETUP, "t", "u", snapshot={"mode": "snapshot_only"}
    ) as source:
        source.pin()
        copy_table(source.pipeline, source.session, T)  # u is pinned only
        source.execute("update t set v = 'in no log' where id < 100")
        source.execute("update u set v = 'in no log' where id < 100")
    with lake(dsn, spark_server.ensure(), "select 1", "t", "u") as source:
        source.pin()
        source.copy()
        source.execute("update t set v = 'in the log' where id < 50")
        source.flush()
        source.drain_all()
        assert equal(source, T)
        assert equal(source, U)


def test_a_partitioned_table_without_partitions_is_an_empty_table(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    setup = "create table t (id int primary key) partition by range (id);"
    with lake(postgres_dsn(), spark_server.ensure(), setup, "t") as source:
        source.pin()
        source.copy()
        source.execute("create table t_low partition of t for values from (0) to (100)")
        source.execute("insert into t values (1)")
        source.flush()
        source.drain_all()
        assert source.rows(T) == [(1,)]


def test_before_version_14_a_table_is_one_chunk(
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    tmp_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cdc_assets.pins.pins.TID_RANGE_SCANS", 10**9)
    with lake(
        postgres_dsn(), spark_server.ensure(), SETUP, {"name": "t", "chunk_pages": 1}
    ) as source:
        source.pin()
        assert len(source.execute("select chunk from _pg2iceberg.snapshot_progress")) == 1
        source.copy()
        assert equal(source, T)


def test_a_lost_slot_is_healed_by_resync_all(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    with lake(postgres_dsn(), spark_server.ensure(), SETUP, "t", "u") as source:
        source.pin()
        source.copy()
        source.execute("update t set v = 'in the old log' where id > 4900")
        source.flush()
        source.execute("select pg_drop_replication_slot('cdc_src')")
        source.execute("update t set v = 'in no log' where id < 100")
        source.pins.close()
        with pytest.raises(SourceMismatch, match="slot_gone"):
            source.flush()
        with running.Spark(source.config) as spark:
            copying.resync(source.pipeline, spark, source.tables, lambda _: None)
        source.execute("update u set v = 'in the new log' where id < 100")
        source.flush()
        source.drain_all()
        assert equal(source, T)
        assert equal(source, U)
