"""What the process of a run builds of the definitions: what the run needs, if it is one of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster import part
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import all_tables, job_name, run_tags
from cdc_assets.dagster.part import PART_TAG
from cdc_assets.dagster.sensors.location import told
from cdc_assets_tests.support.run_process import built_in_a_run

SETTINGS: list[dict[str, Any]] = [
    {
        "name": name,
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": "public.a"}, {"name": "public.b"}],
    }
    for name in ("one", "two")
]
ONE = parse_config(SETTINGS[0], "test")
A, B = all_tables(ONE)
TWO_A = all_tables(parse_config(SETTINGS[1], "test"))[0]


def _built(
    folder: Path,
    work: str,
    tags: Mapping[str, str],
    assets: set[dg.AssetKey] | None = None,
    checks: set[dg.AssetCheckKey] | None = None,
) -> dict[str, Any]:
    with dg.DagsterInstance.local_temp(str(folder)) as instance:
        run = dg.DagsterRun(
            job_name=job_name("one", work),
            tags={**tags, PART_TAG: "true"} if tags else {},
            asset_selection=frozenset(assets) if assets else None,
            asset_check_selection=frozenset(checks) if checks else None,
        )
        instance.add_run(run)
        return built_in_a_run(instance, run, SETTINGS)


@pytest.mark.parametrize(
    ("work", "key"),
    [("snapshot", A.snapshot), ("materialize", A.lake), ("maintain", A.maintenance)],
)
def test_a_run_that_was_asked_for_builds_its_work_of_its_tables(
    tmp_path: Path, work: str, key: dg.AssetKey
) -> None:
    found = _built(tmp_path, work, run_tags(ONE, work), {key})
    assert found["keys"] == [key.to_user_string()]
    assert set(found["jobs"]) == {"__ASSET_JOB", job_name("one", work)}


def test_what_is_somebody_elses_has_every_run_build_all_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dagster looks up what it names in the process of each run."""
    monkeypatch.setattr(part, "_alone", [])
    ours = dg.Definitions.merge(*(build_defs(parse_config(each, "test")) for each in SETTINGS))

    def asks(*more: dg.Definitions) -> dg.RunRequest:
        repository = dg.Definitions.merge(ours, *more).get_repository_def()
        context = dg.build_sensor_context(repository_def=repository)
        result = told((context,), dg.SensorResult(run_requests=[dg.RunRequest(tags={"a": "b"})]))
        [request] = result.run_requests or []
        assert told((context,), dg.RunRequest(tags={"a": "b"})).tags == request.tags
        return request

    assert asks().tags == {"a": "b"}  # a project's module may look up what it likes
    part.serves_sources_alone()
    assert asks().tags == {"a": "b", PART_TAG: "true"}
    mart = dg.AssetSpec("mart", deps=[A.lake])  # or an asset whose input is looked up
    assert PART_TAG not in asks(dg.Definitions(assets=[mart])).tags
    below = dg.AssetSelection.assets(B.lake).downstream(include_self=False)
    sensor = dg.AutomationConditionSensorDefinition("theirs", target=below)
    nightly = dg.ScheduleDefinition(name="n", job_name="verify_one", cron_schedule="0 0 * * *")
    for theirs in (dg.Definitions(sensors=[sensor]), dg.Definitions(schedules=[nightly])):
        assert asks(theirs).tags == {"a": "b"}


@pytest.mark.parametrize("key", [B.lake, TWO_A.snapshot, dg.AssetKey("theirs")])
def test_a_run_of_more_than_its_tags_say_has_all_definitions(
    tmp_path: Path, key: dg.AssetKey
) -> None:
    found = _built(tmp_path, "snapshot", run_tags(ONE, "snapshot"), {A.snapshot, key})
    assert A.lake.to_user_string() in found["keys"]


def test_a_run_of_checks_builds_those_of_its_tables(tmp_path: Path) -> None:
    asked = {dg.AssetCheckKey(A.source, "ready"), dg.AssetCheckKey(A.lake, "replication_lag")}
    found = _built(tmp_path, "ready", run_tags(ONE, "ready"), checks=asked)
    assert found["keys"] == []
    assert found["checks"] == [
        "one/a:primary_key_unique",
        "one/a:replication_lag",
        "one/a:values_representable",
        "postgres/one/public/a:ready",
    ]


def test_a_run_of_all_tables_builds_its_work_of_all(tmp_path: Path) -> None:
    found = _built(tmp_path, "maintain", run_tags(ONE, "maintain"))
    assert found["keys"] == [key.to_user_string() for key in (A.maintenance, B.maintenance)]


@pytest.mark.parametrize("tags", [{}, run_tags(ONE, "maintain")])
def test_any_other_run_has_all_definitions(tmp_path: Path, tags: Mapping[str, str]) -> None:
    found = _built(tmp_path, "materialize", tags, {A.lake})
    assert len(found["keys"]) == 2 * (3 * 2 + 2)
    assert len(found["checks"]) == 2 * 2 * 5
