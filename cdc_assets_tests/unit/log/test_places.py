"""The one function that says whether a path may be deleted: every trick to get out of a place."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.log.staged.places import ForeignPath, Place, staged_place
from cdc_assets.log.staged.storage import Storage

FILE = Place("file:///stage/src", Storage())
BUCKET = Place("s3://bucket/stage/src", Storage())
LAKE = Place("s3://bucket/wh/app/t", Storage(), literal=True)
ODD = Place("file:///a%20b/src", Storage())


@pytest.mark.parametrize(
    ("place", "uri", "path"),
    [
        (FILE, "file:///stage/src/public.t/x", "/stage/src/public.t/x"),
        (FILE, "file:/stage/src/x", "/stage/src/x"),
        (BUCKET, "s3://bucket/stage/src/x", "bucket/stage/src/x"),
        (LAKE, "s3://bucket/wh/app/t/data/p=%2e%2e/x", "bucket/wh/app/t/data/p=%2e%2e/x"),
        (ODD, "file:///a%20b/src/x", "/a b/src/x"),
    ],
)
def test_what_is_below_a_place_is_found_there(place: Place, uri: str, path: str) -> None:
    assert place.path(uri) == path


@pytest.mark.parametrize(
    "uri",
    [
        "file:///stage/src",
        "file:///stage/src/",
        "file:///stage/src/.",
        "file:///stage/src-evil/x",
        "file:///stage/src/../x",
        "file:///stage/src/a/../../x",
        "file:///stage/src/%2e%2e/x",
        "file:///stage/src/%2E%2E%2Fx",
        "file:///stage/src/..%2fx",
        "file:///stage/src//x",
        "file:///stage//src/x",
        "file:///stage/./src/x",
        "file://host/stage/src/x",
        "file:////stage/src/x",
        "file:///stage/src/a%00b",
        "file:///stage/src/a\nb",
        "//stage/src/x",
        "stage/src/x",
        "s3:///stage/src/x",
        "s3://stage/src/x",
        "http://stage/src/x",
        "",
    ],
)
def test_no_spelling_leads_out_of_a_folder(uri: str) -> None:
    assert not FILE.holds(uri)
    with pytest.raises(ForeignPath):
        FILE.path(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/wh/app/t",
        "s3://bucket/wh/app/t2/x",
        "s3://bucket/wh/app/t/../t2/x",
        "s3://bucket/wh/app/t//x",
        "s3://bucket2/wh/app/t/x",
        "s3://Bucket/wh/app/t/x",
        "s3a://bucket/wh/app/t/x",
        "s3n://bucket/wh/app/t/x",
        "S3://bucket/wh/app/t/x",
        "file:///bucket/wh/app/t/x",
        "/bucket/wh/app/t/x",
    ],
)
def test_no_spelling_leads_to_another_bucket_or_store(uri: str) -> None:
    assert not LAKE.holds(uri)


def test_of_many_files_none_goes_if_one_is_foreign(tmp_path: Path) -> None:
    ours, foreign = tmp_path / "ours" / "a", tmp_path / "b"
    ours.parent.mkdir()
    for file in (ours, foreign):
        file.write_bytes(b"123")
    place = Place(ours.parent.as_uri(), Storage())
    with pytest.raises(ForeignPath):
        place.delete([str(ours), str(foreign)])
    assert ours.exists() and foreign.exists()
    assert place.delete([str(ours), str(ours.with_name("gone"))]) == (1, 3)
    assert not ours.exists()


def test_a_symbolic_link_leads_nowhere_else(tmp_path: Path) -> None:
    """Also one that a listing followed; a link itself goes, and what it leads to stays."""
    ours, outside = tmp_path / "ours", tmp_path / "outside"
    for folder in (ours, outside):
        folder.mkdir()
    canary = outside / "canary"
    canary.write_bytes(b"sings")
    (ours / "link").symlink_to(outside)
    (ours / "file").symlink_to(canary)
    place = Place(ours.as_uri(), Storage())
    with pytest.raises(ForeignPath):
        place.delete([f"{place.root}/link/canary"])
    place.delete_empty([f"{place.root}/link/none", str(outside), f"{place.root}/../outside"])
    place.delete([f"{place.root}/file"])
    assert canary.exists() and not (ours / "file").exists()


def test_a_place_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "a").write_bytes(b"1")
    place = Place((tmp_path / "home").as_uri(), Storage())
    assert place.holds((tmp_path / "real" / "a").as_uri())
    assert place.delete([str(tmp_path / "home" / "a")]) == (1, 1)


def test_the_log_names_only_what_a_flusher_may_have_written() -> None:
    good = f"{FILE.uri}/public.t-1f/2026-01-31/0a.parquet"
    assert staged_place([BUCKET, FILE], good) == FILE
    for bad in (
        f"{FILE.uri}/t/data/0a.parquet",
        f"{FILE.uri}/t/2026-01-31/0a.txt",
        f"{FILE.uri}/t/2026-01-31/x/0a.parquet",
        f"{FILE.uri}/2026-01-31/0a.parquet",
        f"{FILE.uri}/../2026-01-31/0a.parquet",
        f"{good}?x",
        f"{good}#x",
        good.replace("/src/", "/other/"),
    ):
        assert staged_place([BUCKET, FILE], bad) is None
