"""The flusher's sensor with a real child: it starts it, reports its log, and says why it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psycopg
import pytest
from dagster._core.definitions.sensor_definition import SensorExecutionData
from dagster._core.errors import SensorExecutionError

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.sensors import flusher, sessions
from cdc_assets.errors import ReplicationProblem
from cdc_assets.process import children as process
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.waiting import wait_for

logger = logging.getLogger(__name__)


def _config(dsn: str) -> SourceConfig:
    return parse_config(
        {"name": "watched", "postgres": {"dsn": dsn}, "tables": [{"name": "public.t"}]}, "test"
    )


def _tick(config: SourceConfig, instance: dg.DagsterInstance) -> SensorExecutionData:
    defs = build_defs(config)
    repository = defs.get_repository_def()
    with dg.build_sensor_context(
        instance, repository_def=repository, resources=dict(defs.resources or {})
    ) as context:
        began = time.monotonic()
        found = repository.get_sensor_def("flusher_watched").evaluate_tick(context)
        assert time.monotonic() - began < 10  # 2 s on an idle machine
    return found


@pytest.fixture
def instance(tmp_home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made
    process.stop("flusher:watched")
    sessions.close_all()
    flusher._reported.clear()


def test_it_starts_the_flusher_and_reports_the_staged_log_once_a_minute(
    instance: dg.DagsterInstance, postgres_dsn: NewDatabase
) -> None:
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as client:
        client.execute("create table t (id int primary key)")
        config = _config(dsn)
        events = wait_for(lambda: _tick(config, instance).asset_events)
        assert [e.asset_key.path for e in events] == [["staged_log", "watched", "public", "t"]]
        assert "flushed LSN" in events[0].metadata
        client.execute("insert into t select generate_series(1, 5)")
        wait_for(lambda: "has staged everything" in (_tick(config, instance).skip_message or ""))
        assert not _tick(config, instance).asset_events  # not twice within a minute


def test_a_lost_slot_is_an_error_of_the_sensor_with_the_way_out(
    instance: dg.DagsterInstance, postgres_dsn: NewDatabase
) -> None:
    dsn = postgres_dsn()
    with psycopg.connect(dsn, autocommit=True) as client:
        client.execute("create table t (id int primary key)")
        config = _config(dsn)

        def streams() -> bool:
            try:
                return "staged everything" in (_tick(config, instance).skip_message or "")
            except (SensorExecutionError, ReplicationProblem) as error:
                # A flusher that ended at its start is started again.
                logger.warning("%s", error.__cause__ or error)
                return False

        wait_for(streams)
        process.stop("flusher:watched")
        client.execute("select pg_drop_replication_slot('cdc_watched')")

        def failure() -> str:
            try:
                _tick(config, instance)
            except (SensorExecutionError, ReplicationProblem) as error:
                return str(error.__cause__ or error)
            return ""

        said = wait_for(failure)
        assert "cdc_watched is gone" in said
        assert "resync" in said


def test_a_database_that_is_not_up_is_waited_for_without_an_error(
    instance: dg.DagsterInstance,
) -> None:
    config = parse_config(
        {"name": "watched", "postgres": {"embedded": True}, "tables": [{"name": "public.t"}]},
        "test",
    )
    found = _tick(config, instance)
    assert found.skip_message == "Waiting for the embedded Postgres of watched to start."
    assert process.child_of("flusher:watched") is None
    repository = build_defs(config).get_repository_def()
    for name in ("snapshot", "materializer", "checks"):
        with dg.build_sensor_context(instance, repository_def=repository) as context:
            found = repository.get_sensor_def(f"{name}_watched").evaluate_tick(context)
        assert (found.skip_message or "").startswith("Waiting for the Postgres of watched: ")
