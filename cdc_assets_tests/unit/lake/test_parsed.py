"""A metadata file is parsed once, and what a look shows is what the catalog says at that moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.serializers import FromInputFile
from pyiceberg.types import IntegerType, NestedField

from cdc_assets.lake.catalog import parsed
from cdc_assets.lake.catalog.parsed import ParsedOnce

SCHEMA = Schema(NestedField(1, "id", IntegerType(), required=False))


@pytest.fixture
def catalog(tmp_path: Path) -> ParsedOnce:
    uri = f"sqlite:///{tmp_path}/catalog.db"
    found = ParsedOnce("c", uri=uri, warehouse=tmp_path.as_uri())
    found.create_namespace("n")
    return found


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were parsed."""
    found, parse = list[str](), FromInputFile.table_metadata

    def counted(file: object, *arguments: object, **named: object) -> object:
        found.append(file.location)  # type: ignore[attr-defined]
        return parse(file, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(FromInputFile, "table_metadata", counted)
    return found


def test_a_file_is_parsed_once(catalog: ParsedOnce, parses: list[str]) -> None:
    catalog.create_table("n.t", SCHEMA)
    first, second = catalog.load_table("n.t"), catalog.load_table(("n", "t"))
    assert first == second
    assert len(parses) == len(set(parses)) == 1


def test_a_commit_of_anybody_is_seen_at_once(catalog: ParsedOnce, tmp_path: Path) -> None:
    catalog.create_table("n.t", SCHEMA)
    before = catalog.load_table("n.t")
    other = ParsedOnce("c", uri=catalog.properties["uri"], warehouse=tmp_path.as_uri())
    with other.load_table("n.t").transaction() as change:
        change.set_properties(said="new")
    assert catalog.load_table("n.t").properties == {"said": "new"}
    assert before.properties == {}
    # One of ours is seen, too, and leaves earlier looks as they were.
    with catalog.load_table("n.t").transaction() as change:
        change.set_properties(said="newer")
    assert catalog.load_table("n.t").properties == {"said": "newer"}
    catalog.drop_table("n.t")
    with pytest.raises(NoSuchTableError):
        catalog.load_table("n.t")


def test_a_file_that_is_gone_is_missed(catalog: ParsedOnce) -> None:
    catalog.create_table("n.t", SCHEMA)
    file = Path(catalog.load_table("n.t").metadata_location.removeprefix("file://"))
    file.unlink()
    with pytest.raises(FileNotFoundError):
        catalog.load_table("n.t")


def test_what_is_kept_is_bounded(
    catalog: ParsedOnce, parses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsed, "_LIMIT", 3)  # a table of one column weighs one
    for name in "abcd":
        catalog.create_table(f"n.{name}", SCHEMA)
    for name in "abcd" * 10:
        catalog.load_table(f"n.{name}")
        assert len(catalog._parsed) <= 3
    assert len(parses) < 35  # walked in a circle, most are found all the same
    with catalog.load_table("n.c").transaction() as change:  # of a table only the newest is kept
        change.set_properties(said="new")
    catalog.load_table("n.c")
    assert [known.table_uuid for known in catalog._parsed.values()].count(
        catalog.load_table("n.c").metadata.table_uuid
    ) == 1


def test_columns_of_all_schemas_weigh_and_a_table_too_large_leaves_alone(
    catalog: ParsedOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = Schema(*(NestedField(i, f"c{i}", IntegerType(), required=False) for i in range(1, 41)))
    monkeypatch.setattr(parsed, "_LIMIT", 30)
    catalog.create_table("n.wide", wide)
    assert parsed._weight(catalog.load_table("n.wide").metadata) == 11
    for number in range(3):
        with catalog.load_table("n.wide").update_schema() as change:
            change.add_column(f"more{number}", IntegerType())
    wide_now = catalog.load_table("n.wide").metadata
    assert parsed._weight(wide_now) == 1 + (40 + 41 + 42 + 43) // 4
    assert list(catalog._parsed.values()) == [wide_now]
    catalog.create_table("n.a", SCHEMA)
    assert list(catalog._parsed.values()) == [catalog.load_table("n.a").metadata]
