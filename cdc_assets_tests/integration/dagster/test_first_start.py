"""What a source's first start begins with: its slot, and only then what takes the processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
from dagster._core.definitions.sensor_definition import SensorExecutionData

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.sensors import checks, services, sessions
from cdc_assets.lake.spark.session import server
from cdc_assets.process import children
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture
def config(tmp_home: Path, postgres_dsn: NewDatabase) -> Iterator[SourceConfig]:
    dsn = postgres_dsn()
    with psycopg.connect(dsn) as client:
        client.execute("create table t (id int primary key)")
    settings: dict[str, Any] = {
        "name": "first",
        "postgres": {"dsn": dsn},
        "tables": [{"name": "public.t"}],
    }
    yield parse_config(settings, "test")
    for child in ("flusher:first", server(parse_config(settings, "test"))._name):
        children.stop(child, timeout_seconds=0.0)
    sessions.close_all()
    services._ticked.clear()
    checks._memories.clear()


def test_the_flusher_is_first_and_spark_starts_once_a_table_is_pinned(config: SourceConfig) -> None:
    defs = build_defs(config)
    repository = defs.get_repository_def()

    def tick(sensor: str) -> SensorExecutionData:
        with dg.build_sensor_context(
            instance, repository_def=repository, resources=dict(defs.resources or {})
        ) as context:
            return repository.get_sensor_def(f"{sensor}_first").evaluate_tick(context)

    def started() -> bool:
        tick("snapshot")
        return children.child_of(server(config)._name) is not None

    with dg.DagsterInstance.ephemeral() as instance:
        assert tick("services").skip_message == "Spark starts once a table is pinned."
        assert tick("checks").skip_message == "Waiting for the flusher's look at the source."
        assert not started()
        tick("flusher")
        wait_for(started)
        [asked] = tick("checks").run_requests or ()
        assert asked.asset_check_keys


def test_spark_waits_for_one_tick_at_most(config: SourceConfig) -> None:
    assert services._leaves_first(config)
    assert not services._leaves_first(config)
