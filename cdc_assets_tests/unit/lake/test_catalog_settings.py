"""What Spark and pyiceberg are told about the catalog's region and files."""

from __future__ import annotations

from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.lake.catalog.catalog import pyiceberg_properties


def config(catalog: dict[str, Any], s3: dict[str, Any] | None = None) -> SourceConfig:
    given = {
        "name": "src",
        "postgres": {"dsn": "postgresql://db/shop"},
        "tables": [{"name": "t"}],
        "lake": {"catalog": catalog},
        "s3": s3 or {},
    }
    return parse_config(given, "test")


GLUE = {"type": "glue", "warehouse": "s3://bucket/warehouse"}


def test_glue_is_where_the_store_is_or_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    assert "client.region" not in pyiceberg_properties(config(GLUE))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert pyiceberg_properties(config(GLUE))["client.region"] == "eu-west-1"
    named = config(GLUE, {"region": "eu-north-1"})
    assert pyiceberg_properties(named)["client.region"] == "eu-north-1"
    said = {**GLUE, "properties": {"client.region": "us-east-2"}}
    properties = pyiceberg_properties(config(said, {"region": "eu-north-1"}))
    assert (properties["client.region"], properties["s3.region"]) == ("us-east-2", "eu-north-1")
