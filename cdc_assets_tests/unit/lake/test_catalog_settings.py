"""What Spark and pyiceberg are told about the catalog's region, and about keys of S3."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy.engine import URL

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.lake.catalog import catalog as module
from cdc_assets.lake.catalog.catalog import pyiceberg_properties, spark_settings
from cdc_assets.lake.catalog.drafts import draft_settings
from cdc_assets.log.staged.storage import Storage


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


KEY = {"access_key_id": "id", "secret_access_key": "s3cret", "session_token": "t0ken"}


@pytest.mark.parametrize(
    ("catalog", "told"),
    [
        ({"type": "rest", "uri": "https://lake", "warehouse": "analytics"}, True),
        ({"type": "rest", "uri": "https://lake", "warehouse": "file:///warehouse"}, False),
        ({"warehouse": "s3://bucket/warehouse"}, True),
        ({}, False),
    ],
)
def test_a_key_goes_where_files_may_be_in_s3(
    catalog: dict[str, Any], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_jdbc_settings", lambda _: {})
    monkeypatch.setattr(module, "sql_catalog_uri", lambda _: URL.create("postgresql"))
    monkeypatch.setattr(module, "_options", lambda _: "")
    given = config(catalog, {**KEY, "endpoint": "http://store"})
    spark, pyiceberg = spark_settings(given), pyiceberg_properties(given)
    for key, value in (("access-key-id", "id"), ("session-token", "t0ken")):
        assert spark.get(f"spark.sql.catalog.lake.s3.{key}") == (value if told else None)
        assert pyiceberg.get(f"s3.{key}") == (value if told else None)
    assert ("spark.sql.catalog.lake.s3.endpoint" in spark) is told
    storage = Storage.of(given.s3)
    assert storage.key == ("id", "s3cret", "t0ken")
    assert "s3cret" not in repr(storage) + repr(given)
    lent = {"s3.access-key-id": "lent", "s3.secret-access-key": "x", "s3.region": "eu-west-1"}
    assert Storage.of(given.s3, lent) == Storage(
        "http://store", "eu-west-1", False, ("lent", "x", None)
    )


@pytest.mark.parametrize("missing", ["access_key_id", "secret_access_key"])
def test_half_a_key_is_refused(missing: str) -> None:
    with pytest.raises(ConfigurationError, match="access_key_id and secret_access_key"):
        config({}, {name: value for name, value in KEY.items() if name != missing})


@pytest.mark.parametrize(
    "catalog", [GLUE, {"type": "rest", "uri": "http://catalog", "warehouse": "lakehouse"}]
)
def test_drafts_are_in_the_coordination_database_where_jdbc_reaches_it(
    catalog: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_place", lambda _: "")
    monkeypatch.setattr(module, "_ends_idle", lambda _: False)
    given = config(catalog)

    def of(address: str) -> dict[str, str]:
        state = given.state.model_copy(update={"postgres_url": SecretStr(address)})
        return draft_settings(given.model_copy(update={"state": state}))

    told = of("postgresql://state.example/cdc")
    assert told["spark.sql.catalog.cdc_drafts.type"] == "jdbc"
    assert told["spark.sql.catalog.cdc_drafts.uri"] == "jdbc:postgresql://state.example:5432/cdc"
    assert told["spark.sql.catalog.cdc_drafts.jdbc.loginTimeout"] == "10"
    assert told["spark.sql.catalog.cdc_drafts.jdbc.socketTimeout"] == "60"
    assert told["spark.sql.catalog.cdc_drafts.io-impl"].endswith(
        "S3FileIO" if catalog is GLUE else "ResolvingFileIO"
    )
    assert of("postgresql://state.example/cdc?ssl_min_protocol_version=TLSv1.3") == {}


def test_spark_is_opened_without_drafts_where_the_coordination_database_is_away() -> None:
    given = config({"type": "rest", "uri": "http://catalog", "warehouse": "lakehouse"})
    away = SecretStr("postgresql://127.0.0.1:1/away")
    state = given.state.model_copy(update={"postgres_url": away})
    assert draft_settings(given.model_copy(update={"state": state})) == {}
