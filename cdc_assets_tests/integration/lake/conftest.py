"""What tests of catalogs that lend keys have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets_tests.support.s3 import KEYS


@pytest.fixture
def keyless_spark(tmp_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Spark server that has no keys of S3, as this process by then."""
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    spark = SparkServer(SparkServerSettings(conf={"spark.app.id": "keyless"}), tmp_home)
    try:
        yield spark.ensure()
    finally:
        spark.stop()
