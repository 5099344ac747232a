"""Dagster's inside is reached at one place, where a new version of it is looked through."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

import cdc_assets
from cdc_assets.dagster import internals

ROOT = Path(cdc_assets.__file__).parent
# As pyproject.toml has them, with the libraries of the same day.
OLDEST = (
    *("dagster==1.13.0", "dagster-webserver==1.13.0", "dagster-graphql==1.13.0"),
    *("dagster-pipes==1.13.0", "dagster-shared==1.13.0", "dagster-pyspark==0.29.0"),
    *("dagster-spark==0.29.0", "dagster-aws==0.29.0"),
)


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
def test_the_oldest_dagster_that_is_allowed_has_it_all(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    target = tmp_path / "oldest"
    subprocess.run(
        [str(uv), "pip", "install", "--quiet", "--target", str(target), "--no-deps", *OLDEST],
        check=True,
    )
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS],
        cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT.parent)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:]


_TESTS = (
    "cdc_assets_tests/unit/dagster",
    "cdc_assets_tests/integration/dagster/test_copies.py",
    "cdc_assets_tests/integration/dagster/test_reports.py",
)


def test_the_versions_are_those_of_the_package() -> None:
    declared = (ROOT.parent / "pyproject.toml").read_text()
    assert '"dagster>=1.13,<2"' in declared
    assert dg.__version__ >= "1.13"
