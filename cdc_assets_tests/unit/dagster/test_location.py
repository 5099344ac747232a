"""In somebody else's code location: what is theirs stays so, and ours needs nothing of it."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster import part
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import failed_tag, job_name
from cdc_assets.dagster.part import PART_TAG
from cdc_assets.dagster.sensors.location import in_one_process, told
from cdc_assets.dagster.sensors.runs import _failed_tables
from cdc_assets.definitions import defs as shipped

CONFIG = parse_config(
    {
        "name": "guest",
        "postgres": {"dsn": "postgresql://x@h/d"},
        "tables": ["a", "b"],
        "maintenance": {"every": None},
    },
    "test",
)
IN_PROCESS: dict[str, object] = {"execution": {"config": {"in_process": {}}}}


@dg.job
def theirs() -> None:
    """Of the project that the source is a guest of."""


def _host(**more: Any) -> dg.RepositoryDefinition:
    host = dg.Definitions(jobs=[theirs], **more)
    return dg.Definitions.merge(build_defs(CONFIG), host).get_repository_def()


def _executor(repository: dg.RepositoryDefinition, job: str) -> dg.ExecutorDefinition:
    return repository.get_job(job).executor_def


@pytest.mark.parametrize("executor", [None, dg.multiprocess_executor])
def test_their_jobs_keep_their_executor_and_ours_need_one_process(
    executor: dg.ExecutorDefinition | None,
) -> None:
    repository = _host(executor=executor)
    usual = executor or dg.multi_or_in_process_executor
    assert _executor(repository, "theirs") is usual
    assert repository.get_implicit_global_asset_job_def().executor_def is usual
    ours = [name for name in repository.job_names if "guest" in name]
    assert len(ours) >= 9
    assert {_executor(repository, name).name for name in ours} == {"in_process"}


def test_a_copy_needs_one_process_where_nobody_chose_an_executor() -> None:
    """Its assets are of no job."""
    asked = dg.SensorResult(run_requests=[dg.RunRequest(asset_selection=[dg.AssetKey("x")])])

    def configured(repository: dg.RepositoryDefinition | None) -> object:
        context = dg.build_sensor_context(repository_def=repository)
        [request] = in_one_process(context, asked).run_requests or []
        return request.run_config

    assert configured(_host()) == IN_PROCESS
    assert configured(_host(executor=dg.multiprocess_executor)) == {}
    assert configured(None) == {}
    assert configured(shipped.get_repository_def()) == {}
    implicit = shipped.get_repository_def().get_implicit_global_asset_job_def()
    assert implicit.executor_def is dg.in_process_executor


def test_no_resource_or_logger_of_theirs_is_replaced() -> None:
    """Resources of ours have the source's name in theirs."""
    made = build_defs(CONFIG)
    assert all("guest" in name for name in made.resources or {})
    assert (made.loggers, made.executor) == (None, None)


def test_a_schedule_that_is_called_as_ours_would_be_is_not_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(part, "_alone", [True])
    nightly = dg.ScheduleDefinition(
        name="maintenance_guest", job_name=job_name("guest", "maintain"), cron_schedule="0 0 * * *"
    )
    for schedules, alone in (([], True), ([nightly], False)):
        context = dg.build_sensor_context(repository_def=_host(schedules=schedules))
        assert (PART_TAG in told((context,), dg.RunRequest()).tags) is alone


def test_more_failed_tables_than_a_tag_holds_are_all_that_the_run_was_for() -> None:
    """Dagster's index of tags on Postgres refuses more than 2,700 bytes."""
    few = failed_tag(["public.a", "public.b"])
    assert _failed_tables(few) == frozenset({"public.a", "public.b"})
    many = failed_tag(f"public.table_{number}" for number in range(500))
    assert all(len(value) <= 2_000 for value in many.values())
    assert _failed_tables(many) is None
    assert _failed_tables({}) is None
