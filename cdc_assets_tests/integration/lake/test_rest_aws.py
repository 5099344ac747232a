"""REST catalogs as AWS and others have them: signed requests, and keys for S3 that they lend."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import Lake, NewLake, copied, used
from cdc_assets_tests.support.rest_catalog import (
    CREDENTIAL,
    REGION,
    SCOPE,
    SERVICE,
    RestCatalog,
    rest_catalog,
)
from cdc_assets_tests.support.s3 import KEYS, ObjectStore
from cdc_assets_tests.support.sigv4 import Key

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)
OURS = Key(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"])
SIGNED = {
    "rest.sigv4-enabled": "true",
    "rest.signing-region": REGION,
    "rest.signing-name": SERVICE,
}


def _settings(server: RestCatalog, warehouse: str, properties: dict[str, str]) -> dict[str, Any]:
    """Version 2: pyiceberg, which the server keeps its tables by, upgrades none to 3."""
    catalog = {"type": "rest", "uri": server.uri, "warehouse": warehouse, "properties": properties}
    return {"lake": {"catalog": catalog, "format_version": 2}}


def _used(source: Lake, server: RestCatalog) -> None:
    used(source, T)
    assert len(server.agents) > 1, "Spark and pyiceberg both came"
    assert server.located == set()


def test_each_request_is_signed(copied_lake: NewLake, tmp_path: Path) -> None:
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_catalog(tmp_path, warehouse, key=OURS) as server:
        with copied_lake(SETUP, "t", **_settings(server, warehouse, SIGNED)) as source:
            _used(source, server)
        assert server.refused == 0
        assert server.tables.list_tables("src") == []


@pytest.mark.parametrize(
    ("secret", "wrong"),
    [
        (OURS.secret, {"rest.signing-region": "eu-west-9"}),
        (OURS.secret, {"rest.signing-name": "glue"}),
        ("another", {}),
    ],
)
def test_a_request_that_is_signed_otherwise_is_refused(
    new_lake: NewLake, tmp_path: Path, secret: str, wrong: dict[str, str]
) -> None:
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_catalog(tmp_path, warehouse, key=Key(OURS.id, secret)) as server:
        settings = _settings(server, warehouse, {**SIGNED, **wrong})
        with new_lake(SETUP, "t", **settings) as source:
            found = {finding.code: finding for finding in review(source.config)}
            assert found["catalog_unwritable"].severity == "error"
            assert server.refused


@pytest.mark.aws
def test_keys_that_the_catalog_lends(
    postgres_dsn: NewDatabase, s3: ObjectStore, keyless_spark: str, tmp_path: Path
) -> None:
    """Neither Spark nor pyiceberg has any of its own, and each one that is lent ends.

    The warehouse has a name, of which only the catalog knows where it is.
    """
    own = Key("catalog", secrets.token_hex(16))
    s3.keys = {own.id: own}

    def lent() -> dict[str, str]:
        key = Key(secrets.token_hex(8), secrets.token_hex(16), secrets.token_hex(16))
        assert s3.keys is not None
        assert key.token is not None
        s3.keys[key.id] = key
        return {
            "s3.access-key-id": key.id,
            "s3.secret-access-key": key.secret,
            "s3.session-token": key.token,
        }

    files = {
        "s3.endpoint": str(s3.settings["endpoint"]),
        "s3.region": str(s3.settings["region"]),
        "s3.force-virtual-addressing": "false",
        "s3.access-key-id": own.id,
        "s3.secret-access-key": own.secret,
    }
    warehouse = "s3://bucket/warehouse"
    with rest_catalog(tmp_path, warehouse, files, lent=lent) as server:
        access = {
            "credential": CREDENTIAL,
            "scope": SCOPE,
            "oauth2-server-uri": f"{server.uri}/v1/oauth/tokens",
            "header.X-Iceberg-Access-Delegation": "vended-credentials",
        }
        settings = {"s3": s3.settings, **_settings(server, "analytics", access)}
        settings["lake"]["catalog"]["locations"] = ["s3://bucket"]
        with copied(postgres_dsn(), keyless_spark, SETUP, "t", **settings) as source:
            s3.keys = {own.id: own}
            _used(source, server)
            assert s3.refused == {}
    assert len(s3.keys) > 1
