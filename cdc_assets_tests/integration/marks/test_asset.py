"""``marks/<source>`` in Dagster: its partitions are marks, by hand and by schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest

from cdc_assets.dagster.assets.maintenance import prune_source
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import marks_key, marks_partitions_name
from cdc_assets.dagster.sensors import sessions
from cdc_assets.log.asked import marks as log
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

A = TableId("public", "a")
# Whoever flushes pins what waits.
_NO_IMAGE = re.compile(r"public\.a.*it was (waiting|copying)")
SETUP = "create table a (id int primary key); create table b (id int primary key)"


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "public.a", "public.b", marks={"every": "1h", "keep": 1}) as opened:
        yield opened
    sessions.close_all()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as opened:
        yield opened


def run_at(source: Lake, instance: dg.DagsterInstance, hour: int) -> str:
    """What the schedule asks for at that hour, as the daemon has it done; the partition."""
    defs = build_defs(source.config)
    at = datetime(2026, 12, 31, hour, 7, tzinfo=UTC)
    repository = defs.get_repository_def()
    with dg.build_schedule_context(
        instance, scheduled_execution_time=at, repository_def=repository
    ) as context:
        tick = defs.resolve_schedule_def("marks_src").evaluate_tick(context)
    [request] = tick.run_requests or ()
    assert request.partition_key is not None
    job = defs.resolve_job_def("mark_src")
    done = job.execute_in_process(
        instance=instance, partition_key=request.partition_key, tags=dict(request.tags)
    )
    assert done.success
    return request.partition_key


def test_the_schedule_marks_all_tables_and_drops_its_oldest(
    source: Lake, instance: dg.DagsterInstance
) -> None:
    first = run_at(source, instance, 3)
    assert first == "2026-12-31T0307Z"
    [event] = instance.fetch_materializations(marks_key(source.config), limit=5).records
    told = event.asset_materialization
    assert told is not None
    [known] = log.marks(source.pipeline.store)
    assert (told.partition, told.metadata["LSN"].value) == (first, str(known.lsn))
    assert (told.metadata["tag"].value, told.metadata["tables tagged"].value) == (known.tag, 2)

    second = run_at(source, instance, 4)
    assert [known.name for known in log.marks(source.pipeline.store)] == [second]
    assert instance.get_dynamic_partitions(marks_partitions_name(source.config)) == [second]
    events = instance.fetch_materializations(marks_key(source.config), limit=5).records
    assert [record.partition_key for record in events] == [second]
    prune_source(instance, source.config, datetime.now(UTC) + timedelta(days=8))
    assert [run.tags["dagster/partition"] for run in instance.get_runs()] == [second]
    refs = source.lake_table(A).loaded().metadata.refs
    assert {*refs} == {"main", f"mark_{second}"}


def test_the_schedule_waits_for_the_first_copy_of_a_table_and_not_for_another_one(
    source: Lake, instance: dg.DagsterInstance
) -> None:
    def asked() -> str | None:
        defs = build_defs(source.config)
        repository = defs.get_repository_def()
        with dg.build_schedule_context(
            instance, scheduled_execution_time=datetime.now(UTC), repository_def=repository
        ) as context:
            return defs.resolve_schedule_def("marks_src").evaluate_tick(context).skip_message

    assert asked() is None
    store = source.pipeline.store
    store.connection.execute("update tables set state = 'copying' where table_name = 'public.a'")
    assert asked() == "1 table waits for a first copy."
    store.connection.execute("update tables set epoch = 2 where table_name = 'public.a'")
    assert asked() is None


def test_a_mark_that_lacks_a_table_is_there_and_its_run_fails(
    source: Lake, instance: dg.DagsterInstance
) -> None:
    mark_for_copy(source.pipeline, [A])
    defs = build_defs(source.config)
    instance.add_dynamic_partitions(marks_partitions_name(source.config), ["by-hand"])
    done = defs.resolve_job_def("mark_src").execute_in_process(
        instance=instance, partition_key="by-hand", raise_on_error=False
    )
    assert not done.success
    [event] = instance.fetch_materializations(marks_key(source.config), limit=5).records
    told = event.asset_materialization
    assert told is not None
    assert told.metadata["tables tagged"].value == 1
    assert _NO_IMAGE.search(str(told.metadata["tables"].value))
    failed = done.get_step_failure_events()[0].step_failure_data.error
    assert failed is not None
    assert _NO_IMAGE.search(failed.to_string())


def test_a_source_that_is_not_streamed_has_no_marks(new_lake: NewLake) -> None:
    snapshot = {"mode": "snapshot_only"}
    with new_lake(SETUP, "public.a", snapshot=snapshot, marks={"every": "1h"}) as source:
        defs = build_defs(source.config)
        assert marks_key(source.config) not in defs.resolve_asset_graph().get_all_asset_keys()
        assert "marks_src" not in {schedule.name for schedule in defs.schedules or ()}
