"""Each thing that this machine may lack is one sentence that says what to do."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cdc_assets.errors import EnvironmentProblem
from cdc_assets.process.machine import check_java, check_port, check_python, main


def java(folder: Path, says: str, code: int = 0) -> dict[str, str]:
    """An environment whose java is a script that answers so."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "21.0.2" 2024-01-16 LTS', 21),
        ('openjdk version "22-ea" 2023-09-16', 22),
    ],
)
def test_a_fit_java(tmp_path: Path, says: str, version: int) -> None:
    environment = java(tmp_path, says)
    assert check_java(environment) == version
    assert check_java({"JAVA_HOME": str(tmp_path)}) == version


@pytest.mark.parametrize("says", ['openjdk version "23.0.1"', 'openjdk version "25-ea"'])
def test_a_java_that_sparks_hadoop_does_not_know(tmp_path: Path, says: str) -> None:
    with pytest.raises(EnvironmentProblem, match=r"too new for Spark 4\.1: install Java 17 or 21"):
        check_java(java(tmp_path, says))


@pytest.mark.parametrize("says", ['java version "1.8.0_402"', 'openjdk version "11.0.22"'])
def test_an_old_java(tmp_path: Path, says: str) -> None:
    with pytest.raises(EnvironmentProblem, match=r"too old for Spark 4: install Java 17 or 21"):
        check_java(java(tmp_path, says))


def test_a_java_that_is_only_a_stub(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"doesn't work: install Java 17"):
        check_java(java(tmp_path, "No Java runtime present", code=1))


def test_no_java(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=r"none on the PATH: install Java 17 or 21"):
        check_java({"PATH": str(tmp_path)})


def test_a_java_home_without_java_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match=f"none at JAVA_HOME={tmp_path}"):
        check_java({"JAVA_HOME": str(tmp_path), "PATH": "/usr/bin"})


@pytest.mark.parametrize("version", [(3, 10), (3, 14), (2, 7)])
def test_an_unsupported_python(version: tuple[int, int]) -> None:
    with pytest.raises(EnvironmentProblem, match=r"install Python 3\.11, 3\.12 or 3\.13"):
        check_python(version)


@pytest.mark.parametrize("version", [(3, 11), (3, 12), (3, 13)])
def test_a_supported_python(version: tuple[int, int]) -> None:
    check_python(version)


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=f"port {port} is taken: stop .* PORT="):
            check_port(port)
    check_port(port)


def test_the_command_says_one_line_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "70000"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "70000 is no port: choose one from 1024 to 65535, as in PORT=3001.\n"
