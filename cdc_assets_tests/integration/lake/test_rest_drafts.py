"""A merge into a REST catalog's table is one commit there, beside whatever others do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced
from cdc_assets.lake.spark.session import open_session
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.drafts import before_publishing
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.rest_catalog import rest_catalog
from cdc_assets_tests.support.rest_reference import rest_reference

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)


@pytest.fixture(params=[2, 3], ids="format-v{}".format)
def source(
    request: pytest.FixtureRequest,
    copied_lake: NewLake,
    postgres_dsn: NewDatabase,
    tmp_path: Path,
) -> Iterator[Lake]:
    """A copied table, and one merge, in the catalog that Iceberg tests its own clients with."""
    warehouse = f"file://{tmp_path}/warehouse"
    with rest_reference(postgres_dsn(), warehouse) as uri:
        catalog: dict[str, Any] = {"type": "rest", "uri": uri, "warehouse": warehouse}
        lake = {"catalog": catalog, "format_version": request.param}
        with copied_lake(SETUP, "t", lake=lake) as opened:
            opened.catch_up()
            merge(opened, "update t set v = 'first'")
            yield opened


def merge(source: Lake, statement: str) -> None:
    source.execute(statement)
    source.flush()
    source.drain(T)


@pytest.fixture
def others(source: Lake) -> Iterator[SparkSession]:
    session = open_session(source.config)
    yield session
    session.stop()


def test_a_merge_is_one_commit(copied_lake: NewLake, tmp_path: Path) -> None:
    warehouse, made = f"file://{tmp_path}/warehouse", Counter[str]()
    with rest_catalog(tmp_path, warehouse) as server:
        catalog: dict[str, Any] = {"type": "rest", "uri": server.uri, "warehouse": warehouse}
        lake = {"catalog": {**catalog, "properties": server.access}, "format_version": 2}
        with copied_lake(SETUP, "t", lake=lake) as source:
            merge(source, "update t set v = 'first'")

            def at_commit(commit: Any) -> Any:
                made["commits"] += 1
                return commit()

            server.at_commit = at_commit
            for i in range(3):
                merge(
                    source, f"update t set v = 'v{i}' where id < 50; delete from t where id = {i}"
                )
            assert source.equal(T)
            assert made["commits"] == 3
            loaded = source.lake_table(T).loaded()
            assert list(loaded.metadata.refs) == ["main"]
            folder = Path(loaded.metadata_location.removeprefix("file:")).parent
            known = {
                loaded.metadata_location,
                *(e.metadata_file for e in loaded.metadata.metadata_log),
            }
            names = {uri.rpartition("/")[2] for uri in known}
            assert {found.name for found in folder.glob("*.json")} == names, "no draft's is left"


def test_readers_of_a_moment_meet_no_half_of_a_merge(source: Lake) -> None:
    before = source.lake_table(T).loaded().metadata
    for i in range(3):
        merge(source, f"update t set v = 'v{i}' where id < 50; delete from t where id = {i + 1}")
    after = source.lake_table(T).loaded().metadata
    known = {entry.snapshot_id for entry in before.snapshot_log}
    assert len([e for e in after.snapshot_log if e.snapshot_id not in known]) == 3
    assert len(after.snapshots) - len(before.snapshots) == 6
    assert source.equal(T)


def test_what_others_do_to_the_table_beside_a_merge_is_kept(
    source: Lake, others: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = source.lake_table(T).sql_name
    others.sql(f"alter table {name} create branch theirs")

    def act() -> None:
        others.sql(f"alter table {name} set tblproperties ('theirs' = 'x')")
        others.sql(f"alter table {name} create tag tagged")
        others.sql(f"alter table {name} alter column v comment 'theirs'")

    with before_publishing(monkeypatch, act):
        merge(source, "update t set v = 'beside' where id < 50; delete from t where id > 90")
    loaded = source.lake_table(T).loaded()
    assert loaded.properties["theirs"] == "x"
    assert set(loaded.metadata.refs) == {"main", "theirs", "tagged"}
    assert loaded.schema().find_field("v").doc == "theirs"
    assert source.equal(T)
    merge(source, "update t set v = 'after' where id < 50")
    assert source.equal(T)


def test_a_snapshot_of_others_on_a_branch_delays_a_merge_once(
    source: Lake, others: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their snapshot has the number that the merge's was to have: the next merge is a branch."""
    name = source.lake_table(T).sql_name
    others.sql(f"alter table {name} create branch theirs")
    source.execute("update t set v = 'beside' where id < 50")
    source.flush()
    theirs = f"insert into {name}.branch_theirs values (1000, 'theirs')"
    with (
        before_publishing(monkeypatch, lambda: others.sql(theirs)),
        pytest.raises(Fenced, match="came between"),
    ):
        source.drain(T)
    for i in range(2):
        merge(source, f"update t set v = 'v{i}' where id < 50; delete from t where id = {90 + i}")
        assert source.equal(T)
    there = others.sql(f"select v from {name}.branch_theirs where id = 1000").collect()
    assert [row[0] for row in there] == ["theirs"]


def test_a_commit_of_others_to_main_fences_a_merge(
    source: Lake, others: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = source.lake_table(T).sql_name
    source.execute("update t set v = 'beside' where id < 50")
    source.flush()
    theirs = f"insert into {name} select * from {name} limit 0"
    with (
        before_publishing(monkeypatch, lambda: others.sql(theirs)),
        pytest.raises(Fenced, match="another writer"),
    ):
        source.drain(T)
    source.drain(T)
    assert source.equal(T)
