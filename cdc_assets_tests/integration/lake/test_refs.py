"""A merge's branch is made and published without Spark (``lake.catalog.refs``); Spark reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.lake.spark.session import open_session
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer import drain as drain_module
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = (
    "create table t (id int primary key, v text); insert into t select i, 'x' from"
    " generate_series(1, 99) i"
)


@pytest.fixture(params=[2, 3], ids="format-v{}".format)
def source(request: pytest.FixtureRequest, copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "t", lake={"format_version": request.param}) as opened:
        opened.catch_up()
        yield opened


class Heard:
    """A session that keeps what it was asked."""

    def __init__(self, session: Any) -> None:
        self._session, self.statements = session, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def sql(self, statement: str) -> Any:
        self.statements.append(statement)
        return self._session.sql(statement)


def merged(source: Lake, statement: str) -> list[str]:
    """Merge a change; what Spark was asked beside the writes of rows."""
    source.execute(statement)
    source.flush()
    heard: Any = Heard(source.session)
    assert drain_module.drain(source.pipeline, heard, T) is not None
    writes = ("merge into", "delete from", "select lake.system.iceberg_version")  # once a session
    return [said for said in heard.statements if not said.startswith(writes)]


def left(source: Lake) -> set[str]:
    """Files of the table's metadata folder that nothing leads to."""
    loaded = source.lake_table(T).loaded()
    uris = [loaded.metadata_location, *(e.metadata_file for e in loaded.metadata.metadata_log)]
    folder = Path(loaded.metadata_location.removeprefix("file:")).parent
    names = {uri.rpartition("/")[2] for uri in uris}
    checksums = {f".{name}.crc" for name in names}
    return {found.name for found in folder.glob("*.json*")} - names | (
        {found.name for found in folder.glob(".*json.crc")} - checksums
    )


def test_a_merge_asks_spark_for_its_writes_alone(source: Lake) -> None:
    merged(source, "update t set v = 'first'")  # its table is upgraded
    before = source.lake_table(T).loaded().metadata
    for i in range(25):
        asked = merged(source, f"update t set v = 'v{i}' where id % 5 = {i % 5}")
        assert asked == []
    after = source.lake_table(T).loaded().metadata
    assert list(after.refs) == ["main"]
    # Readers of a moment meet no half of a merge: its first commit is in no history.
    known = {entry.snapshot_id for entry in before.snapshot_log}
    entries = [e for e in after.snapshot_log if e.snapshot_id not in known]
    assert len(entries) == 25
    assert len(after.snapshots) - len(before.snapshots) == 50
    assert [e.timestamp_ms for e in entries] == sorted(e.timestamp_ms for e in entries)
    assert left(source) == set()
    assert source.equal(T)
    assert source.session.table(f"{source.lake_table(T).sql_name}.history").count() == len(
        after.snapshot_log
    )
    [done] = maintain(source.pipeline, lambda: source.session, [T])
    assert done.problem is None
    assert source.equal(T) and [one.equal for one in source.verify()] == [True]


def test_a_table_whose_metadata_is_compressed_is_merged_by_spark(source: Lake) -> None:
    merged(source, "update t set v = 'first'")
    name, others = source.lake_table(T).sql_name, open_session(source.config)
    others.sql(
        f"alter table {name} set tblproperties ('write.metadata.compression-codec' = 'gzip')"
    )
    asked = merged(source, "update t set v = 'second' where id < 50; delete from t where id > 90")
    assert ["create branch" in asked[0], "fast_forward" in asked[1], "drop branch" in asked[2]] == (
        [True] * 3
    )
    assert source.lake_table(T).loaded().metadata_location.endswith(".gz.metadata.json")
    assert source.equal(T)
    others.sql(f"alter table {name} unset tblproperties ('write.metadata.compression-codec')")
    assert merged(source, "update t set v = 'third' where id < 50") == []
    assert source.equal(T)
    others.stop()
