"""The archive of our Python: where nothing else is, what Spark's tasks import is in it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from cdc_assets.lake.spark import python_archive
from cdc_assets.lake.spark.python_archive import main, make_archive, needed

# What Spark starts, and what it unpickles there; the FileIO of copies to an object store.
IMPORTS = """
import sys
import pyarrow.parquet, pyspark.daemon, pyspark.worker
import cdc_assets.materializer.events, cdc_assets.pins.reader, cdc_assets.snapshot.worker
import cdc_assets.readiness.executors.probe
from importlib.metadata import version
from pyiceberg.io import load_file_io
given = {"py-io-impl": "cdc_assets.lake.catalog.files.PlacedFileIO", "cdc.places": '["s3://b"]'}
load_file_io(given, "s3://b/x")
print(version("cdc-assets"), version("pyarrow"), cdc_assets.__file__, *sys.path)
"""


def test_its_python_imports_what_tasks_do_from_it_alone(tmp_path: Path) -> None:
    assert main([str(tmp_path / "python.tar")]) == 0
    with tarfile.open(tmp_path / "python.tar") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    command = [str(tmp_path / "there" / "bin" / "python"), "-S", "-c", IMPORTS]  # no site-packages
    environment = {"CDC_ASSETS_PYTHON": sys.executable, "PYTHONPATH": "/of/spark.zip"}
    told = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    ours, arrow, file, *path = told.stdout.split()
    assert (ours, arrow) == (version("cdc-assets"), version("pyarrow"))
    assert Path(file).is_relative_to(tmp_path / "there" / "lib")
    assert path[:2] == [str(tmp_path / "there" / "lib"), "/of/spark.zip"]


def test_it_has_neither_spark_itself_nor_dagster() -> None:
    names = {str(found.name).lower() for found in needed()}
    assert {"cdc-assets", "pyspark", "pyarrow", "psycopg-binary", "pyiceberg"} <= names
    assert not [name for name in names if name.startswith(("dagster", "grpcio", "pixeltable"))]
    assert not [name for name, _ in python_archive._files() if name.startswith("pyspark/jars/")]


def test_one_that_cannot_be_finished_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_archive, "_files", lambda: [("gone", tmp_path / "gone")])
    with pytest.raises(FileNotFoundError):
        make_archive(tmp_path / "python.tar.gz")
    assert list(tmp_path.iterdir()) == []
