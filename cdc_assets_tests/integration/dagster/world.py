"""A source with its definitions on an ephemeral Dagster instance, whose daemon is the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg
import psycopg
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.execution.api import create_execution_plan, execute_run

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import TableAssets, all_tables
from cdc_assets.dagster.sensors import sessions
from cdc_assets.flusher.flusher import run as flush
from cdc_assets.lake.spark.session import open_session
from cdc_assets.pipeline import Pipeline
from cdc_assets.snapshot.coordinator import copy_table


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
            create_execution_plan(job, request.run_config),
            run_config=request.run_config,
            tags=dict(request.tags),
            asset_selection=frozenset(assets) if assets else None,
        )
        if checks is not None:
            run = run._replace(asset_check_selection=frozenset(checks))
        return execute_run(InMemoryJob(job), run, self.instance)

    def created(self, request: dg.RunRequest, status: dg.DagsterRunStatus) -> dg.DagsterRun:
        """A run in that state of which no process knows."""
        assert request.job_name is not None
        return self.instance.create_run_for_job(
            self.defs.resolve_job_def(request.job_name),
            tags=dict(request.tags),
            status=status,
            asset_selection=frozenset(request.asset_selection or ()),
        )

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


@contextmanager
def running(
    config: SourceConfig, instance: dg.DagsterInstance, client: psycopg.Connection[Any]
) -> Iterator[World]:
    """The source with its flusher, for the length of the block."""
    stop = threading.Event()
    flusher = threading.Thread(target=flush, args=(config,), kwargs={"stop": stop})
    flusher.start()
    try:
        yield World(config, build_defs(config), instance, client, flusher, stop)
    finally:
        stop.set()
        flusher.join(30)
        sessions.close_all()
        client.close()


def materialized(world: World) -> bool:
    """Run what the sensor asks for; True once it says that nothing is to be done."""
    found = world.tick("materializer")
    for request in world.requests("materializer", found):
        assert world.execute(request).success
    return found.skip_message == "All 3 copied tables equal the source."


def copy_by_command(world: World) -> None:
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
