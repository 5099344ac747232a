"""What is mended in the JVM of our Spark server."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from importlib import resources
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from cdc_assets.lake.spark import jvm
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets_tests.support.jvm import instances

pytestmark = pytest.mark.spark


def test_every_mend_worked(spark_server: SparkServer) -> None:
    spark_server.ensure()
    said = spark_server.log_path.read_text()
    assert " serving after " in said
    assert [what for what in (*jvm._MENDS, "keep sessions") if what in said] == []


def test_a_local_file_takes_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, said, made = tmp_path / "bin", tmp_path / "said", tmp_path / "made" / "here"
    tools.mkdir()
    (tools / "chmod").write_text(f'#!/bin/sh\necho "$@" >> {said}\nexec /bin/chmod "$@"\n')
    (tools / "chmod").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    server = SparkServer(SparkServerSettings(1, "512m"), tmp_path / "home")
    try:
        session = SparkSession.builder.remote(server.ensure()).create()
        session.range(1).write.parquet(str(made))
        session.stop()
    finally:
        server.stop()
    assert not said.exists()
    [file] = made.glob("*.parquet")
    assert file.stat().st_mode & 0o777 == 0o644
    assert made.stat().st_mode & 0o777 == 0o755


def test_folders_pass_their_group_on_whatever_jars_there_are(tmp_path: Path) -> None:
    """As chmod leaves it to them; and the class path isn't where Iceberg is, with a jar more."""
    own, shared = tmp_path / "own.jar", tmp_path / "shared"
    with zipfile.ZipFile(own, "w") as jar:
        jar.writestr("x", "x")
    shared.mkdir()
    shared.chmod(0o2775)
    conf = {"spark.jars": own.as_uri(), "spark.hadoop.fs.permissions.umask-mode": "027"}
    server = SparkServer(SparkServerSettings(1, "512m", conf), tmp_path / "home")
    try:
        session = SparkSession.builder.remote(server.ensure()).create()
        session.range(1).write.parquet(str(shared / "here" / "there"))
        session.stop()
        said = server.log_path.read_text()
    finally:
        server.stop()
    assert [what for what in jvm._MENDS if what in said] == []
    for folder in (shared / "here", shared / "here" / "there"):
        assert folder.stat().st_mode & 0o7777 == 0o2750


def test_iceberg_has_the_pool_that_tells_at_once(spark_server: SparkServer) -> None:
    spark_server.ensure()
    assert instances(spark_server, "PromptPool") == 2  # one for deletes


def test_a_pool_is_what_iceberg_relies_on(tmp_path: Path) -> None:
    if shutil.which("javac") is None:
        pytest.skip("Java came without its compiler")
    source = resources.files(jvm.__package__) / "PromptPool.java"
    program = Path(__file__).with_name("TriesPool.java")
    compile_both = ["javac", "-nowarn", "-d", str(tmp_path), str(source), str(program)]
    subprocess.run(compile_both, check=True, timeout=120)
    command = ["java", "-cp", str(tmp_path), program.stem]
    done = subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    said = done.stdout.splitlines()
    assert len(said) == 13
    assert [line for line in said if not line.startswith("yes: ")] == []
