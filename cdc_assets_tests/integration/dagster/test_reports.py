"""What a follower tells Dagster, by a thread of the test's own process: whatever comes between."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import dagster as dg
import pytest

from cdc_assets.dagster import follower
from cdc_assets.dagster.assets import reports
from cdc_assets.dagster.assets.reports import Reports
from cdc_assets.dagster.follower import Reporter
from cdc_assets.dagster.metadata import DATA_VERSION_TAG
from cdc_assets.dagster.names import all_tables
from cdc_assets.lake.catalog import catalog
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.states import TableState
from cdc_assets.materializer.drain import Drained
from cdc_assets.materializer.workers.turns import Turns
from cdc_assets.operations.merging import materialize
from cdc_assets.operations.running import Spark
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets_tests.integration.dagster.world import World, copy_by_command

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def _metadata_file(world: World, table: str) -> Path:
    with Pipeline.open(world.config) as pipeline:
        row = pipeline.store.table(world.names(table).table)
        assert row is not None
        loaded = LakeTable(world.config, world.config.table(row.table), row).loaded()
    return Path(loaded.metadata_location.removeprefix("file://"))


def test_a_table_that_cannot_be_read_silences_no_other_and_is_told_once_it_can(
    following: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = following
    copy_by_command(world)
    monkeypatch.setattr(follower, "REPORT_SECONDS", 1.0)
    names = all_tables(world.config)
    turns = SimpleNamespace(
        offsets={name.table: 0 for name in names}, mine=frozenset(name.table for name in names)
    )
    broken = _metadata_file(world, "big")  # the first one of them
    right = broken.read_bytes()
    broken.write_bytes(right[: len(right) // 2])
    catalog._open.cache_clear()  # which has parsed it
    with Reporter(world.config, lambda: world.instance) as reporter:
        reporter.looked(cast("Turns", turns))
        for name in ("nokey", "Mixed Case.Table"):
            world.until("the others", partial(world.materializations, world.names(name).lake))
        assert not world.materializations(world.names("big").lake)
        broken.write_bytes(right)
        world.until("its report", lambda: world.materializations(world.names("big").lake))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dg.AssetMaterialization]:
    monkeypatch.setattr(reports, "report_seconds", lambda _: 0.0)
    return []


@pytest.fixture
def copied(following: World) -> Iterator[tuple[World, Pipeline]]:
    copy_by_command(following)
    with Pipeline.open(following.config) as pipeline:
        yield following, pipeline


def _reports(world: World, pipeline: Pipeline, told: list[dg.AssetMaterialization]) -> Reports:
    return Reports(world.config, pipeline.store, all_tables(world.config), told.append)


def _versions(told: list[dg.AssetMaterialization]) -> list[str]:
    return [(event.tags or {})[DATA_VERSION_TAG] for event in told]


def _merged(world: World, pipeline: Pipeline) -> Cursor:
    """Change rows and merge them; the cursor then."""
    big = world.names("big").table
    world.client.execute("update big set note = note || '.' where id <= 10")
    world.until("the log", world.pending)
    with Spark(world.config) as spark:
        materialize(pipeline, spark, [big])
    found = pipeline.store.cursor(big)
    assert found is not None
    return found


def test_what_another_worker_merged_on_top_is_told_with_what_this_one_did(
    copied: tuple[World, Pipeline], told: list[dg.AssetMaterialization]
) -> None:
    world, pipeline = copied
    big, made = world.names("big").table, _reports(world, pipeline, told)
    first = _merged(world, pipeline)
    made.add(Drained(big, 1, 10, 10, 10, 0, 0, first, 2000, 1.0))
    second = _merged(world, pipeline)  # by another worker, before this one has told the first
    assert made.of_other(big, second.offset, at_once=True)
    assert _versions(told) == [f"1:{second.offset}"]
    assert told[0].metadata["changes"].value == 10
    third = _merged(world, pipeline)
    assert made.of_other(big, third.offset)
    assert not made.of_other(big, third.offset)
    assert _versions(told) == [f"1:{second.offset}", f"1:{third.offset}"]


def test_what_another_worker_goes_on_with_is_told(
    copied: tuple[World, Pipeline], told: list[dg.AssetMaterialization]
) -> None:
    world, pipeline = copied
    big, made = world.names("big").table, _reports(world, pipeline, told)
    made.introduce(big)
    assert _versions(told) == ["1:0"]
    after = _merged(world, pipeline)  # by the one that has the table now; it is seen only then
    assert made.of_other(big, after.offset)
    assert _versions(told) == ["1:0", f"1:{after.offset}"]


def test_what_was_done_before_a_table_is_copied_anew_is_not_told_of_the_new_copy(
    copied: tuple[World, Pipeline], told: list[dg.AssetMaterialization]
) -> None:
    world, pipeline = copied
    big, made = world.names("big").table, _reports(world, pipeline, told)
    made.add(Drained(big, 1, 10, 10, 0, 0, 0, Cursor(100, Lsn(1)), 2000, 1.0))
    row = pipeline.store.table(big)
    assert row is not None
    assert restart_copy(pipeline.store, row)
    row = pipeline.store.table(big)
    assert row is not None
    assert row.state != TableState.STREAMING
    made.tell_due(at_once=True)
    made.tell_due(at_once=True)
    assert not told
