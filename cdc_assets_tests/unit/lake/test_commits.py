"""A commit by ``lake.catalog.commits`` is made once, whole or not at all, whatever meets it."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.typedef import Identifier
from pyiceberg.types import IntegerType, NestedField
from sqlalchemy.exc import OperationalError

from cdc_assets.lake.catalog import commits
from cdc_assets.lake.catalog.commits import Metadata, edited
from cdc_assets.lake.catalog.parsed import ParsedOnce
from cdc_assets.lake.drafts.metadata import main_of

SCHEMA = Schema(NestedField(1, "id", IntegerType(), required=False))
ROW = pa.table({"id": pa.array([1], pa.int32())})
TABLE = ("n", "t")


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ParsedOnce:
    monkeypatch.setattr(commits, "_PAUSE_SECONDS", 0)
    uri = f"sqlite:///{tmp_path}/catalog.db"
    found = ParsedOnce("c", uri=uri, warehouse=tmp_path.as_uri())
    found.create_namespace("n")
    found.create_table(TABLE, SCHEMA, properties={"write.metadata.previous-versions-max": "3"})
    found.load_table(TABLE).append(ROW)
    return found


def branched(metadata: Metadata) -> bool:
    metadata["refs"]["b"] = {"snapshot-id": main_of(metadata), "type": "branch"}
    return True


def raw(catalog: ParsedOnce) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path(catalog.led_to(TABLE)).read_text())
    return found


def path(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def files(catalog: ParsedOnce) -> set[str]:
    folder = path(catalog.led_to(TABLE)).parent
    return {found.name for found in folder.glob("*.json*")}


@contextmanager
def nothing_done(catalog: ParsedOnce) -> Iterator[None]:
    """What is there is what was there, and no file is left."""
    before, there = catalog.led_to(TABLE), files(catalog)
    yield
    assert catalog.led_to(TABLE) == before
    assert files(catalog) == there


def test_a_commit_follows_the_former_one(catalog: ParsedOnce) -> None:
    loaded, before, metadata = catalog.load_table(TABLE), catalog.led_to(TABLE), raw(catalog)
    assert edited(catalog, loaded, branched)
    after = raw(catalog)
    assert after["refs"].pop("b")["snapshot-id"] == main_of(metadata)
    last = {"timestamp-ms": metadata["last-updated-ms"], "metadata-file": before}
    assert after.pop("metadata-log") == [*metadata.pop("metadata-log"), last]
    assert after == metadata
    number, _, rest = catalog.led_to(TABLE).rpartition("/")[2].partition("-")
    assert number == "00002" and rest.endswith(".metadata.json")
    assert set(catalog.load_table(TABLE).metadata.refs) == {"main", "b"}


def test_what_nobody_here_knows_stays_as_it_is(catalog: ParsedOnce) -> None:
    other = {"of-others": [1.5, None, "ü\u2028", 2**62], "format-version": 3, "next-row-id": 7}
    place = path(catalog.led_to(TABLE))
    place.write_text(json.dumps({**raw(catalog), **other}))
    assert edited(catalog, catalog.load_table(TABLE), branched)
    assert raw(catalog).items() >= other.items()


@pytest.mark.parametrize("deletes", [True, False])
def test_former_files_are_listed_and_kept_as_the_table_says(
    catalog: ParsedOnce, *, deletes: bool
) -> None:
    with catalog.load_table(TABLE).transaction() as change:
        key = "write.metadata.delete-after-commit.enabled"
        change.set_properties({key: str(deletes).lower()})
    folder = path(catalog.led_to(TABLE)).parent
    for name in files(catalog):
        (folder / f".{name}.crc").touch()  # as Spark writes it in a local folder
    for _ in range(5):
        assert edited(catalog, catalog.load_table(TABLE), branched)
    listed = [entry["metadata-file"] for entry in raw(catalog)["metadata-log"]]
    assert len(listed) == 3
    there = {path(uri).name for uri in [*listed, catalog.led_to(TABLE)]}
    assert (files(catalog) == there) is deletes
    assert files(catalog) >= there
    assert bool(list(folder.glob(".*.crc"))) is not deletes


def test_another_commit_that_comes_first_is_kept(
    catalog: ParsedOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, tries = ParsedOnce.lead, list[str]()

    def beaten(self: ParsedOnce, table: Identifier, former: str, new: str) -> bool:
        tries.append(new)
        if len(tries) < 3:
            with catalog.load_table(TABLE).transaction() as change:
                change.set_properties({f"said{len(tries)}": "x"})
        return lead(self, table, former, new)

    loaded = catalog.load_table(TABLE)
    monkeypatch.setattr(ParsedOnce, "lead", beaten)
    assert edited(catalog, loaded, branched)
    found = catalog.load_table(TABLE)
    assert {"said1", "said2"} <= set(found.properties) and "b" in found.metadata.refs
    assert [path(uri).exists() for uri in tries] == [False, False, True]


def test_no_file_elsewhere_is_deleted_whatever_metadata_names(catalog: ParsedOnce) -> None:
    with catalog.load_table(TABLE).transaction() as change:
        change.set_properties({"write.metadata.delete-after-commit.enabled": "true"})
    place = path(catalog.led_to(TABLE))
    other = place.parents[1] / "data.parquet"
    other.touch()
    log = [{"timestamp-ms": 0, "metadata-file": other.as_uri()}, *raw(catalog)["metadata-log"]]
    place.write_text(json.dumps({**raw(catalog), "metadata-log": log}))
    for _ in range(5):
        assert edited(catalog, catalog.load_table(TABLE), branched)
    assert other.exists() and len(raw(catalog)["metadata-log"]) == 3


@pytest.mark.parametrize("done", ["before", "after", "after, and another came"])
def test_an_answer_that_is_lost_is_asked_for_again(
    catalog: ParsedOnce, monkeypatch: pytest.MonkeyPatch, done: str
) -> None:
    lead, tries, loaded = ParsedOnce.lead, list[str](), catalog.load_table(TABLE)

    def lost(self: ParsedOnce, table: Identifier, former: str, new: str) -> bool:
        tries.append(new)
        if len(tries) == 1:
            if done != "before":
                assert lead(self, table, former, new)
            if done.endswith("came"):
                with catalog.load_table(TABLE).transaction() as change:
                    change.set_properties(said="x")
            raise OperationalError("update", {}, Exception("gone"))
        return lead(self, table, former, new)

    made = list[int]()

    def once(metadata: Metadata) -> bool:
        made.append(1)
        return branched(metadata)

    monkeypatch.setattr(ParsedOnce, "lead", lost)
    assert edited(catalog, loaded, once)
    assert len(made) == 1 and len(set(tries)) == 1
    assert "b" in catalog.load_table(TABLE).metadata.refs


def test_a_catalog_that_stays_away_is_told_and_the_file_stays(
    catalog: ParsedOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last try may have been carried out: then the catalog leads to the file."""
    loaded, before = catalog.load_table(TABLE), files(catalog)

    def lost(*_: object) -> bool:
        raise OperationalError("update", {}, Exception("gone"))

    monkeypatch.setattr(ParsedOnce, "lead", lost)
    with pytest.raises(OperationalError):
        edited(catalog, loaded, branched)
    assert len(files(catalog) - before) == 1


def _compressed(catalog: ParsedOnce) -> None:
    with catalog.load_table(TABLE).transaction() as change:
        change.set_properties({"write.metadata.compression-codec": "gzip"})


def _elsewhere(catalog: ParsedOnce) -> None:
    with catalog.load_table(TABLE).transaction() as change:
        change.set_properties({"write.metadata.path": "file:///elsewhere"})


def _later_version(catalog: ParsedOnce) -> None:
    place = path(catalog.led_to(TABLE))
    place.write_text(json.dumps({**raw(catalog), "format-version": 4}))


def _broken(catalog: ParsedOnce) -> None:
    path(catalog.led_to(TABLE)).write_text('{"format-version": 2')


def _gone(catalog: ParsedOnce) -> None:
    path(catalog.led_to(TABLE)).unlink()


def _another_table(catalog: ParsedOnce) -> None:
    place = path(catalog.led_to(TABLE))
    other = {**raw(catalog), "table-uuid": "00000000-0000-0000-0000-000000000000"}
    place.write_text(json.dumps(other))


def _led_astray(catalog: ParsedOnce) -> None:
    """To metadata that is right in all but its place."""
    place = path(catalog.led_to(TABLE))
    astray = place.parents[2] / "astray" / place.name
    astray.parent.mkdir()
    properties = {"write.metadata.path": astray.parent.as_uri()}
    astray.write_text(json.dumps({**raw(catalog), "properties": properties}))
    assert catalog.lead(TABLE, catalog.led_to(TABLE), astray.as_uri())


@pytest.mark.parametrize(
    "change",
    [_compressed, _elsewhere, _later_version, _broken, _gone, _another_table, _led_astray],
)
def test_what_it_does_not_know_is_left_to_spark(catalog: ParsedOnce, change: Any) -> None:
    loaded = catalog.load_table(TABLE)
    change(catalog)
    with nothing_done(catalog):
        assert not edited(catalog, loaded, branched)


def test_where_it_may_not_write_spark_has_to(
    catalog: ParsedOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = catalog.load_table(TABLE)

    def refused(*_: object) -> None:
        raise PermissionError("read-only")

    with nothing_done(catalog), monkeypatch.context() as patched:
        patched.setattr(PyArrowFileIO, "new_output", refused)
        assert not edited(catalog, loaded, branched)


def test_a_file_that_is_half_written_is_removed(
    catalog: ParsedOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, output = catalog.load_table(TABLE), PyArrowFileIO.new_output

    def full(io: PyArrowFileIO, location: str) -> Any:
        path(location).write_text("{")
        raise OSError(28, "No space left on device")

    with nothing_done(catalog), monkeypatch.context() as patched:
        patched.setattr(PyArrowFileIO, "new_output", full)
        assert not edited(catalog, loaded, branched)
    assert PyArrowFileIO.new_output is output


def test_a_table_that_is_gone_is_left_to_spark(catalog: ParsedOnce) -> None:
    loaded: Table = catalog.load_table(TABLE)
    catalog.drop_table(TABLE)
    with pytest.raises(NoSuchTableError):
        catalog.led_to(TABLE)
    assert not edited(catalog, loaded, branched)


def test_an_edit_that_raises_or_changes_nothing_commits_nothing(catalog: ParsedOnce) -> None:
    loaded = catalog.load_table(TABLE)

    def raises(metadata: Metadata) -> bool:
        branched(metadata)
        raise KeyError("b")

    with nothing_done(catalog):
        with pytest.raises(KeyError):
            edited(catalog, loaded, raises)
        assert edited(catalog, loaded, lambda _: False)


def with_properties(catalog: ParsedOnce, given: dict[str, str]) -> None:
    """Give the table properties as Spark does, which pyiceberg might refuse."""
    found = raw(catalog)
    changed = {**found, "properties": {**found["properties"], **given}}
    path(catalog.led_to(TABLE)).write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("value", "deletes"),
    [("TRUE", True), ("yes", False), ("1", False), ("never", False), ("", False)],
)
def test_former_files_are_deleted_where_iceberg_would(
    catalog: ParsedOnce, value: str, *, deletes: bool
) -> None:
    with_properties(catalog, {"write.metadata.delete-after-commit.enabled": value})
    before, loaded = files(catalog), catalog.load_table(TABLE)
    for _ in range(5):
        assert edited(catalog, loaded, branched)
    assert (not before <= files(catalog)) is deletes


@pytest.mark.parametrize(
    "given",
    [
        {"write.py-location-provider.impl": "no.such.Provider"},
        {"write.py-location-provider.impl": "this.Provider"},
        {"write.object-storage.enabled": "maybe"},
    ],
    ids=str,
)
def test_properties_that_place_data_files_are_not_asked(
    catalog: ParsedOnce, given: dict[str, str]
) -> None:
    """Whoever may write in the catalog would name code that runs here."""
    loaded = catalog.load_table(TABLE)
    with_properties(catalog, given)
    assert edited(catalog, loaded, branched)
    assert "b" in raw(catalog)["refs"]
    assert "this" not in sys.modules


def test_a_commit_that_compresses_the_metadata_may_come_first(
    catalog: ParsedOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, loaded, before = ParsedOnce.lead, catalog.load_table(TABLE), files(catalog)

    def beaten(self: ParsedOnce, table: Identifier, former: str, new: str) -> bool:
        place = path(former)
        theirs = place.with_name(f"{place.name.partition('.')[0]}.gz.metadata.json")
        theirs.write_bytes(gzip.compress(place.read_bytes()))
        assert lead(self, table, former, theirs.as_uri())
        return lead(self, table, former, new)

    monkeypatch.setattr(ParsedOnce, "lead", beaten)
    assert not edited(catalog, loaded, branched)
    [theirs] = files(catalog) - before
    assert ".gz." in theirs
