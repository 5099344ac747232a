"""``marks/<source>`` in Dagster: its partitions are marks, by hand and by schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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

A, B = TableId("public", "a"), TableId("public", "b")
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


def asked(
    source: Lake, instance: dg.DagsterInstance, at: datetime
) -> tuple[str | None, Sequence[dg.RunRequest]]:
    """What the schedule says at that time: why it skips, or the runs that it asks for."""
    defs = build_defs(source.config)
    repository = defs.get_repository_def()
    with dg.build_schedule_context(
        instance, scheduled_execution_time=at, repository_def=repository
    ) as context:
        tick = defs.resolve_schedule_def("marks_src").evaluate_tick(context)
    return tick.skip_message, tick.run_requests or ()


def run_at(source: Lake, instance: dg.DagsterInstance, hour: int, *, success: bool = True) -> str:
    """What the schedule asks for at that hour, as the daemon has it done; the partition."""
    _, [request] = asked(source, instance, datetime(2026, 12, 31, hour, 7, tzinfo=UTC))
    assert request.partition_key is not None
    done = (
        build_defs(source.config)
        .resolve_job_def("mark_src")
        .execute_in_process(
            instance=instance,
            partition_key=request.partition_key,
            tags=dict(request.tags),
            raise_on_error=success,
        )
    )
    assert done.success == success
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


def test_neither_a_failed_run_nor_a_table_that_keeps_a_tag_is_in_the_way_of_older_marks_end(
    source: Lake, instance: dg.DagsterInstance
) -> None:
    partitions = marks_partitions_name(source.config)
    instance.add_dynamic_partitions(partitions, ["2026-12-31T0207Z", "by-hand"])  # no mark came
    run_at(source, instance, 3)
    metadata = Path(source.lake_table(A).loaded().metadata_location.removeprefix("file:"))
    kept = metadata.read_bytes()
    metadata.unlink()
    for hour in (4, 5):
        run_at(source, instance, hour, success=False)
    refs = source.lake_table(B).loaded().metadata.refs
    assert {*refs} == {"main", "mark_2026-12-31T0507Z"}
    metadata.write_bytes(kept)
    last = run_at(source, instance, 6)
    assert [known.name for known in log.marks(source.pipeline.store)] == [last]
    assert instance.get_dynamic_partitions(partitions) == ["by-hand", last]


def test_the_schedule_waits_for_the_first_copy_of_a_table_and_not_for_another_one(
    source: Lake, instance: dg.DagsterInstance
) -> None:
    now = datetime.now(UTC)
    assert asked(source, instance, now)[0] is None
    store = source.pipeline.store
    store.connection.execute("update tables set state = 'copying' where table_name = 'public.a'")
    assert asked(source, instance, now)[0] == "1 table waits for a first copy."
    store.connection.execute("update tables set epoch = 2 where table_name = 'public.a'")
    assert asked(source, instance, now)[0] is None


def test_a_day_whose_tick_was_skipped_is_marked_at_the_next_one_and_once(
    copied_lake: NewLake, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copied_lake(SETUP, "public.a", marks={"every": "1d"}) as source:
        schedule = build_defs(source.config).resolve_schedule_def("marks_src")
        assert schedule.cron_schedule == "7 * * * *"
        with monkeypatch.context() as patched:
            patched.setattr("cdc_assets.dagster.sensors.schedules.spark_address", lambda _: None)
            skipped, _ = asked(source, instance, datetime(2026, 12, 31, 3, 7, tzinfo=UTC))
            assert skipped == "Waiting for Spark to start."
        assert run_at(source, instance, 4) == "2026-12-31T0407Z"
        for at in (
            datetime(2026, 12, 31, 5, 7, tzinfo=UTC),
            datetime(2027, 1, 1, 2, 7, tzinfo=UTC),
        ):
            assert asked(source, instance, at)[0] == "2026-12-31T0307Z is marked."
        assert asked(source, instance, datetime(2027, 1, 1, 3, 7, tzinfo=UTC))[0] is None
    sessions.close_all()


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


def test_a_mark_that_became_complete_after_its_run_was_killed_is_reported_by_the_next_one(
    source: Lake, instance: dg.DagsterInstance
) -> None:
    log.make(source.pipeline.store, "killed", source.tables)
    source.drain_all()  # the follower tags them
    [known] = log.marks(source.pipeline.store)
    instance.add_dynamic_partitions(marks_partitions_name(source.config), ["killed"])
    job = build_defs(source.config).resolve_job_def("mark_src")
    assert job.execute_in_process(instance=instance, partition_key="killed").success
    [event] = instance.fetch_materializations(marks_key(source.config), limit=5).records
    told = event.asset_materialization
    assert told is not None
    assert told.metadata["LSN"].value == str(known.lsn)
    assert told.metadata["made"].value == known.created_at.timestamp()


def test_a_source_that_is_not_streamed_has_no_marks(new_lake: NewLake) -> None:
    snapshot = {"mode": "snapshot_only"}
    with new_lake(SETUP, "public.a", snapshot=snapshot, marks={"every": "1h"}) as source:
        defs = build_defs(source.config)
        assert marks_key(source.config) not in defs.resolve_asset_graph().get_all_asset_keys()
        assert "marks_src" not in {schedule.name for schedule in defs.schedules or ()}
