"""A REST catalog that wants a credential is opened by Spark and pyiceberg alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pyiceberg.exceptions import NoSuchNamespaceError
from pyspark.errors import PySparkException

from cdc_assets.lake.catalog.catalog import shown
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.support.lake import NewLake, used
from cdc_assets_tests.support.rest_catalog import CREDENTIAL, SCOPE, RestCatalog, rest_catalog

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)
ACCESS = {
    "credential": CREDENTIAL,
    "scope": SCOPE,
    "header.X-Iceberg-Access-Delegation": "vended-credentials",
}


def _catalog(uri: str, warehouse: str, properties: dict[str, str]) -> dict[str, Any]:
    catalog = {"type": "rest", "uri": uri, "warehouse": warehouse, "properties": properties}
    return {"lake": {"catalog": catalog}}


def _protected(server: RestCatalog, warehouse: str) -> dict[str, Any]:
    return _catalog(server.uri, warehouse, ACCESS | server.access)


@pytest.mark.parametrize("token_seconds", [3600.0, 2.0])
def test_a_protected_rest_catalog_from_copy_to_purge(
    copied_lake: NewLake, tmp_path: Path, token_seconds: float
) -> None:
    """In format version 2: pyiceberg, which the server keeps its tables by, upgrades none to 3."""
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_catalog(tmp_path, warehouse, token_seconds=token_seconds) as server:
        settings = _protected(server, warehouse)
        settings["lake"]["format_version"] = 2
        with copied_lake(SETUP, "t", **settings) as source:
            used(source, T)
            # pyiceberg fetches another token when one is refused.
            assert (server.refused > 0) == (token_seconds < 60)
            assert "vended-credentials" in server.headers
            assert len(server.agents) > 1, "Spark and pyiceberg both came"
            assert "s3cret" not in repr(source.config) + json.dumps(shown(source.config))
        assert server.tables.list_tables("src") == []


def test_a_catalog_that_cannot_be_opened_when_a_merge_begins(
    copied_lake: NewLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark takes that for a fault of its own; the catalog's word is told, and it is asked anew.

    Of a draft's merge Spark doesn't ask it.
    """
    monkeypatch.setattr("cdc_assets.lake.publish.table_draft", lambda *_: None)
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_catalog(tmp_path, warehouse) as server:
        settings = _protected(server, warehouse)
        settings["lake"]["format_version"] = 2
        with copied_lake(SETUP, "t", **settings) as source:
            source.execute("update t set v = 'y' where id > 50")
            away, opened = NoSuchNamespaceError("away for a moment"), server.config()
            server.config = Mock(side_effect=away)
            with pytest.raises(PySparkException, match="away for a moment"):
                source.catch_up()
            server.config = Mock(side_effect=[away, opened])
            source.catch_up()
            assert source.equal(T)


def test_a_wrong_credential_is_told_before_anything_begins(
    new_lake: NewLake, tmp_path: Path
) -> None:
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_catalog(tmp_path, warehouse) as server:
        wrong = {**ACCESS, "credential": "reader:wr0ng"}
        with new_lake(SETUP, "t", **_catalog(server.uri, warehouse, wrong)) as source:
            found = {finding.code: finding for finding in review(source.config)}
            assert "wr0ng" not in str(found)
            assert found["catalog_unwritable"].severity == "error"


def test_a_catalog_that_no_merge_can_be_made_in_is_told(new_lake: NewLake, tmp_path: Path) -> None:
    warehouse = f"file://{tmp_path}/warehouse"
    with (
        rest_catalog(tmp_path, warehouse, branches=False) as server,
        new_lake(SETUP, "t", **_protected(server, warehouse)) as source,
    ):
        found = {f.code for f in review(source.config) if f.severity == "error"}
        assert found == {"catalog_branches", "catalog_version"}
        assert server.tables.list_namespaces() == []
    assert not [path for path in tmp_path.rglob("warehouse/**/*") if path.is_file()]
