"""Spark's JVM starts with an archive of its classes where there is one, and without it, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cdc_assets.errors import SparkProblem
from cdc_assets.lake.spark import class_archive, jars
from cdc_assets.lake.spark.class_archive import archive_path, sharing_options
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with the jars in it."""
    verified = jars.provide(jars.cache_folder(), {}, print)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = jars.cache_folder()
    folder.mkdir(parents=True, mode=0o700)
    for jar in verified:
        os.link(jar, folder / jar.name)
    return folder.parent


def _class_path() -> str:
    return jars.provided({}, print).class_path


def _refused(_class_path: str) -> Path:
    raise PermissionError


def _made(archive: Path) -> Path:
    archive.parent.mkdir(mode=0o700)
    archive.write_bytes(b"no archive")
    archive.chmod(0o600)
    return archive


def test_an_archive_is_of_one_java_and_of_its_jars(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = archive_path(_class_path())
    assert path == archive_path(_class_path())
    assert path.parent == cache / "classes"
    java = cache / "jre" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch()
    with monkeypatch.context() as another:
        another.setenv("JAVA_HOME", str(cache / "jre"))
        assert archive_path(_class_path()) != path
    jar = cache / "jars" / jars.JARS[-1].name
    shutil.copy(jar, cache / "copied")  # with a time of its own
    (cache / "copied").replace(jar)
    assert archive_path(_class_path()) != path


def test_only_an_archive_that_nobody_else_can_have_written_is_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class_path = _class_path()
    assert sharing_options(class_path) == ""
    archive = _made(archive_path(class_path))
    assert str(archive) in sharing_options(class_path)
    with monkeypatch.context() as nowhere:
        nowhere.setattr(class_archive, "archive_path", _refused)
        assert sharing_options(class_path) == ""
    for path in (archive, archive.parent):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert sharing_options(class_path) == ""
        path.chmod(mode)


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_broken_one_keeps_no_spark_from_starting(cache: Path, tmp_path: Path) -> None:
    assert not _maps_it(_made(archive_path(_class_path())), tmp_path / "broken")


@pytest.mark.spark
def test_it_stays_where_no_java_would_start(cache: Path, tmp_path: Path) -> None:
    archive = _made(archive_path(_class_path()))
    server = SparkServer(SparkServerSettings(1, "none"), tmp_path / "none")
    with pytest.raises(SparkProblem):
        server.ensure()
    assert archive.exists()


@pytest.mark.soak  # a minute; make java records one, too
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_one_that_is_recorded_is_used_and_a_damaged_one_is_given_up(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "cdc_assets.lake.spark.record"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("recording the classes")
    assert done.stderr.count("\n") == 2  # what Spark says isn't for a person
    archive = archive_path(_class_path())
    assert archive.stat().st_size > 50_000_000
    assert sorted(path.name for path in archive.parent.iterdir()) == [archive.name]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""  # it is there
    assert _maps_it(archive, tmp_path / "with")
    monkeypatch.chdir(tmp_path)  # Java's report of its end goes there
    os.truncate(archive, archive.stat().st_size // 2)
    server = SparkServer(SparkServerSettings(1, "512m"), tmp_path / "damaged")
    try:
        server.ensure()  # Java would end each time
    finally:
        server.stop()
    assert not archive.exists()


def _maps_it(archive: Path, home: Path) -> bool:
    """Start a Spark that says nothing of the archive; whether its JVM has the archive's classes."""
    server = SparkServer(SparkServerSettings(1, "512m"), home)
    try:
        server.ensure()
        [jvm] = [  # other tests of this process have a Spark, too
            child
            for child in psutil.Process().children(recursive=True)
            if child.name() == "java" and str(home) in " ".join(child.cmdline())
        ]
        assert f"-XX:SharedArchiveFile={archive}" in jvm.cmdline()
        assert "cds" not in server.log_path.read_text()
        return any(found.path == str(archive) for found in jvm.memory_maps())
    finally:
        server.stop()
