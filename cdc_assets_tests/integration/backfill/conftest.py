"""A table that streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_assets.lake.spark.server import SparkServer
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.backfills import SETUP
from cdc_assets_tests.support.lake import Lake, copied


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


@pytest.fixture
def source(postgres_dsn: NewDatabase, spark_url: str, tmp_home: Path) -> Iterator[Lake]:
    with copied(postgres_dsn(), spark_url, SETUP, "t") as opened:
        yield opened
