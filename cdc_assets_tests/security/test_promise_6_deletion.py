"""Deletion stays below ``<staging>/<source>/`` and the table's place, whatever catalog or log say.

Each way to plant a path is tried with all that removes files; what is elsewhere lives, what is ours
goes, and what is refused is named. How a path is judged is in ``unit/log/test_places.py``.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cdc_assets
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.maintenance.run import Maintained, maintain
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.canaries import (
    Planted,
    aged,
    change,
    contents,
    pipeline_with,
    planted,
)

T = TableId("public", "t")
# Who else deletes, and what: files that it has made itself and nobody else names.
OTHERS = {
    "dagster/demo.py",
    "dagster/instance.py",
    "embedded/binaries.py",
    "embedded/guard.py",
    "embedded/postgres.py",
    "lake/spark/class_archive.py",
    "lake/spark/jars.py",
    "lake/spark/record.py",
    "lake/spark/server.py",
    "lake/spark/python_archive.py",
    "log/staged/storage.py",
    "process/home.py",
    "readiness/executors/findings.py",
    "snapshot/lake_file.py",
}
DELETES = {
    "delete_file",
    "delete_dir",
    "delete_dir_contents",
    "rmtree",
    "unlink",
    "remove",
    "purge_table",
}


@pytest.fixture
def found(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path, tmp_path: Path
) -> Iterator[Planted]:
    with planted(postgres_dsn, spark_server.ensure(), tmp_path) as opened:
        opened.lake.pin()
        opened.lake.copy()
        for value in ("one", "two"):
            change(opened, value)
            opened.lake.drain(T)
        yield opened


def table_folder(found: Planted) -> Path:
    loaded = found.lake.lake_table(T).load()
    assert loaded is not None
    return Path(loaded.location().removeprefix("file://"))


def test_files_are_deleted_in_one_place_of_the_code() -> None:
    """Beside those who remove only what they have made, under names that nobody gave them."""
    root = Path(cdc_assets.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, on = node.func.attr, ast.unparse(node.func.value)
                if name in DELETES and not (name == "remove" and on != "os"):
                    found.add(str(file.relative_to(root)))
    # surroundings: the table that `check` has made a moment ago, in a transaction of its own.
    assert found - OTHERS == {"log/staged/places.py", "readiness/surroundings.py"}


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "form",
    [
        "file://{}",
        "file:{}",
        "{base}/../../../../../../../..{}",
        "{base}/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e{}",
        "{base}/link/canary.parquet",
    ],
    ids=["elsewhere", "by Hadoop's spelling", "dots", "encoded dots", "link"],
)
def test_no_path_in_the_log_deletes_a_file_elsewhere(found: Planted, form: str) -> None:
    folder = found.outside / "t" / "2026-01-01"
    folder.mkdir(parents=True)
    canary = folder / "canary.parquet"
    canary.write_bytes(b"sings")
    staged = [
        Path(path.removeprefix("file://"))
        for path in [found.one(f"select path from log_index offset {n} limit 1") for n in (0, 1)]
    ]
    (staged[0].parent / "link").symlink_to(folder)
    foreign = form.format(canary, base=staged[0].parent.as_uri())
    assert found.plant(
        "update log_index set path = %s where path = %s", foreign, staged[0].as_uri()
    )
    said = found.maintain().problem
    assert canary.read_bytes() == b"sings"
    assert repr(foreign) in str(said)
    assert not staged[1].exists()  # what is ours went
    assert repr(foreign) in str(found.maintain().problem)  # it isn't forgotten


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_what_an_earlier_staging_place_has_goes_once_it_is_named(found: Planted) -> None:
    before, now = found.lake.config.staging_uri, (found.outside / "new").as_uri()

    def maintained(**staging: object) -> Maintained:
        with pipeline_with(
            found, staging={**json.loads(found.lake.config.dump())["staging"], **staging}
        ) as pipeline:
            [done] = maintain(pipeline, lambda: found.lake.session, [T])
            return done

    staged = Path(found.one("select path from log_index limit 1").removeprefix("file://"))
    assert "staging.former_uris" in str(maintained(uri=now).problem)
    assert staged.exists()
    done = maintained(uri=now, former_uris=[before])
    assert (done.problem, staged.exists()) == (None, False)


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["the table", "a copy that died"])
def test_no_entry_of_the_catalog_deletes_a_file_elsewhere(found: Planted, which: str) -> None:
    """Expiry, orphans, old metadata, a dropped copy: of a table that is led to another's files."""
    here, there = table_folder(found), found.outside / "lake"
    shutil.copytree(here, there)
    loaded = found.lake.lake_table(T).load()
    assert loaded is not None
    for file in (there / "metadata").glob("*.json"):
        data = json.loads(file.read_text().replace(str(here), str(there)))
        data["properties"] |= {"cdc.copying": "", "write.metadata.previous-versions-max": "1"}
        file.write_text(json.dumps(data))
    (there / "data" / "canary").write_bytes(b"an orphan, of somebody else")
    aged(there)
    evil = (there / "metadata" / Path(loaded.metadata_location).name).as_uri()
    if which == "the table":
        found.plant("update iceberg_tables set metadata_location = %s", evil)
    else:
        found.plant(
            "insert into iceberg_tables (catalog_name, table_namespace, table_name,"
            " metadata_location, iceberg_type) select catalog_name, table_namespace,"
            " table_name || '__copy_1', %s, 'TABLE' from iceberg_tables",
            evil,
        )
    before = contents(there)
    said = str(found.maintain().problem)
    assert contents(there) == before
    assert "elsewhere than to" in said and str(there) in said


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_moved_warehouse_is_refused_by_name_until_it_is_named(found: Planted) -> None:
    orphan = table_folder(found) / "data" / "old"
    orphan.write_bytes(b"left")
    aged(table_folder(found))
    catalog = json.loads(found.lake.config.dump())["lake"]["catalog"]
    before, now = found.lake.config.warehouse, (found.outside / "wh").as_uri()
    for locations in ([], [before], [table_folder(found).as_uri()]):
        lake = {"catalog": {**catalog, "warehouse": now, "locations": locations}}
        with pipeline_with(found, lake=lake) as pipeline:
            [done] = maintain(pipeline, lambda: found.lake.session, [T])
        assert ("lake.catalog.locations" in str(done.problem)) == (not locations)
        assert orphan.exists() == (not locations)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_table_within_another_ones_folder_keeps_its_files(found: Planted) -> None:
    inner = table_folder(found) / "data" / "inner"
    found.lake.session.sql(
        f"create table lake.src.inner using iceberg location '{inner.as_uri()}' as select 1 as a"
    )
    aged(table_folder(found))
    before = contents(inner)
    done = found.maintain()
    assert contents(inner) == before
    assert "another table is in" in str(done.problem) and str(inner) in str(done.problem)
    found.lake.session.sql("drop table lake.src.inner")
    shutil.rmtree(inner)
    assert found.maintain().problem is None


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_staged_files_within_a_tables_folder_are_no_orphans_of_it(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path, tmp_path: Path
) -> None:
    """A former staging place was in the warehouse, its source called like the namespace: a trap."""
    place = (tmp_path / "all" / "src" / "t").as_uri()  # where the table t is
    catalog = {"warehouse": (tmp_path / "all").as_uri()}
    settings: dict[str, Any] = {"staging": {"former_uris": [place]}, "lake": {"catalog": catalog}}
    with planted(postgres_dsn, spark_server.ensure(), tmp_path, **settings) as found:
        found.lake.pin()
        found.lake.copy()
        change(found, "one")
        found.lake.drain(T)
        change(found, "two")  # registered, and not applied
        there = tmp_path / "all" / "src" / "t" / "src"
        shutil.move(found.lake.config.staging_uri.removeprefix("file://") + "/src", there)
        moved = "update log_index set path = replace(path, %s, %s)"
        assert found.plant(moved, found.lake.config.staging_uri, place)
        aged(tmp_path)
        done = found.maintain()
        assert "can't be told from staged files" in str(done.problem)
        found.lake.drain(T)
        assert "two" in found.values()
