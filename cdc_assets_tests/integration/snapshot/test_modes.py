"""Modes of the copy: once, never, and first once and then followed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.errors import Fenced, TableProblem
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.standing import pending
from cdc_assets.log.copies.chunks import await_another_pin, restart_copy
from cdc_assets.materializer import drain as draining
from cdc_assets.postgres.slots import slot_status
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.snapshot.sources import LONG_PAIR, T, U, chunk_keys
from cdc_assets_tests.support.lake import NewLake, copied, lake

pytestmark = pytest.mark.spark


def test_snapshot_only_copies_once_and_leaves_nothing_at_the_source(copied_lake: NewLake) -> None:
    with copied_lake(
        LONG_PAIR,
        "t",
        "u",
        snapshot={"mode": "snapshot_only"},
    ) as source:
        assert {row.state for row in source.pipeline.store.tables()} == {"copied"}
        assert source.equal(T)
        assert source.equal(U)
        assert slot_status(source.source, "cdc_src") is None
        assert not source.execute("select pubname from pg_publication")
        assert all(comparison.equal for comparison in source.verify())


def test_never_starts_with_an_empty_table_and_follows(new_lake: NewLake) -> None:
    with new_lake(LONG_PAIR, "t", snapshot={"mode": "never"}) as source:
        source.pin()
        source.execute("insert into t values (9001, 'new')")
        source.execute("update t set v = 'changed' where id = 1")
        source.catch_up()
        assert source.rows(T) == [(1, "changed"), (9001, "new")]


def test_what_never_was_copied_is_not_begun_twice(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the log of before removed, it would be a table that lacks rows, or has them twice."""
    tables = {"name": "t", "mode": "append"}
    with new_lake(LONG_PAIR, tables, snapshot={"mode": "never"}) as source:

        def insert(number: int) -> None:
            source.execute(f"insert into t values ({number}, 'new')")
            source.flush()

        def resync_first(*arguments: Any) -> Any:
            monkeypatch.setattr(draining, "pending", pending)
            row = source.row(T)
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
        row = source.row(T)
        restart_copy(source.pipeline.store, row)
        source.pin()
        insert(9004)
        source.drain(T)
        assert [row[0] for row in source.rows(T)] == [9004]


def test_a_copied_table_that_is_followed_from_now_on_is_copied_anew(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    dsn = postgres_dsn()
    with lake(
        dsn, spark_server.ensure(), LONG_PAIR, "t", "u", snapshot={"mode": "snapshot_only"}
    ) as source:
        source.pin()
        copy_table(source.pipeline, source.session, T)  # u is pinned only
        source.execute("update t set v = 'in no log' where id < 100")
        source.execute("update u set v = 'in no log' where id < 100")
    with copied(dsn, spark_server.ensure(), "select 1", "t", "u") as source:
        source.execute("update t set v = 'in the log' where id < 50")
        source.catch_up()
        assert source.equal(T)
        assert source.equal(U)


def test_a_copy_under_way_that_is_not_followed_any_more_begins_anew(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    """What changed since its first chunk was read is in no log that is applied."""
    dsn = postgres_dsn()
    table = {"name": "t", "chunk_pages": 1}
    with lake(dsn, spark_server.ensure(), LONG_PAIR, table) as source:
        source.pin()
        first, *_ = chunk_keys(source)
        copy_table(source.pipeline, source.session, T, only=[first])
        await_another_pin(source.pipeline.store, source.row(T))
        source.execute("update t set v = 'new'")
    copies_once = {"mode": "snapshot_only"}
    with copied(dsn, spark_server.ensure(), "select 1", table, snapshot=copies_once) as source:
        assert source.equal(T)
