"""Query mode as Dagster runs it: copies, merges, checks, deletes, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.assets import lake
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import open_session
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.backfills import request_deletes
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.dagster.world import World, running

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

MADE = """
create table t (id int primary key, v text, updated_at timestamptz not null default now());
create index on t (updated_at);
insert into t select i, 'old' from generate_series(1, 50) i;
create view w as select id, v, updated_at from t where id % 2 = 0;
"""


@pytest.fixture
def queried(
    tmp_home: Path,
    postgres_dsn: NewDatabase,
    spark_server: SparkServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    monkeypatch.setattr(lake, "LINGER_SECONDS", 1.0)
    dsn = postgres_dsn()
    client = psycopg.connect(dsn, autocommit=True)
    client.execute(MADE.encode())
    config = parse_config(
        {
            "name": "queried",
            "postgres": {"dsn": dsn},
            "query": {"every": "1s"},
            "tables": [
                {"name": "t", "watermark": {"column": "updated_at"}},
                {"name": "w", "watermark": {"column": "updated_at"}, "key": ["id"]},
            ],
            "spark": {"remote": spark_server.ensure()},
            "materializer": "run",
        },
        "test",
    )
    with dg.DagsterInstance.ephemeral() as instance, running(config, instance, client) as made:
        yield made


def run_all(world: World, sensor: str) -> None:
    for request in world.runs(sensor):
        assert world.execute(request).success, request


def is_level(world: World) -> bool:
    run_all(world, "materializer")
    return world.said("materializer") == "All 2 copied tables equal the source."


def in_lake(world: World, name: str) -> list[int]:
    table = world.names(name).table
    session = open_session(world.config)
    try:
        with Pipeline.open(world.config) as pipeline:
            row = pipeline.store.table(table)
            assert row is not None
            there = LakeTable(world.config, world.config.table(table), row)
            return sorted(row[0] for row in session.table(there.sql_name).select("id").collect())
    finally:
        session.stop()


def is_cleaned(world: World) -> bool:
    run_all(world, "backfills")
    return (in_lake(world, "t")[0], in_lake(world, "w")[0]) == (11, 12)


def test_the_sensors_have_a_queried_source_copied_merged_checked_and_cleaned(
    queried: World,
) -> None:
    world = queried

    def copied() -> bool:
        run_all(world, "snapshot")
        with Pipeline.open(world.config) as pipeline:
            states = [row.state for row in pipeline.store.tables()]
        return states == ["streaming", "streaming"]

    world.until("the copies", copied)
    world.until("the log's end", lambda: is_level(world))
    assert in_lake(world, "w") == [*range(2, 51, 2)]
    world.client.execute("insert into t select i, 'new' from generate_series(51, 60) i")
    world.client.execute("delete from t where id <= 10")
    world.until("the changes", lambda: is_level(world) and in_lake(world, "t")[-1] == 60)
    assert in_lake(world, "t")[0] == 1, "no query shows that it is gone"

    with Pipeline.open(world.config) as pipeline:
        assert request_deletes(pipeline.store, 0) == 2
    world.until("the backfills", lambda: is_cleaned(world))

    checks = [*world.runs("checks")]
    for request in checks:
        done = world.execute(request)
        found = done.get_asset_check_evaluations()
        failed = [c for c in found if not c.passed and c.severity == dg.AssetCheckSeverity.ERROR]
        assert not failed
    assert checks
    for sensor in world.defs.get_repository_def().sensor_defs:
        if not sensor.name.startswith(("flusher_", "services_", "snapshot_", "materializer_")):
            world.tick(sensor.name.removesuffix("_queried"))
