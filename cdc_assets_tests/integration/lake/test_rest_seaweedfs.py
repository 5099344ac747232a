"""The REST catalog of SeaweedFS: with OAuth2, and keys that it lends with each table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import lake, used
from cdc_assets_tests.support.s3 import REGION
from cdc_assets_tests.support.seaweedfs import WAREHOUSE, SeaweedFs, seaweedfs

pytestmark = [pytest.mark.spark, pytest.mark.soak, pytest.mark.timeout(1800)]

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFs]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


def _settings(server: SeaweedFs, secret: str, version: int) -> dict[str, Any]:
    properties = {
        "credential": f"{server.key_id}:{secret}",
        "oauth2-server-uri": f"{server.catalog}/v1/oauth/tokens",
        "header.X-Iceberg-Access-Delegation": "vended-credentials",
    }
    catalog = {
        "type": "rest",
        "uri": server.catalog,
        "warehouse": f"s3://{WAREHOUSE}",
        "properties": properties,
    }
    s3 = {"endpoint": server.s3, "region": REGION, "path_style": True}
    return {"s3": s3, "lake": {"catalog": catalog, "format_version": version}}


@pytest.mark.parametrize("version", [2, 3])
def test_seaweedfs_from_check_to_purge(
    postgres_dsn: NewDatabase, keyless_spark: str, server: SeaweedFs, version: int
) -> None:
    settings = _settings(server, server.secret, version)
    with lake(postgres_dsn(), keyless_spark, SETUP, "t", **settings) as source:
        assert [finding for finding in review(source.config) if finding.severity == "error"] == []
        source.pin()
        source.copy()
        used(source, T)
        assert source.lake_table(T).load() is None
    assert server.listed() == []


def test_a_wrong_secret_is_told(
    postgres_dsn: NewDatabase, keyless_spark: str, server: SeaweedFs
) -> None:
    settings = _settings(server, "wr0ng", 2)
    with lake(postgres_dsn(), keyless_spark, SETUP, "t", **settings) as source:
        found = {finding.code: finding for finding in review(source.config)}
        assert found["catalog_unwritable"].severity == "error"
        assert "wr0ng" not in str(found)
