"""A handful of the random oracle's seeds; ``make soak-oracle`` plays any number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets_tests.oracle.generate import make
from cdc_assets_tests.oracle.servers import serving
from cdc_assets_tests.oracle.world import World

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

# The first: a refused table, one without a key, partitions in mode append, a killed merge, cut
# connections.
SEEDS = (
    (50, ""),
    (5001, "leaf"),
    (5001, "pin"),
    (5002, "keyless"),
    (5001, "publication"),
    (5002, "cursor"),
)


def test_random_pipelines_end_with_what_the_source_recorded(
    postgres: EmbeddedPostgres, spark_server: SparkServer, tmp_home: Path
) -> None:
    said: list[str] = []
    with serving(postgres.start(), spark_server.ensure(), tmp_home) as servers:
        for seed, focus in SEEDS:
            plan = make(seed, focus)
            assert World(servers, plan, said.append).play() == [], plan.dump()
