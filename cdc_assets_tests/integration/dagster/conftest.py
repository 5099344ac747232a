"""A world for sensors and runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.assets import lake
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.process import children
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.integration.dagster.world import World, running


@pytest.fixture
def world(
    tmp_home: Path,
    postgres_dsn: NewDatabase,
    monkeypatch: pytest.MonkeyPatch,
    spark_server: SparkServer,
) -> Iterator[World]:
    monkeypatch.setattr(lake, "LINGER_SECONDS", 1.0)
    with (
        dg.DagsterInstance.ephemeral() as instance,
        _world(postgres_dsn(), spark_server, instance, materializer="run") as made,
    ):
        yield made


@pytest.fixture
def following(
    tmp_home: Path, tmp_path: Path, postgres_dsn: NewDatabase, spark_server: SparkServer
) -> Iterator[World]:
    """With a follower, which reports tables every 20 s, to an instance in files."""
    twenty_seconds = {"freshness": {"warn": "1m", "fail": "1h"}}
    (folder := tmp_path / "dagster").mkdir()
    with (
        dg.DagsterInstance.local_temp(str(folder)) as instance,
        _world(postgres_dsn(), spark_server, instance, twenty_seconds) as made,
    ):
        yield made
        children.stop(f"follower:{made.config.name}")


@contextmanager
def _world(
    dsn: str,
    spark_server: SparkServer,
    instance: dg.DagsterInstance,
    of_table: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[World]:
    shared = of_table or {}
    client = psycopg.connect(dsn, autocommit=True)
    client.execute(
        "create table public.big (id int primary key, note text);"
        ' create table public."Mixed Case.Table" (a int, "B c" text, primary key (a, "B c"));'
        " create table public.nokey (v text); alter table public.nokey replica identity full;"
        " insert into public.big select g, repeat('x', 500) from generate_series(1, 2000) g;"
        " insert into public.\"Mixed Case.Table\" values (1, 'one');"
        " insert into public.nokey values ('same'), ('same')"
    )
    config = parse_config(
        {
            "name": "world",
            "postgres": {"dsn": dsn},
            "tables": [
                {"name": "public.big", "chunk_pages": 40, **shared},
                {"name": 'public."Mixed Case.Table"', **shared},
                {"name": "public.nokey", **shared},
            ],
            "snapshot": {"max_parallel_tables": 1},
            "spark": {"remote": spark_server.ensure()},
            **settings,
        },
        "test",
    )
    with running(config, instance, client) as made:
        yield made
