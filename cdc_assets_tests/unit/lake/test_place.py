"""Where a lake table's files may be deleted: by the configuration, or where its catalog put it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io import PY_IO_IMPL, InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table

from cdc_assets.config.source import parse_config
from cdc_assets.errors import TableProblem
from cdc_assets.lake.place import deletable, refuse_misled
from cdc_assets.lake.tables import SOURCE, TABLE, LakeTable
from cdc_assets.log.states import TableState
from cdc_assets.log.table_row import TableRow
from cdc_assets.maintenance.run import _Table
from cdc_assets.postgres.names import TableId
from cdc_assets.process.home import home
from cdc_assets.snapshot.landing import Landing

T = TableId("public", "t")
ROWS = pa.table({"id": pa.array([1, 2], pa.int32())})
OURS = {SOURCE: "src", TABLE: str(T)}
Made = Callable[..., Table]


class BucketOnDisk(PyArrowFileIO):
    """gs://bucket is the folder of the property ``disk``."""

    def new_input(self, location: str) -> InputFile:  # type: ignore[override]
        return super().new_input(location.replace("gs://bucket", self.properties["disk"]))

    def new_output(self, location: str) -> OutputFile:  # type: ignore[override]
        return super().new_output(location.replace("gs://bucket", self.properties["disk"]))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes a table with one file at a location; its catalog is of another process, in SQLite."""
    catalog = SqlCatalog(
        "c",
        uri=f"sqlite:///{tmp_path}/c.db",
        warehouse=tmp_path.as_uri(),
        disk=tmp_path.as_uri(),
        **{PY_IO_IMPL: f"{__name__}.BucketOnDisk"},
    )
    catalog.create_namespace("n")
    number = iter(range(100))

    def make(location: str, properties: dict[str, str] = OURS) -> Table:
        name = f"n.t{next(number)}"
        table = catalog.create_table(name, ROWS.schema, location, properties=properties)
        table.append(ROWS)
        return catalog.load_table(name)

    return make


def lake_of(tmp_path: Path, kind: str = "rest", *former: str, **catalog: Any) -> LakeTable:
    """As ``src`` has it with a catalog that chooses locations."""
    uri = "postgresql://h/db" if kind == "sql" else "https://catalog.example.com"
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": "postgresql://h/db"},
            "tables": [{"name": str(T)}],
            "lake": {"catalog": {"type": kind, "uri": uri, **catalog}},
            "staging": {"uri": (tmp_path / "staging").as_uri(), "former_uris": former},
        },
        "test",
    )
    row = TableRow(T, 1, 1, TableState.STREAMING, ("id",), (), None, None, None, None)
    return LakeTable(config, config.tables[0], row)


def refused(lake: LakeTable, loaded: Table) -> str:
    with pytest.raises(TableProblem) as error:
        deletable(lake, loaded)
    return str(error.value)


@pytest.mark.parametrize("folder", ["wh/6f9619ff-8b86-d011-b42d-00c04fc964ff", "wh/a/b/t-1"])
def test_a_catalog_that_chooses_locations_may_choose_any_below_the_warehouse(
    made: Made, tmp_path: Path, tmp_home: Path, folder: str
) -> None:
    lake = lake_of(tmp_path, warehouse=(tmp_path / "wh").as_uri())
    at = (tmp_path / folder).as_uri()
    refuse_misled(lake, loaded := made(at))
    assert deletable(lake, loaded).uri == at
    # What a commit left that failed, or one that is long past, is the table's own.
    name = loaded.metadata_location.replace("file://", "")
    Path(name).with_name("00000-x.metadata.json").write_bytes(Path(name).read_bytes())
    assert deletable(lake, loaded).uri == at


def test_it_may_lead_no_table_to_anothers_files(made: Made, tmp_path: Path, tmp_home: Path) -> None:
    lake = lake_of(tmp_path, warehouse=(tmp_path / "wh").as_uri())
    for location in (tmp_path / "elsewhere", tmp_path / "wh" / ".." / "elsewhere"):
        assert "elsewhere than to" in refused(lake, made(f"file://{location}"))
    others: list[dict[str, str]] = [{}, OURS | {TABLE: "public.u"}, OURS | {SOURCE: "other"}]
    for number, properties in enumerate(others):
        loaded = made((tmp_path / "wh" / str(number)).as_uri(), properties)
        assert "was made from another one, or by somebody else" in refused(lake, loaded)
    both = (tmp_path / "wh" / "both").as_uri()
    one, other = made(both), made(both)
    assert "another table is in its lake table's folder" in refused(lake, one)
    assert "another table is in its lake table's folder" in refused(lake, other)
    broken = made((tmp_path / "wh" / "d").as_uri())
    (tmp_path / "wh" / "d" / "metadata" / "v1.gz.metadata.json").write_bytes(b"\x1f\x8b")
    assert "v1.gz.metadata.json" in refused(lake, broken)


def test_a_warehouse_that_is_a_name_needs_locations(
    made: Made, tmp_path: Path, tmp_home: Path
) -> None:
    loaded = made((tmp_path / "bucket" / "1f").as_uri())
    said = refused(lake_of(tmp_path, warehouse="production"), loaded)
    assert "below production" in said and "lake.catalog.locations" in said
    told = lake_of(tmp_path, warehouse="production", locations=[(tmp_path / "bucket").as_uri()])
    assert deletable(told, loaded).uri == loaded.location()


def test_where_files_cant_be_listed_they_stay_and_expiry_goes_on(
    made: Made, tmp_path: Path, tmp_home: Path
) -> None:
    lake = lake_of(tmp_path, warehouse="gs://bucket/wh")
    refuse_misled(lake, loaded := made("gs://bucket/wh/1f"))
    assert "only those of file:/// and s3://" in refused(lake, loaded)
    turn = _Table(
        cast("Any", SimpleNamespace(store=None)), lambda: cast("Any", None), T, shared=False
    )
    with turn._told():
        deletable(lake, loaded)
    assert turn._done.problem is None  # it would be one for ever
    assert "remove_orphan_files" in str(turn._done.left_alone)


def test_a_copys_files_land_in_a_store_that_only_pyiceberg_knows(
    made: Made, tmp_path: Path
) -> None:
    class Opened(Landing):
        def __init__(self, seen: Table) -> None:
            self._seen, self._given_up = seen, 0

    loaded = made("gs://bucket/wh/1f")
    landing = Opened(loaded)
    folder = tmp_path / "wh" / "1f" / "data"
    pq.write_table(ROWS.cast(loaded.schema().as_arrow()), folder / "copied.parquet")
    found = landing._data_file(loaded, "gs://bucket/wh/1f/data/copied.parquet")
    assert found is not None and found.record_count == 2
    for elsewhere in ("gs://bucket/wh/1f/data/../../x", "gs://other/wh/1f/data/x", "file:///x"):
        assert landing._data_file(loaded, elsewhere) is None


def test_the_spelling_of_an_earlier_release_is_the_same_warehouse(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote the home as a URI, with a space as %20, and that is where the folder is."""
    with monkeypatch.context() as patched:
        patched.setenv("CDC_ASSETS_HOME", str(tmp_path / "a home"))
        lake = lake_of(tmp_path, "sql")
        earlier = (home() / "src" / "warehouse").as_uri()
        assert earlier != lake.config.warehouse
        refuse_misled(lake, loaded := made(f"{earlier}/src/t"))
        assert deletable(lake, loaded).root == f"{tmp_path}/a%20home/src/warehouse/src/t"
        assert "elsewhere than to" in refused(lake, made(f"{earlier}/src/u"))


def test_a_folder_of_staged_files_is_none_to_delete_in(
    made: Made, tmp_path: Path, tmp_home: Path
) -> None:
    loaded = made((tmp_path / "wh" / "src" / "1f").as_uri())
    warehouse = (tmp_path / "wh").as_uri()
    for former in ("wh", "wh/src/1f", "wh/src/1f/data"):
        lake = lake_of(tmp_path, "rest", (tmp_path / former).as_uri(), warehouse=warehouse)
        refuse_misled(lake, loaded)
        assert "can't be told from staged files" in refused(lake, loaded)
