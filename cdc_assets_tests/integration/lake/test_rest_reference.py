"""Iceberg's own REST catalog server: in Java, of another version than its clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.lake import NewLake, used
from cdc_assets_tests.support.rest_reference import rest_reference

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)


@pytest.mark.parametrize("version", [2, 3])
def test_the_reference_server_from_copy_to_purge(
    copied_lake: NewLake, postgres_dsn: NewDatabase, tmp_path: Path, version: int
) -> None:
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_reference(postgres_dsn(), warehouse) as uri:
        catalog: dict[str, Any] = {"type": "rest", "uri": uri, "warehouse": warehouse}
        lake = {"catalog": catalog, "format_version": version}
        with copied_lake(SETUP, "t", lake=lake) as source:
            used(source, T)
            assert source.lake_table(T).load() is None
    assert not list(tmp_path.rglob("*.parquet"))
