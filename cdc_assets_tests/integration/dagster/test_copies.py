"""Runs that copy: of a large table, of small ones together, killed, failed, and not needed."""

from __future__ import annotations

from typing import Any

import dagster as dg
import psycopg
import pytest

from cdc_assets.dagster.assets import snapshot
from cdc_assets.dagster.names import (
    RANGE_END_TAG,
    RANGE_START_TAG,
    SEVERAL,
    TABLE_TAG,
    all_tables,
    job_name,
)
from cdc_assets.dagster.sensors import runs
from cdc_assets.errors import TableProblem
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.coordinator import _Coordinator, copy_table, copy_tables
from cdc_assets.snapshot.planned import CopyTask
from cdc_assets_tests.integration.dagster.world import World, copy_by_command

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_what_the_command_line_copied_is_marked_without_a_run(world: World) -> None:
    copy_by_command(world)
    world.until("marks", lambda: world.said("snapshot") == "All 3 pinned tables are copied.")
    world.tick("snapshot")
    for names in all_tables(world.config):
        keys = world.instance.get_dynamic_partitions(names.partitions_name)
        assert keys
        assert world.instance.get_materialized_partitions(names.snapshot) == set(keys)
    assert not world.instance.get_runs()
    before = len(world.materializations(world.names("big").snapshot))
    world.tick("snapshot")
    assert len(world.materializations(world.names("big").snapshot)) == before


def test_who_asks_for_chunks_that_have_landed_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    copy_by_command(world)
    world.until("marks", lambda: world.said("snapshot") == "All 3 pinned tables are copied.")
    names = world.names("big")
    key = world.instance.get_dynamic_partitions(names.partitions_name)[0]
    tags = {RANGE_START_TAG: key, RANGE_END_TAG: key}
    by_hand = dg.RunRequest(
        job_name=job_name("world", "snapshot"),
        asset_selection=[names.snapshot],
        tags=tags,
        run_config={"execution": {"config": {"in_process": {}}}},
    )
    result = world.execute(by_hand)
    assert result.success
    said = [event.message or "" for event in world.instance.all_logs(result.run_id)]
    [told] = [text for text in said if "have landed before" in text]
    assert "1 of the 1 chunks" in told
    assert f"the job resync_{world.config.name}, or cdc-assets resync public.big" in told


def test_a_run_whose_process_is_gone_is_ended_and_the_next_one_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    [request] = world.until("a copy", lambda: world.runs("snapshot"))
    # What is left in Dagster of a run that was killed together with its code server.
    dead = world.created(request, dg.DagsterRunStatus.STARTED)
    assert not world.runs("snapshot")
    assert "a run is at it" in world.said("snapshot")
    monkeypatch.setattr(runs, "PATIENCE_SECONDS", 0.0)
    world.tick("snapshot")
    found = world.instance.get_run_by_id(dead.run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.FAILURE
    monkeypatch.setattr(runs, "FIRST_DELAY_SECONDS", 0.0)
    [request] = world.until("the copy again", lambda: world.runs("snapshot"))
    # A run that works is left alone, however little patience there is.
    seen: list[dg.DagsterRunStatus] = []
    original = copy_table

    def watched(*given: Any, **named: Any) -> Any:
        world.tick("snapshot")
        [run] = world.instance.get_runs(limit=1)
        seen.append(run.status)
        return original(*given, **named)

    monkeypatch.setattr(snapshot, "copy_table", watched)
    assert world.execute(request).success
    assert seen == [dg.DagsterRunStatus.STARTED]


def test_a_small_table_that_fails_holds_up_no_other_and_goes_on_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed, nokey = (world.names(n) for n in ("Mixed Case.Table", "nokey"))
    assert world.execute(world.until("a copy", lambda: world.runs("snapshot"))[0]).success
    original = copy_table

    def faulty(pipeline: Any, session: Any, table: Any, **named: Any) -> Any:
        if table == mixed.table:
            raise TableProblem(table, "it can't be read")
        return original(pipeline, session, table, **named)

    def without(pipeline: Any, session: Any, tables: Any, **named: Any) -> Any:
        others = [table for table in tables if table != mixed.table]
        failed = copy_tables(pipeline, session, others, **named)
        return {**failed, mixed.table: TableProblem(mixed.table, "it can't be read")}

    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "copy_table", faulty)
        patched.setattr(snapshot, "copy_tables", without)
        [request] = world.until("a copy", lambda: world.runs("snapshot"))
        assert request.asset_selection == [mixed.snapshot, nokey.snapshot]
        assert not world.execute(request).success
        assert len(world.materializations(nokey.snapshot)) == 1
        [request] = world.runs("snapshot")  # a run that was ended with its code server failed, too
        assert (request.asset_selection, request.tags[TABLE_TAG]) == ([mixed.snapshot], SEVERAL)
        assert not world.execute(request).success
        assert "it failed and is tried again in" in world.said("snapshot")
        patched.setattr(runs, "FIRST_DELAY_SECONDS", 0.0)
        [request] = world.runs("snapshot")
        assert request.tags[TABLE_TAG] == str(mixed.table)
    assert world.execute(request).success
    assert world.said("snapshot") == "All 3 pinned tables are copied."


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_chunk_whose_key_came_late_is_copied(world: World, by_hand: bool) -> None:
    """Dagster has the keys in the order in which they were added; a sensor's are the plan's."""
    big = world.names("big")
    [request] = world.until("a copy", lambda: world.runs("snapshot"))
    keys = world.instance.get_dynamic_partitions(big.partitions_name)
    assert len(keys) > 2
    world.instance.delete_dynamic_partition(big.partitions_name, keys[0])
    world.instance.add_dynamic_partitions(big.partitions_name, [keys[0]])
    assert world.instance.get_dynamic_partitions(big.partitions_name) == [*keys[1:], keys[0]]
    if by_hand:
        tags = {RANGE_START_TAG: keys[1], RANGE_END_TAG: keys[0]}
        request = request.with_replaced_attrs(tags=tags)
    assert world.execute(request).success
    assert world.instance.get_materialized_partitions(big.snapshot) == set(keys)


def test_a_database_that_is_lost_ends_the_run_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.execute(world.until("a copy", lambda: world.runs("snapshot"))[0]).success
    tried: list[Any] = []

    def lost(_pipeline: Any, _session: Any, tables: Any, **_: Any) -> Any:
        tried.append(tables)
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    [request] = world.until("a copy", lambda: world.runs("snapshot"))
    assert request.tags[TABLE_TAG] == SEVERAL
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "copy_table", lost)
        patched.setattr(snapshot, "copy_tables", lost)
        assert not world.execute(request).success
    assert len(tried) == 1


def test_small_tables_whose_copy_begins_anew_fail_no_run(world: World) -> None:
    small = [world.names(n) for n in ("Mixed Case.Table", "nokey")]
    assert world.execute(world.until("a copy", lambda: world.runs("snapshot"))[0]).success
    [request] = world.until("a copy", lambda: world.runs("snapshot"))
    for names in small:
        world.client.execute(f"vacuum full {names.table}".encode())
    assert world.execute(request).success
    while not all(world.materializations(names.snapshot) for names in small):  # pinned one by one
        [request] = world.until("the copies again", lambda: world.runs("snapshot"))
        assert request.tags[TABLE_TAG] == SEVERAL
        assert world.execute(request).success
    assert [len(world.materializations(names.snapshot)) for names in small] == [1, 1]


@pytest.mark.parametrize("breaks", [False, True])
def test_a_run_copies_its_small_tables_in_one_job_and_each_alone_if_that_breaks(
    world: World, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    small = [world.names(n) for n in ("Mixed Case.Table", "nokey")]
    jobs: list[list[TableId]] = []
    original = _Coordinator._tasks

    def tasks(self: _Coordinator) -> list[CopyTask]:
        found = original(self)
        jobs.append([task.table for task in found])
        if breaks and len(found) > 1:
            raise RuntimeError("the job broke")
        return found

    monkeypatch.setattr(_Coordinator, "_tasks", tasks)
    for _ in range(2):  # the large one, then the small ones
        assert world.execute(world.until("a copy", lambda: world.runs("snapshot"))[0]).success
    together, *alone = [job for job in jobs if job and job[0] != world.names("big").table]
    assert set(together) == {names.table for names in small}
    assert alone == ([[names.table] for names in small] if breaks else [])
    assert [len(world.materializations(names.snapshot)) for names in small] == [1, 1]
