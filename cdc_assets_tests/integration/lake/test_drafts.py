"""A merge is written as a draft, and published by one commit (``lake.drafts.tables``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.errors import Fenced, TableProblem
from cdc_assets.lake.catalog.commits import OnlySpark
from cdc_assets.lake.catalog.drafts import DRAFTS
from cdc_assets.lake.catalog.parsed import ParsedOnce
from cdc_assets.lake.drafts.tables import table_draft
from cdc_assets.lake.spark.session import open_session
from cdc_assets.maintenance.compact import Busy
from cdc_assets.maintenance.expire import remove_orphans
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer import drain as drain_module
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.drafts import before_publishing
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


def entries(source: Lake) -> list[str]:
    """The places of the drafts that the catalog knows."""
    found = source.execute(
        f"select metadata_location from _pg2iceberg.iceberg_tables where catalog_name = '{DRAFTS}'"
    )
    return [str(place) for (place,) in found]


def test_what_others_do_to_the_table_beside_a_merge_is_kept(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged(source, "update t set v = 'first'")
    name, others = source.lake_table(T).sql_name, open_session(source.config)
    others.sql(f"alter table {name} create branch theirs")
    for i in range(3):
        merged(source, f"update t set v = 'v{i}' where id < 50")

    def act() -> None:
        others.sql(f"alter table {name} set tblproperties ('theirs' = 'x')")
        others.sql(f"alter table {name} create tag tagged")
        others.sql(f"alter table {name} alter column v comment 'theirs'")
        others.sql(f"alter table {name} write ordered by v")
        expired = "call lake.system.expire_snapshots(table => 'src.t', retain_last => 1, older_than"
        others.sql(f"{expired} => timestamp '{datetime.now(UTC):%Y-%m-%d %H:%M:%S}')")

    with before_publishing(monkeypatch, act):
        merged(source, "update t set v = 'beside' where id < 50; delete from t where id > 90")
    loaded = source.lake_table(T).loaded()
    assert loaded.properties["theirs"] == "x"
    assert set(loaded.metadata.refs) == {"main", "theirs", "tagged"}
    assert loaded.schema().find_field("v").doc == "theirs"
    assert not loaded.sort_order().is_unsorted
    assert source.equal(T) and entries(source) == []
    merged(source, "update t set v = 'after' where id < 50")
    assert source.equal(T)
    assert sorted(loaded.refresh().scan().to_arrow()["v"].to_pylist()) == sorted(
        v for (v,) in source.execute("select v from t")
    )
    others.stop()


def test_a_snapshot_of_others_on_a_branch_delays_a_merge_once(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their snapshot has the number that the merge's was to have: the next merge is a branch."""
    merged(source, "update t set v = 'first'")
    name, others = source.lake_table(T).sql_name, open_session(source.config)
    others.sql(f"alter table {name} create branch theirs")

    def act() -> None:
        others.sql(f"insert into {name}.branch_theirs values (1000, 'theirs')")

    source.execute("update t set v = 'beside' where id < 50")
    source.flush()
    with before_publishing(monkeypatch, act), pytest.raises(Fenced, match="came between"):
        source.drain(T)
    assert entries(source) == []
    asked = merged(source, "delete from t where id > 90")
    assert any("create branch" in said for said in asked)
    assert source.equal(T)
    assert merged(source, "update t set v = 'after' where id < 50") == []
    assert source.equal(T)
    there = others.sql(f"select v from {name}.branch_theirs where id = 1000").collect()
    assert [row[0] for row in there] == ["theirs"]
    others.stop()


def test_a_commit_of_others_to_main_fences_a_merge(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged(source, "update t set v = 'first'")
    name, others = source.lake_table(T).sql_name, open_session(source.config)
    source.execute("update t set v = 'beside' where id < 50")
    source.flush()

    def act() -> None:
        others.sql(f"insert into {name} select * from {name} limit 0")

    with before_publishing(monkeypatch, act), pytest.raises(Fenced, match="another writer"):
        source.drain(T)
    source.drain(T)
    assert source.equal(T) and entries(source) == [] and left(source) == set()
    others.stop()


def test_a_table_that_keeps_one_former_file_loses_none_that_it_needs(source: Lake) -> None:
    name = source.lake_table(T).sql_name
    source.session.sql(
        f"alter table {name} set tblproperties ('write.metadata.previous-versions-max' = '1')"
    )
    for i in range(3):
        merged(source, f"update t set v = 'v{i}' where id < 50; delete from t where id = {99 - i}")
        assert source.equal(T) and left(source) == set()


def test_the_draft_of_a_dead_writer_is_gone_with_the_next_one(source: Lake) -> None:
    merged(source, "update t set v = 'first'")
    table, own = source.lake_table(T), open_session(source.config)
    loaded, state = table.loaded(), table.state()
    assert state.snapshot_id is not None
    dead = table_draft(own, table, state.snapshot_id, loaded)
    assert dead is not None and len(entries(source)) == 1
    own.sql(f"insert into {dead.sql_name} values (2000, 'dead')")
    assert source.equal(T)
    merged(source, "update t set v = 'next' where id < 50")
    assert entries(source) == []
    with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
        own.sql(f"insert into {dead.sql_name} values (2001, 'late')")
    with pytest.raises(Fenced):
        dead.publish()
    assert source.equal(T)
    own.stop()


def test_a_draft_that_is_led_astray_is_not_published(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged(source, "update t set v = 'first'")

    def act() -> None:
        [place] = entries(source)
        path = Path(place.removeprefix("file:"))
        astray = path.parents[3] / "astray" / path.name
        astray.parent.mkdir()
        astray.write_bytes(path.read_bytes())
        source.execute(
            f"update _pg2iceberg.iceberg_tables set metadata_location = '{astray.as_uri()}'"
            f" where catalog_name = '{DRAFTS}'"
        )

    source.execute("update t set v = 'beside' where id < 50")
    source.flush()
    with before_publishing(monkeypatch, act), pytest.raises(TableProblem, match="of a draft is"):
        source.drain(T)
    source.drain(T)
    assert source.equal(T) and entries(source) == []


def test_orphans_are_looked_for_when_no_draft_is_under_way(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge may take as long as orphans are left alone: a machine that slept is one."""
    merged(source, "update t set v = 'first'")
    monkeypatch.setattr("cdc_assets.maintenance.compact.LOCK_SECONDS", 0.5)
    table, now = source.lake_table(T), source.pipeline.store.server_now()
    long_ago = (now - 2 * source.config.maintenance.orphan_grace).timestamp()

    def act() -> None:
        folder = Path(table.loaded().location().removeprefix("file:"))
        for found in (folder / "data").rglob("*"):  # written long before they were committed
            os.utime(found, (long_ago, long_ago))
        with Pipeline.open(source.config) as other, suppress(Busy):
            remove_orphans(other.store, table, lambda: source.session, now)

    with before_publishing(monkeypatch, act):
        merged(source, "update t set v = 'beside' where id < 50; delete from t where id > 90")
    assert source.equal(T)
    table, state = source.lake_table(T), source.lake_table(T).state()
    assert state.snapshot_id is not None
    late = table_draft(source.session, table, state.snapshot_id, table.loaded())
    assert late is not None
    remove_orphans(source.pipeline.store, table, lambda: source.session, now)
    with pytest.raises(Fenced):
        late.publish()


def test_where_this_process_may_not_publish_merges_go_on_by_branches(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a role may write a Glue catalog by Spark alone."""
    merged(source, "update t set v = 'first'")

    def refused(*_: object) -> bool:
        raise OnlySpark

    source.execute("update t set v = 'refused' where id < 50")
    source.flush()
    monkeypatch.setattr(ParsedOnce, "lead", refused)
    with pytest.raises(Fenced, match="couldn't be written"):
        source.drain(T)
    for i in range(3):
        asked = merged(source, f"update t set v = 'v{i}' where id < 50")
        assert any("create branch" in said for said in asked)
        assert source.equal(T)
    assert entries(source) == [] and left(source) == set()
