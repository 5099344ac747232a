"""Dagster's inside is reached at one place, where a new version of it is looked through."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cdc_assets
from cdc_assets.dagster import internals

ROOT = Path(cdc_assets.__file__).parent
# Dagster's packages have one version, its libraries another.
CORE = ("dagster", "dagster-webserver")
LIBRARIES = ("dagster-pyspark", "dagster-aws")
# As pyproject.toml has them. Before 1.13.24 Dagster refuses a job of assets with partitions if
# others, with partitions of their own, are made by the same function.
OLDEST = ("==1.13.24", "==0.29.24")
NEWEST = (">=1.13.24,<2", ">=0.29.24,<1")


def test_nothing_else_reaches_inside() -> None:
    inside = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith("dagster._") for name in names):
                inside.add(path.relative_to(ROOT).as_posix())
    assert inside == {"dagster/internals.py"}


def test_all_that_is_taken_is_used() -> None:
    used = "\n".join(path.read_text() for path in ROOT.rglob("*.py") if path.name != "internals.py")
    assert [name for name in internals.__all__ if name not in used] == []


@pytest.mark.soak  # it installs a Dagster
@pytest.mark.timeout(900)
@pytest.mark.parametrize("versions", [OLDEST, NEWEST], ids=["oldest", "newest"])
def test_each_dagster_that_is_allowed_has_it_all(tmp_path: Path, versions: tuple[str, str]) -> None:
    uv, target = str(Path(sys.executable).with_name("uv")), tmp_path / "dagster"
    wanted = [f"{name}{versions[0]}" for name in CORE]
    wanted += [f"{name}{versions[1]}" for name in LIBRARIES]
    resolved = subprocess.run(
        [uv, "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"],
        input="\n".join(wanted),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    pins = [pin for pin in resolved if pin.startswith("dagster")]
    install = [uv, "pip", "install", "--quiet", "--target", str(target), "--no-deps"]
    subprocess.run([*install, *pins], check=True)
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS],
        cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, (found.stdout + found.stderr)[-5000:]


_TESTS = (
    "cdc_assets_tests/unit/dagster",
    "cdc_assets_tests/integration/dagster/test_copies.py",
    "cdc_assets_tests/integration/dagster/test_reports.py",
)


def test_the_versions_are_those_of_the_package() -> None:
    declared = (ROOT.parent / "pyproject.toml").read_text()
    for names, oldest, allowed in zip((CORE, LIBRARIES), OLDEST, NEWEST, strict=True):
        assert allowed.startswith(oldest.replace("==", ">="))
        for name in names:
            assert f'"{name}{allowed}"' in declared
