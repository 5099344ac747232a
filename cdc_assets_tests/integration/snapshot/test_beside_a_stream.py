"""Tables added later, re-syncs and truncates: what a copy does beside a stream that goes on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cdc_assets.errors import SourceMismatch, TablesFailed
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.materializer import drain as draining
from cdc_assets.materializer.drain import Drained
from cdc_assets.operations import copying, merging, running
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import slot_status
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.integration.snapshot.sources import LONG_PAIR, T, U, chunk_keys
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


def test_a_command_does_not_wait_for_a_copy_that_nobody_makes(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
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

    with copied_lake(LONG_PAIR, "t") as source:
        source.execute("delete from t where id > 4000")
        source.flush()
        monkeypatch.setattr(merging, "drain", resync_first)
        with running.Spark(source.config) as spark, pytest.raises(TablesFailed, match="anew"):
            merging.materialize(source.pipeline, spark, [T])


def test_a_resync_shows_the_old_rows_until_the_new_copy_is_complete(copied_lake: NewLake) -> None:
    with copied_lake(LONG_PAIR, "t", "u") as source:
        with flushing(source.config):
            source.execute("update t set v = 'streamed' where id <= 10")
            source.execute("alter table t add column extra int")
            source.execute("update t set extra = id where id <= 2500")
            row = source.row(T)
            restart_copy(source.pipeline.store, row)
            before = source.rows(T)
            source.execute("insert into u values (9001, 'goes on')")

            def pinned() -> bool:
                found = source.pipeline.store.table(T)
                return found is not None and found.state == "copying"

            wait_for(pinned)
            source.execute("delete from t where id between 4000 and 4100")
            assert source.rows(T) == before
            copy_table(source.pipeline, source.session, T)
            assert len(source.rows(T)[0]) == 3
        assert source.lake_table(T).load() is not None
        state = source.lake_table(T).state()
        assert state.copy is not None
        assert state.copy.startswith("public.t@2:")
        source.catch_up()
        assert source.equal(T)
        assert source.equal(U)
        names = {
            str(row[0])
            for row in source.execute("select table_name from _pg2iceberg.iceberg_tables")
        }
        assert names == {"t", "u"}, "nothing is left of the copy"


def test_a_table_added_while_others_stream_loses_no_change(new_lake: NewLake) -> None:
    with new_lake(LONG_PAIR, "t", "u") as source:
        only_t = source.config.model_copy(update={"tables": source.config.tables[:1]})

        def write(stop: threading.Event) -> None:
            import psycopg

            number = 10_000
            with psycopg.connect(source.pipeline.source_dsn, autocommit=True) as connection:
                while not stop.is_set():
                    connection.execute("insert into u values (%s, 'live')", (number,))
                    connection.execute("update t set v = v || '.' where id = %s", (number % 5000,))
                    number += 1

        with flushing(only_t):
            # Whoever makes the slot has it, too, for a moment.
            streams = (
                "select pid from pg_stat_replication where state <> 'startup' and pid ="
                " (select active_pid from pg_replication_slots where slot_name = 'cdc_src')"
            )
            wait_for(lambda: bool(source.execute(streams)))
            streamer = slot_status(source.source, "cdc_src")
            with beside(write):
                # Another process, whose configuration has u too.
                source.pins.prepare()

                def pinned() -> bool:
                    source.pins.tick()
                    return source.row(U).state == "copying"

                wait_for(pinned)
                source.copy()
            same = slot_status(source.source, "cdc_src")
            assert same is not None
            assert streamer is not None
            assert same.active_pid == streamer.active_pid, "the stream went on"
        source.catch_up()
        assert source.equal(U)
        assert source.equal(T)


def test_a_table_that_is_truncated_while_it_is_copied_is_left_to_the_log(new_lake: NewLake) -> None:
    with new_lake(LONG_PAIR, {"name": "t", "chunk_pages": 4}, "u") as source:
        source.pin()
        keys = chunk_keys(source)
        copy_table(source.pipeline, source.session, T, only=keys[:3])
        with flushing(source.config):
            source.execute("truncate t")
            source.execute("insert into t select i, 'after' from generate_series(1, 300) i")
            wait_for(source.pipeline.store.has_flusher)
            copy_table(source.pipeline, source.session, T)
        row = source.row(T)
        assert (row.state, row.epoch) == ("streaming", 1)
        assert row.complete_lsn is not None
        assert row.snapshot_lsn is not None
        assert row.complete_lsn > row.snapshot_lsn
        source.flush()
        source.drain(T)
        assert len(source.rows(T)) == 300
        assert source.equal(T)


def test_a_lost_slot_is_healed_by_resync_all(copied_lake: NewLake) -> None:
    with copied_lake(LONG_PAIR, "t", "u") as source:
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
        source.catch_up()
        assert source.equal(T)
        assert source.equal(U)
