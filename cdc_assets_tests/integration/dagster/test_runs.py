"""Real sensors and real runs on an ephemeral Dagster instance, a real Postgres and a real Spark."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import dagster as dg
import pytest
from dagster._core.events import DagsterEvent, DagsterEventType

from cdc_assets.dagster.assets import lake, reports
from cdc_assets.dagster.names import FAILED_TAG, TableAssets, all_tables, run_lock
from cdc_assets.dagster.sensors import materializer, runs
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.session import open_session
from cdc_assets.log.locks import write_lock
from cdc_assets.log.sessions.workers import workers
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.integration.dagster.world import World, copy_by_command, materialized

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def test_from_the_first_tick_to_level_tables(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    big, mixed, nokey = (world.names(n) for n in ("big", "Mixed Case.Table", "nokey"))

    # Whether the source is ready is looked at before anything is copied.
    [first] = world.until("the flusher's look", lambda: world.runs("checks"))
    looked = world.execute(first).get_asset_check_evaluations()
    assert {e.check_name for e in looked} == {"ready"}
    assert len(looked) == 3
    assert all("wal_unbounded" in str(e.metadata["findings"].value) for e in looked)
    assert not any(e.severity == dg.AssetCheckSeverity.ERROR for e in looked)

    # One run at a time copies (max_parallel_tables): a large table over its range of partitions,
    # small ones together.
    copied = []
    for _ in range(2):
        [request] = world.until("a copy", lambda: world.runs("snapshot"))
        copied.append([key.path[-1] for key in request.asset_selection])
        assert world.execute(request).success
    assert copied == [["big"], ["Mixed_Case_Table", "nokey"]]
    for names in (mixed, nokey):
        [event] = world.materializations(names.snapshot)
        [chunk] = world.instance.get_dynamic_partitions(names.partitions_name)
        assert event.partition == chunk
    assert world.said("snapshot") == "All 3 pinned tables are copied."
    with monkeypatch.context() as patched:  # Dagster isn't asked of each at every tick
        patched.setattr(world.instance, "get_materialized_partitions", asked := Mock())
        assert world.said("snapshot") == "All 3 pinned tables are copied."
        assert not asked.called

    chunks = world.instance.get_dynamic_partitions("ctid/world.public.big")
    assert len(chunks) > 2
    events = world.materializations(big.snapshot)
    assert sorted(e.partition or "" for e in events) == sorted(chunks)  # each once, none twice
    assert sum(int(str(e.metadata["rows"].value)) for e in events) == 2000
    assert all({"bytes", "seconds"} <= set(e.metadata) for e in events)

    # Freshly copied tables are reported by a run, in full.
    [request] = world.until("a merge", lambda: world.runs("materializer"))
    assert set(request.asset_selection or ()) == {big.lake, mixed.lake, nokey.lake}
    world.client.execute(
        "update public.big set note = 'new' where id <= 10;"
        " delete from public.big where id > 1990;"
        " insert into public.\"Mixed Case.Table\" values (2, 'two')"
    )
    world.until("the changes in the log", lambda: world.pending() >= 21)
    assert world.execute(request).success
    world.tick("materializer")  # what a tick calls level was so up to 20 s ago
    world.until("level tables", lambda: materialized(world))
    latest = world.materializations(big.lake)[0]
    assert latest.metadata["dagster/row_count"].value == 1990
    schema = latest.metadata["dagster/column_schema"].value
    assert isinstance(schema, dg.TableSchema)
    assert [(c.name, c.type) for c in schema.columns] == [("id", "int"), ("note", "string")]
    lineage = world.materializations(mixed.lake)[0].metadata["dagster/column_lineage"].value
    assert isinstance(lineage, dg.TableColumnLineage)
    assert lineage.deps_by_column["B c"] == [dg.TableColumnDep(mixed.source, "B c")]
    changes = sum(int(str(e.metadata["changes"].value)) for e in world.materializations(big.lake))
    assert changes == 20

    # The checks: of keys over Spark, of lag from the log.
    [check] = world.runs("checks")
    result = world.execute(check)
    assert result.success
    evaluations = {
        (e.asset_key.path[-1], e.check_name): e
        for e in result.get_asset_check_evaluations()
        if e.check_name != "ready"
    }
    assert len(evaluations) == 9
    assert all(e.passed for e in evaluations.values()), evaluations
    assert "no key" in str(evaluations["nokey", "primary_key_unique"].description)
    told = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    stored = world.instance.all_logs(result.run_id, of_type=told)
    assert len(stored) >= 9
    for entry in stored:  # two of them fit on a page of SQLite, with what is stored beside them
        evaluation = entry.asset_check_evaluation
        assert evaluation is not None
        if evaluation.check_name != "ready":
            assert len(dg.serialize_value(entry)) < 1_900, evaluation

    # They are run again for what changes.
    assert world.said("checks") == "Nothing has changed since the last checks."
    world.client.execute("insert into public.nokey values ('other')")
    world.until("the row", lambda: "of 1 tables" in world.said("checks"))


@pytest.mark.parametrize("lost", ["the table", "its metadata"])
def test_one_bad_table_fails_by_name_and_the_others_flow_on(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_home: Path, lost: str
) -> None:
    monkeypatch.setattr(runs, "FIRST_DELAY_SECONDS", 600.0)
    copy_by_command(world)
    big, nokey = world.names("big"), world.names("nokey")
    if lost == "the table":
        open_catalog(world.config).drop_table(("world", "nokey"))
    else:
        shutil.rmtree(tmp_home / "world" / "warehouse" / "world" / "nokey" / "metadata")
    world.client.execute("delete from big where id <= 5; insert into nokey values ('lost')")
    world.until("the changes in the log", lambda: world.pending() >= 6)
    [request] = world.until("a merge", lambda: world.runs("materializer"))
    result = world.execute(request)
    assert not result.success
    [failure] = result.filter_events(lambda event: event.is_step_failure)
    assert "public.nokey" in str(failure.step_failure_data.error)
    assert "public.big" not in str(failure.step_failure_data.error)
    changes = sum(int(str(e.metadata["changes"].value)) for e in world.materializations(big.lake))
    assert changes == 5
    assert not world.materializations(nokey.lake)
    # It is tried once more; then runs leave it alone for a while, and the others get theirs.
    world.client.execute("delete from big where id = 6")
    [request] = world.until("the next merge", lambda: world.runs("materializer"))
    assert nokey.lake in (request.asset_selection or ())
    assert not world.execute(request).success
    world.client.execute("delete from big where id = 7")
    [request] = world.until("the next merge", lambda: world.runs("materializer"))
    assert nokey.lake not in (request.asset_selection or ())
    assert world.execute(request).success
    assert "public.nokey failed and is tried again" in world.said("materializer")


def test_a_quiet_table_gets_heartbeats_with_what_still_stands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_by_command(world)
    world.until("level tables", lambda: materialized(world))
    big = world.names("big")
    before = len(world.materializations(big.lake))
    monkeypatch.setattr(materializer, "heartbeat_seconds", lambda _: 0.0)
    world.until("a heartbeat", lambda: world.tick("materializer").asset_events)
    events = world.materializations(big.lake)
    assert len(events) == before + 1
    assert events[0].metadata["heartbeat"].value is True
    assert events[0].metadata["dagster/row_count"].value == 2000
    # Its rows are the same, and so is their version: nothing downstream is built again.
    versions = [dict(event.tags or {})["dagster/data_version"] for event in events[:2]]
    assert versions == ["1:0", "1:0"]
    # What others applied isn't vouched for with the number of rows that a run once counted.
    world.client.execute("delete from big where id > 1990")
    world.until("the changes in the log", lambda: world.pending() >= 10)
    session = open_session(world.config)
    with Pipeline.open(world.config) as pipeline:
        pipeline.store.lock(write_lock(big.table))
        drained = drain(pipeline, session, big.table)
    session.stop()
    assert drained is not None
    world.until("a heartbeat", lambda: world.tick("materializer").asset_events)
    told = world.materializations(big.lake)[0]
    assert told.metadata["heartbeat"].value is True
    assert "dagster/row_count" not in told.metadata
    assert dict(told.tags or {})["dagster/data_version"] == f"1:{drained.cursor.offset}"
    # One takes the place of another: what a tick reports is told after it, so there are two.
    for _ in range(2):
        world.until("a heartbeat", lambda: world.tick("materializer").asset_events)
    beats = [event for event in world.materializations(big.lake) if "heartbeat" in event.metadata]
    assert 1 <= len(beats) <= 2
    # A change that isn't in the log yet: the proof is missing, so is the heartbeat.
    stopped = len(world.materializations(big.lake))
    world.stop.set()
    world.flusher.join(30)
    world.client.execute("update big set note = 'unseen'")
    world.tick("materializer")  # proven as of the tick before the change, at the latest
    for _ in range(3):
        assert not world.tick("materializer").asset_events
    assert len(world.materializations(big.lake)) <= stopped + 1


@contextmanager
def _another_worker(world: World, *names: TableAssets, after_a_run: bool = False) -> Iterator[None]:
    """One that looks after the tables that it is given, from the side, and applies nothing."""
    tables = {name.table for name in names}
    up, over = threading.Event(), threading.Event()

    def others(pipeline: Pipeline) -> bool:
        return bool(workers(pipeline.store))

    def work() -> None:
        with Pipeline.open(world.config) as pipeline:
            if after_a_run:
                world.until("the run", lambda: others(pipeline))
            with Worker(pipeline, tables) as worker:
                while not over.wait(0.2):
                    worker.share(tables)
                    up.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        if not after_a_run:
            assert up.wait(60)
        yield
    finally:
        over.set()
        thread.join(60)


def test_a_run_ends_once_the_next_one_is_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_by_command(world)
    [request] = world.until("a merge", lambda: world.runs("materializer"))
    monkeypatch.setattr(lake, "RELIEF_SECONDS", 1.0)
    monkeypatch.setattr(lake, "LINGER_SECONDS", 200.0)
    began = time.monotonic()
    with _another_worker(world, *all_tables(world.config), after_a_run=True):
        assert world.execute(request).success
        assert time.monotonic() - began < 150.0


def test_an_idle_run_reports_while_it_waits_and_makes_room_for_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_by_command(world)
    world.until("level tables", lambda: materialized(world))
    names = world.names("big")
    before = len(world.materializations(names.lake))
    monkeypatch.setattr(lake, "LINGER_SECONDS", 300.0)
    monkeypatch.setattr(lake, "SHORT_LINGER_SECONDS", 1.0)
    monkeypatch.setattr(reports, "report_seconds", lambda _: 3.0)
    world.client.execute("update big set note = 'once' where id = 1")
    [request] = world.until("a merge", lambda: world.runs("materializer"))
    queued = threading.Event()

    def runs_count(filters: dg.RunsFilter) -> int:
        assert filters.statuses == [dg.DagsterRunStatus.QUEUED]
        return int(queued.is_set())

    def look() -> None:
        """Its report is seen while it lingers; then another run is queued."""
        world.until("the report", lambda: len(world.materializations(names.lake)) > before)
        queued.set()

    monkeypatch.setattr(world.instance, "get_runs_count", runs_count)
    thread = threading.Thread(target=look)
    thread.start()
    began = time.monotonic()
    assert world.execute(request).success
    assert queued.is_set()  # and not before
    assert time.monotonic() - began < 120.0
    thread.join()


def test_relief_is_asked_for_before_a_run_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_by_command(world)
    [request] = world.until("a merge", lambda: world.runs("materializer"))
    # A run that is at work, and holds its lock.
    run = world.created(request, dg.DagsterRunStatus.NOT_STARTED)
    assert not world.runs("materializer")  # it is about to start
    world.instance.handle_new_event(
        dg.EventLogEntry(  # type: ignore[no-untyped-call]
            error_info=None,
            level=20,
            user_message="",
            run_id=run.run_id,
            timestamp=time.time() - 100.0,
            job_name=run.job_name,
            dagster_event=DagsterEvent(DagsterEventType.PIPELINE_START.value, run.job_name),
        )
    )
    with Pipeline.open(world.config) as pipeline:
        pipeline.store.lock(run_lock(run.run_id))
        assert not world.runs("materializer")
        # A run with a table that can't go on is relieved sooner.
        monkeypatch.setattr(lake, "SHORT_RELIEF_SECONDS", 90.0)
        assert not world.runs("materializer")
        world.instance.add_run_tags(run.run_id, {FAILED_TAG: '["public.nokey"]'})
        assert len(world.runs("materializer")) == 1
        monkeypatch.setattr(lake, "SHORT_RELIEF_SECONDS", 180.0)
        assert not world.runs("materializer")
        monkeypatch.setattr(lake, "RELIEF_SECONDS", 90.0)
        assert len(world.runs("materializer")) == 1


def test_what_another_worker_leaves_lying_is_not_reported_as_fresh(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_by_command(world)
    world.until("level tables", lambda: materialized(world))
    names = world.names("big")
    before = len(world.materializations(names.lake))
    monkeypatch.setattr(lake, "SHORT_RELIEF_SECONDS", 5.0)
    monkeypatch.setattr(lake, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(reports, "report_seconds", lambda _: 0.0)
    with _another_worker(world, names):
        world.client.execute("update big set note = 'waits'")
        world.until("the change in the log", lambda: world.pending() >= 2000)
        job = world.defs.resolve_job_def(f"materialize_{world.config.name}_tables")
        asked = job.execute_in_process(instance=world.instance, asset_selection=[names.lake])
        assert asked.success
        assert len(world.materializations(names.lake)) == before
    world.until("level tables", lambda: materialized(world))
    assert len(world.materializations(names.lake)) > before
