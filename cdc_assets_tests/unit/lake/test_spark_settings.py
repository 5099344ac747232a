"""The Spark server's settings, without a server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.lake.spark.properties import SparkServerSettings, properties_text, spark_properties
from cdc_assets.lake.spark.server import SparkServer


def test_equal_settings_share_a_server_and_others_do_not(tmp_path: Path) -> None:
    def state(conf: dict[str, str], memory: str = "3g") -> Path:
        return SparkServer(SparkServerSettings(2, memory, conf), tmp_path).state_path

    assert state({"a": "1", "b": "2"}) == state({"b": "2", "a": "1"})
    assert len({state({}), state({"a": "1"}), state({}, "4g")}) == 3


@given(st.dictionaries(st.text(), st.text(), max_size=3), st.integers(1, 64))
def test_settings_survive_the_pipe_in_one_line(conf: dict[str, str], cores: int) -> None:
    settings = SparkServerSettings(cores, "1g", conf)
    assert "\n" not in settings.to_json()
    assert SparkServerSettings.from_json(settings.to_json()) == settings


def test_a_users_setting_wins_but_never_the_address_nor_who_is_let_in(tmp_path: Path) -> None:
    conf = {
        "spark.sql.ansi.enabled": "false",
        "spark.connect.grpc.binding.address": "0.0.0.0",
        "spark.connect.authenticate.token": "",
        "spark.authenticate": "false",
    }
    made = spark_properties(SparkServerSettings(3, "5g", conf), tmp_path, "t0ken")
    assert made["spark.sql.ansi.enabled"] == "false"
    assert made["spark.connect.grpc.binding.address"] == "127.0.0.1"
    assert made["spark.connect.authenticate.token"] == "t0ken"
    assert made["spark.authenticate"] == "true"
    assert made["spark.master"] == "local[3]"
    assert made["spark.driver.memory"] == "5g"


def test_settings_tell_no_secret_by_name_or_print() -> None:
    settings = SparkServerSettings(conf={"spark.hadoop.fs.s3a.secret.key": "s3cret"})
    assert "s3cret" not in repr(settings)
    assert "s3cret" not in settings.key


@pytest.mark.skipif(shutil.which("javac") is None, reason="needs a JDK")
def test_java_reads_the_properties_back(tmp_path: Path) -> None:
    values = {"plain": "a b", "x=y: z": " lead\ttab\nline\\end ", "ü": "日本 😀 #!=:", "empty": ""}
    (tmp_path / "it.properties").write_text(properties_text(values), encoding="ascii")
    (tmp_path / "Dump.java").write_text(
        """
        public class Dump {
            public static void main(String[] a) throws Exception {
                var p = new java.util.Properties();
                try (var in = new java.io.FileInputStream(a[0])) { p.load(in); }
                var out = new java.io.PrintStream(System.out, true, "UTF-8");
                for (var k : p.stringPropertyNames())
                    out.print(k + "\\0" + p.getProperty(k) + "\\0");
            }
        }
        """
    )
    dumped = subprocess.run(
        ["java", str(tmp_path / "Dump.java"), str(tmp_path / "it.properties")],
        capture_output=True,
        check=True,
    ).stdout.decode()
    parts = dumped.split("\0")[:-1]
    assert dict(zip(parts[::2], parts[1::2], strict=True)) == values


@pytest.mark.parametrize(
    ("conf", "variables"),
    [
        ({"spark.driver.extraJavaOptions": "-XX:+UseG1GC"}, {}),
        ({"spark.driver.defaultJavaOptions": "-Da=b -XX:+UseZGC"}, {}),
        ({}, {"JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC"}),
        ({}, {"JDK_JAVA_OPTIONS": "@options"}),
        ({}, {"SPARK_SUBMIT_OPTS": "-XX:+UseG1GC"}),
    ],
)
def test_a_jvm_that_somebody_chose_a_collector_for_is_told_of_none(
    conf: dict[str, str],
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wouldn't start with two."""

    def options(conf: dict[str, str]) -> str:
        found = spark_properties(SparkServerSettings(conf=conf), tmp_path, "")
        return found["spark.driver.defaultJavaOptions"]

    for name in ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS"):
        monkeypatch.delenv(name, raising=False)
    assert "-XX:+UseParallelGC" in options({"spark.executor.extraJavaOptions": "-XX:+UseG1GC"})
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "UseParallelGC" not in options(conf)
