"""The jobs of backfills, as projects use them."""

from __future__ import annotations

import re
from pathlib import Path

import dagster as dg

import cdc_assets
from cdc_assets.config.source import parse_config
from cdc_assets.dagster.build import build_defs

_PAGE = Path(cdc_assets.__file__).parents[1] / "docs" / "beginnings.md"


def test_the_schedule_of_the_documents_asks_for_a_run_that_the_job_takes() -> None:
    [code] = re.findall(r"```python\n(.*?)```", _PAGE.read_text(), re.DOTALL)
    given: dict[str, object] = {}
    exec(code, given)
    schedule = given["every_sunday"]
    assert isinstance(schedule, dg.ScheduleDefinition)
    config = parse_config(
        {
            "name": "app",
            "postgres": {"dsn": "postgresql://nowhere/db"},
            "tables": ["public.orders"],
        },
        "test",
    )
    defs = dg.Definitions.merge(build_defs(config), dg.Definitions(schedules=[schedule]))
    repository = defs.get_repository_def()
    context = dg.build_schedule_context(repository_def=repository)
    [request] = schedule.evaluate_tick(context).run_requests or ()
    job = repository.get_job(schedule.job_name)
    assert dg.validate_run_config(job, request.run_config)
