"""The production instance of Dagster, on a real Postgres."""

from __future__ import annotations

import shutil
from pathlib import Path

import dagster as dg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.dagster.names import WORK_TAG
from cdc_assets_tests.conftest import NewDatabase

FILE = Path(__file__).parents[2] / "infra" / "dagster" / "dagster.yaml"


def test_the_production_instance_starts_and_keeps_its_runs_in_postgres(
    tmp_path: Path, postgres_dsn: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = conninfo_to_dict(postgres_dsn())
    monkeypatch.setenv("DAGSTER_POSTGRES_HOST", str(server["host"]))
    monkeypatch.setenv("DAGSTER_POSTGRES_USER", str(server["user"]))
    monkeypatch.setenv("DAGSTER_POSTGRES_PASSWORD", str(server.get("password") or "any"))
    monkeypatch.setenv("DAGSTER_POSTGRES_DB", str(server["dbname"]))
    monkeypatch.setenv("DAGSTER_LOGS_BUCKET", "logs")
    settings = FILE.read_text()
    assert "port: 5432" in settings
    (tmp_path / "dagster.yaml").write_text(
        settings.replace("port: 5432", f"port: {server['port']}")
    )

    @dg.asset
    def something() -> None:
        return None

    def run() -> str:
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            result = dg.materialize([something], instance=instance)
            assert result.success
            return result.run_id

    run_id = run()
    shutil.rmtree(tmp_path / "storage", ignore_errors=True)
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        found = instance.get_run_by_id(run_id)
        assert found is not None
        assert found.is_success
        assert instance.run_coordinator is not None
        assert instance.run_retries_enabled
        assert not instance.run_retries_max_retries < 1


def test_the_limits_are_of_tags_that_runs_have() -> None:
    settings = yaml.safe_load(FILE.read_text())
    limits = settings["concurrency"]["runs"]["tag_concurrency_limits"]
    assert {limit["key"] for limit in limits} == {WORK_TAG}
    assert {limit["value"] for limit in limits} == {"snapshot", "maintain"}
