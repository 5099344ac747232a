"""``materializer: follow`` with a real child: it merges and reports, and the sensor keeps it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import dagster as dg
import psycopg
import pytest
from dagster._core.errors import SensorExecutionError

from cdc_assets.dagster import follower
from cdc_assets.dagster.metadata import DATA_VERSION_TAG
from cdc_assets.dagster.names import all_tables, run_tags
from cdc_assets.dagster.sensors import materializer, runs
from cdc_assets.errors import FollowerProblem
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.sessions import workers
from cdc_assets.materializer.drain import Drained
from cdc_assets.materializer.schema import ahead
from cdc_assets.materializer.workers.follower import Listener
from cdc_assets.materializer.workers.turns import Turn, Turns
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import facts
from cdc_assets.operations.merging import follow, materialize
from cdc_assets.operations.running import Spark
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.process import children
from cdc_assets_tests.integration.dagster.world import World, copy_by_command

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def _changes(world: World, table: str) -> int:
    """Changes of the table that Dagster was told of."""
    found = 0
    for event in world.materializations(world.names(table).lake):
        changes = event.metadata["changes"].value
        assert isinstance(changes, int)
        found += changes
    return found


def _problems(world: World) -> list[str]:
    with Pipeline.open(world.config) as pipeline:
        found = conditions(facts(pipeline), world.config)
    return [wrong.detail for wrong in found if wrong.key == "merge:public.big"]


def test_a_follower_applies_the_log_and_reports_it_without_a_run(following: World) -> None:
    world = following
    assert "No table is copied yet" in world.said("materializer")
    copy_by_command(world)
    said = world.said("materializer")
    assert "The follower (pid" in said
    assert "isn't at work" in said  # it is starting
    keys = [names.lake for names in all_tables(world.config)]
    # Each is introduced, whether it has changes or not.
    world.until("the first reports", lambda: all(world.materializations(key) for key in keys))
    world.client.execute("update big set note = 'new' where id <= 100")
    world.client.execute("insert into nokey values ('another')")
    world.until(
        "the reports", lambda: (_changes(world, "big"), _changes(world, "nokey")) == (100, 1)
    )
    [newest, *_] = world.materializations(world.names("big").lake)
    assert newest.metadata["dagster/row_count"].value == 2000
    assert not world.pending()
    assert not world.runs("materializer")
    assert not world.instance.get_runs()


def test_a_follower_applies_a_schema_change_that_no_row_follows(following: World) -> None:
    world = following
    _at_work(world)
    big = world.names("big")
    world.client.execute("update big set note = 'new' where id = 1")
    world.until("the log's end", lambda: not world.pending())
    reported = len(world.materializations(big.lake))
    world.client.execute("alter table big add column extra int")

    def extra() -> bool:
        with Pipeline.open(world.config) as pipeline:
            row = pipeline.store.table(big.table)
        assert row is not None
        lake = LakeTable(world.config, world.config.table(big.table), row)
        return "extra" in lake.loaded().schema().column_names

    world.until("the new column", extra)
    world.until("its report", lambda: len(world.materializations(big.lake)) > reported)


def test_a_follower_that_ends_is_an_error_of_the_sensor_and_is_started_again(
    following: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = following
    copy_by_command(world)
    world.said("materializer")
    first = children.child_of(f"follower:{world.config.name}")
    assert first is not None
    world.until("its work", lambda: world.materializations(world.names("nokey").lake))
    os.kill(first.pid, signal.SIGKILL)
    first.wait(30.0)
    # Also if there are tables that are level, and due: they are reported all the same.
    key = world.names("nokey").lake
    reports = len(world.materializations(key))
    with monkeypatch.context() as level:
        level.setattr(materializer, "heartbeat_seconds", lambda _: 0.0)
        level.setattr(materializer, "_is_proven", lambda *_: True)
        with pytest.raises((SensorExecutionError, FollowerProblem)) as raised:
            world.tick("materializer")
    assert len(world.materializations(key)) == reports + 1
    said = str(raised.value.__cause__ or raised.value)
    assert "the follower of world ended with code -9" in said
    assert "It runs again (pid" in said

    def runs_again() -> bool:
        try:
            return "The follower (pid" in world.said("materializer")
        except (SensorExecutionError, FollowerProblem):
            return False

    world.until("the next one", runs_again)
    before = _changes(world, "big")
    world.client.execute("update big set note = 'after' where id <= 10")
    world.until("what it does", lambda: _changes(world, "big") == before + 10)


def test_a_follower_that_hangs_is_ended_and_started_again(
    following: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = following
    _at_work(world)
    name = f"follower:{world.config.name}"
    first = children.child_of(name)
    assert first is not None
    monkeypatch.setattr(workers, "STALE_SECONDS", 5.0)
    monkeypatch.setattr(follower, "HUNG_SECONDS", 5.0)
    assert "is at work" in world.said("materializer")
    os.kill(first.pid, signal.SIGSTOP)

    def said() -> str:
        try:
            world.said("materializer")
        except (SensorExecutionError, FollowerProblem) as error:
            return str(error.__cause__ or error)
        return ""

    assert f"(pid {first.pid}) hung: it wasn't heard of for" in world.until("its end", said)
    assert not first.alive

    def another() -> bool:
        with suppress(SensorExecutionError, FollowerProblem):
            world.tick("materializer")
        second = children.child_of(name)
        return second is not None and second.pid != first.pid

    world.until("the next one", another)


def test_why_a_table_cannot_go_on_is_told_until_it_can_and_the_others_go_on(
    following: World,
) -> None:
    world = following
    copy_by_command(world)
    world.client.execute("update big set note = 'spoilt'")
    world.until("the log", lambda: world.pending() == 2000)
    row = world.client.execute("select path from _pg2iceberg.log_index order by 1").fetchone()
    assert row is not None
    staged = Path(row[0].removeprefix("file://"))
    right = staged.read_bytes()
    staged.write_bytes(right[:-20] + bytes(20))
    world.said("materializer")
    [problem] = world.until("the problem", lambda: _problems(world))
    assert problem.startswith("public.big: ")
    assert "isn't what the flusher wrote" in problem
    assert problem in world.said("materializer")
    world.client.execute("insert into nokey values ('flows')")
    world.until("another table", lambda: _changes(world, "nokey") == 1)
    staged.write_bytes(right)
    # By hand, as the alert says; the follower has nothing to do then.
    with Pipeline.open(world.config) as pipeline, Spark(world.config) as spark:
        materialize(pipeline, spark, [world.names("big").table])
    assert not _problems(world)
    assert problem not in world.said("materializer")
    kept = world.client.execute("select problem from _pg2iceberg.claims").fetchall()
    assert kept == [(None,)] * 3  # or it would be told again with the next change


def _at_work(world: World) -> dg.AssetKey:
    """Copy the tables and have the follower begin; a table that it has reported."""
    copy_by_command(world)
    world.said("materializer")
    key = world.names("big").lake
    world.until("its work", lambda: world.materializations(key))
    return key


def test_a_run_of_before_whose_process_is_gone_is_ended(
    following: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take a place among the runs for ever."""
    world = following
    copy_by_command(world)
    job, tags = f"materialize_{world.config.name}_tables", run_tags(world.config, "materialize")
    dead = world.created(dg.RunRequest(job_name=job, tags=dict(tags)), dg.DagsterRunStatus.STARTED)
    monkeypatch.setattr(runs, "PATIENCE_SECONDS", 0.0)
    world.tick("materializer")
    found = world.instance.get_run_by_id(dead.run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.FAILURE


def test_each_table_stays_materializable_by_hand(following: World) -> None:
    world = following
    key = _at_work(world)
    world.client.execute("update big set note = 'by hand' where id = 1")
    job = world.defs.resolve_job_def(f"materialize_{world.config.name}_tables")
    asked = job.execute_in_process(instance=world.instance, asset_selection=[key])
    assert asked.success
    assert isinstance(asked.asset_materializations_for_node("materialize_world"), list)
    assert not world.pending()


def test_dagster_down_stops_no_merge(following: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What couldn't be told is told later, and is no less for it."""
    world = following
    copy_by_command(world)
    table = world.names("big").table
    turns = cast(Turns, SimpleNamespace(offsets={table: 0}, mine=frozenset({table})))
    told, tries, is_down = list[dg.AssetMaterialization](), 0, True

    def report(event: dg.AssetMaterialization) -> None:
        nonlocal tries
        tries += 1
        if is_down:
            raise OSError("no space left on device")
        told.append(event)

    monkeypatch.setattr(world.instance, "report_runless_asset_event", report)
    drained = Drained(table, 1, 100, 100, 0, 0, 0, Cursor(100, Lsn(1)), 2000, 1.0)
    with follower.Reporter(world.config, lambda: world.instance) as reporter:
        reporter.looked(turns)
        reporter.over(Turn(table, drained, None))
        world.until("tries", lambda: tries >= 2)
        assert not told
        is_down = False
        world.until("the report", lambda: told)
    assert told[0].asset_key == world.names("big").lake
    assert told[0].metadata["changes"].value == 100


def test_what_one_follower_merged_and_did_not_tell_is_told_by_the_next(following: World) -> None:
    world = following
    _at_work(world)
    child = children.child_of(f"follower:{world.config.name}")
    assert child is not None
    world.client.execute("update big set note = 'untold' where id <= 10")
    world.until("the log", lambda: world.pending() >= 10)
    world.until("the merge", lambda: not world.pending())
    os.kill(child.pid, signal.SIGKILL)
    child.wait(30.0)
    version = f"1:{_applied(world, 'big')}"
    assert version not in _told(world, "big")

    def is_told() -> bool:
        with suppress(SensorExecutionError, FollowerProblem):
            world.tick("materializer")
        return version in _told(world, "big")

    world.until("the report", is_told)


def _applied(world: World, table: str) -> int:
    with Pipeline.open(world.config) as pipeline:
        cursor = pipeline.store.cursor(world.names(table).table)
    assert cursor is not None
    return cursor.offset


def _told(world: World, table: str) -> set[str]:
    """The versions that a follower told; a heartbeat of the sensor says its version, too."""
    return {
        (event.tags or {})[DATA_VERSION_TAG]
        for event in world.materializations(world.names(table).lake)
        if "heartbeat" not in event.metadata
    }


def test_a_source_that_is_down_stops_no_merge(
    following: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its schema can't be looked at; what the log has can be applied all the same."""
    world = following
    copy_by_command(world)
    world.client.execute("update big set note = 'down'")
    world.until("the log", lambda: world.pending() == 2000)

    def down(*_: object) -> frozenset[TableId]:
        raise psycopg.OperationalError("the database system is shutting down")

    monkeypatch.setattr(ahead, "altered", down)
    stop = threading.Event()
    thread = threading.Thread(
        target=follow,
        args=(world.config, [names.table for names in all_tables(world.config)], stop),
        kwargs={
            "listener": Listener(lambda _: None),
            "sessions": lambda: follower._session(world.config),
        },
    )
    thread.start()
    try:
        world.until("the merge", lambda: not world.pending())
    finally:
        stop.set()
        thread.join(60.0)
