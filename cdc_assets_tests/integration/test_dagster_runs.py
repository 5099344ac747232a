"""Real sensors and real runs on an ephemeral Dagster instance, a real Postgres and a real Spark."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dagster as dg
import psycopg
import pytest
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster._core.execution.api import create_execution_plan, execute_run

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.assets import lake, snapshot
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import TableAssets, all_tables, run_lock
from cdc_assets.dagster.sensors import materializer, runs, sessions
from cdc_assets.flusher.flusher import run as flush
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import open_session
from cdc_assets.log.sessions.workers import workers
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.pipeline import Pipeline
from cdc_assets.snapshot.coordinator import copy_table
from cdc_assets_tests.conftest import NewDatabase

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@dataclass
class World:
    """One source with its definitions and an instance; the flusher runs in a thread."""

    config: SourceConfig
    defs: dg.Definitions
    instance: dg.DagsterInstance
    client: psycopg.Connection[Any]
    flusher: threading.Thread
    stop: threading.Event

    def names(self, table: str) -> TableAssets:
        return next(n for n in all_tables(self.config) if n.table.name == table)

    def tick(self, sensor: str) -> SensorExecutionData:
        """Evaluate a sensor and do with the answer what the daemon does."""
        repository = self.defs.get_repository_def()
        with dg.build_sensor_context(
            self.instance, repository_def=repository, resources=dict(self.defs.resources or {})
        ) as context:
            definition = repository.get_sensor_def(f"{sensor}_{self.config.name}")
            found = definition.evaluate_tick(context)
        for event in found.asset_events:
            self.instance.report_runless_asset_event(event)
        for request in found.dynamic_partitions_requests or ():
            name = request.partitions_def_name
            if isinstance(request, dg.AddDynamicPartitionsRequest):
                self.instance.add_dynamic_partitions(name, list(request.partition_keys))
            else:
                for key in request.partition_keys:
                    self.instance.delete_dynamic_partition(name, key)
        return found

    def runs(self, sensor: str) -> list[dg.RunRequest]:
        return self.requests(sensor, self.tick(sensor))

    def requests(self, sensor: str, found: SensorExecutionData) -> list[dg.RunRequest]:
        """With the job that the daemon would launch: the sensor's only target."""
        repository = self.defs.get_repository_def()
        definition = repository.get_sensor_def(f"{sensor}_{self.config.name}")
        return [
            request
            if request.job_name
            else request.with_replaced_attrs(job_name=definition.job_name)
            for request in found.run_requests or ()
        ]

    def said(self, sensor: str) -> str:
        return self.tick(sensor).skip_message or ""

    def execute(self, request: dg.RunRequest) -> dg.JobExecutionResult:
        """As the daemon launches it: with these checks and no others, also where none is named."""
        assert request.job_name is not None
        job = self.defs.resolve_job_def(request.job_name)
        assets, checks = request.asset_selection, request.asset_check_keys
        job = job.get_subset(
            asset_selection=set(assets) if assets else None,
            asset_check_selection=None if checks is None else set(checks),
        )
        run = self.instance.create_run_for_job(
            job,
            create_execution_plan(job),
            tags=dict(request.tags),
            asset_selection=frozenset(assets) if assets else None,
        )
        if checks is not None:
            run = run._replace(asset_check_selection=frozenset(checks))
        return execute_run(InMemoryJob(job), run, self.instance)

    def until(self, what: str, look: Callable[[], Any], seconds: float = 90.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := look():
                return found
            time.sleep(0.2)
        raise AssertionError(f"waited {seconds} s for {what}")

    def pending(self) -> int:
        """Rows of the log that wait to be applied."""
        with Pipeline.open(self.config) as pipeline:
            return sum(backlog.rows for backlog in pipeline.store.backlogs())

    def materializations(self, key: dg.AssetKey) -> list[dg.AssetMaterialization]:
        records = self.instance.fetch_materializations(key, limit=1000).records
        return [r.asset_materialization for r in records if r.asset_materialization is not None]


@pytest.fixture
def world(
    tmp_home: Path,
    postgres_dsn: NewDatabase,
    monkeypatch: pytest.MonkeyPatch,
    spark_server: SparkServer,
) -> Iterator[World]:
    monkeypatch.setattr(lake, "LINGER_SECONDS", 1.0)
    dsn = postgres_dsn()
    client = psycopg.connect(dsn, autocommit=True)
    client.execute(
        "create table public.big (id int primary key, note text);"
        ' create table public."Mixed Case.Table" (a int, "B c" text, primary key (a, "B c"));'
        " create table public.nokey (v text); alter table public.nokey replica identity full;"
        " insert into public.big select g, repeat('x', 500) from generate_series(1, 2000) g;"
        " insert into public.\"Mixed Case.Table\" values (1, 'one');"
        " insert into public.nokey values ('same'), ('same')"
    )
    config = parse_config(
        {
            "name": "world",
            "postgres": {"dsn": dsn},
            "tables": [
                {"name": "public.big", "chunk_pages": 40},
                {"name": 'public."Mixed Case.Table"'},
                {"name": "public.nokey"},
            ],
            "snapshot": {"max_parallel_tables": 1},
            "spark": {"remote": spark_server.ensure()},
        },
        "test",
    )
    stop = threading.Event()
    flusher = threading.Thread(target=flush, args=(config,), kwargs={"stop": stop})
    with dg.DagsterInstance.ephemeral() as instance:
        yield_world = World(config, build_defs(config), instance, client, flusher, stop)
        flusher.start()
        try:
            yield yield_world
        finally:
            stop.set()
            flusher.join(30)
            sessions.close_all()
            client.close()


def _materialized(world: World) -> bool:
    """Run what the sensor asks for; True once it says that nothing is to be done."""
    found = world.tick("materializer")
    for request in world.requests("materializer", found):
        assert world.execute(request).success
    return found.skip_message == "All 3 copied tables equal the source."


def test_from_the_first_tick_to_level_tables(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    big, mixed, nokey = (world.names(n) for n in ("big", "Mixed Case.Table", "nokey"))

    # Whether the source is ready is looked at before anything is copied.
    [first] = world.runs("checks")
    looked = world.execute(first).get_asset_check_evaluations()
    assert {e.check_name for e in looked} == {"ready"}
    assert len(looked) == 3
    assert all("wal_unbounded" in str(e.metadata["findings"].value) for e in looked)
    assert not any(e.severity == dg.AssetCheckSeverity.ERROR for e in looked)

    # One table at a time is copied (max_parallel_tables), by one run over its range of partitions.
    copied = []
    for _ in range(3):
        requests = world.until("a copy", lambda: world.runs("snapshot"))
        assert len(requests) == 1
        copied.append(requests[0].asset_selection[0].path[-1])
        result = world.execute(requests[0])
        assert result.success
    assert copied == ["big", "Mixed_Case_Table", "nokey"]
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
    world.until("level tables", lambda: _materialized(world))
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


def _copy_by_command(world: World) -> None:
    """What ``cdc-assets snapshot`` does: no Dagster is involved."""

    def pinned() -> bool:
        with Pipeline.open(world.config) as pipeline:
            rows = pipeline.store.tables()
        return len(rows) == 3 and all(row.state != "waiting" for row in rows)

    world.until("pins", pinned)
    session = open_session(world.config)
    with Pipeline.open(world.config) as pipeline:
        for names in all_tables(world.config):
            copy_table(pipeline, session, names.table)
    session.stop()


def test_what_the_command_line_copied_is_marked_without_a_run(world: World) -> None:
    _copy_by_command(world)
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


@pytest.mark.parametrize("lost", ["the table", "its metadata"])
def test_one_bad_table_fails_by_name_and_the_others_flow_on(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_home: Path, lost: str
) -> None:
    monkeypatch.setattr(runs, "FIRST_DELAY_SECONDS", 600.0)
    _copy_by_command(world)
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
    # The next run leaves it alone for a while; the others get theirs.
    world.client.execute("delete from big where id = 6")
    [request] = world.until("the next merge", lambda: world.runs("materializer"))
    assert nokey.lake not in (request.asset_selection or ())
    assert world.execute(request).success
    assert "public.nokey failed and is tried again" in world.said("materializer")


def test_a_quiet_table_gets_heartbeats_with_what_still_stands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copy_by_command(world)
    world.until("level tables", lambda: _materialized(world))
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
        pipeline.store.lock(f"write:{big.table}")
        drained = drain(pipeline, session, big.table)
    session.stop()
    assert drained is not None
    world.until("a heartbeat", lambda: world.tick("materializer").asset_events)
    told = world.materializations(big.lake)[0]
    assert told.metadata["heartbeat"].value is True
    assert "dagster/row_count" not in told.metadata
    assert dict(told.tags or {})["dagster/data_version"] == f"1:{drained.cursor.offset}"
    # A change that isn't in the log yet: the proof is missing, so is the heartbeat.
    stopped = len(world.materializations(big.lake))
    world.stop.set()
    world.flusher.join(30)
    world.client.execute("update big set note = 'unseen'")
    world.tick("materializer")  # proven as of the tick before the change, at the latest
    for _ in range(3):
        assert not world.tick("materializer").asset_events
    assert len(world.materializations(big.lake)) <= stopped + 1


def test_a_run_whose_process_is_gone_is_ended_and_the_next_one_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    [request] = world.until("a copy", lambda: world.runs("snapshot"))
    assert request.job_name is not None
    # What is left in Dagster of a run that was killed together with its code server.
    dead = world.instance.create_run_for_job(
        world.defs.resolve_job_def(request.job_name),
        tags=dict(request.tags),
        status=dg.DagsterRunStatus.STARTED,
        asset_selection=frozenset(request.asset_selection or ()),
    )
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
    _copy_by_command(world)
    [request] = world.until("a merge", lambda: world.runs("materializer"))
    monkeypatch.setattr(lake, "RELIEF_SECONDS", 1.0)
    monkeypatch.setattr(lake, "LINGER_SECONDS", 200.0)
    began = time.monotonic()
    with _another_worker(world, *all_tables(world.config), after_a_run=True):
        assert world.execute(request).success
        assert time.monotonic() - began < 150.0


def test_relief_is_asked_for_before_a_run_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copy_by_command(world)
    [request] = world.until("a merge", lambda: world.runs("materializer"))
    assert request.job_name is not None
    # A run that is at work, and holds its lock.
    run = world.instance.create_run_for_job(
        world.defs.resolve_job_def(request.job_name),
        tags=dict(request.tags),
        status=dg.DagsterRunStatus.NOT_STARTED,
        asset_selection=frozenset(request.asset_selection or ()),
    )
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
        monkeypatch.setattr(materializer, "RELIEF_SECONDS", 90.0)
        assert len(world.runs("materializer")) == 1


def test_what_another_worker_leaves_lying_is_not_reported_as_fresh(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _copy_by_command(world)
    world.until("level tables", lambda: _materialized(world))
    names = world.names("big")
    before = len(world.materializations(names.lake))
    monkeypatch.setattr(lake, "BUDGET_SECONDS", 5.0)
    monkeypatch.setattr(lake, "report_seconds", lambda _: 0.0)
    with _another_worker(world, names):
        world.client.execute("update big set note = 'waits'")
        world.until("the change in the log", lambda: world.pending() >= 2000)
        job = world.defs.resolve_job_def(f"materialize_{world.config.name}_tables")
        asked = job.execute_in_process(instance=world.instance, asset_selection=[names.lake])
        assert asked.success
        assert len(world.materializations(names.lake)) == before
    world.until("level tables", lambda: _materialized(world))
    assert len(world.materializations(names.lake)) > before
