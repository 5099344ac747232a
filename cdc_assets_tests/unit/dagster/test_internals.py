"""Dagster's inside is reached at one place, where a new version of it is looked through."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cdc_assets
from cdc_assets.dagster import internals
from cdc_assets.log.staged.files import STAGED_SCHEMA
from cdc_assets_tests.unit.test_house import DAGSTER

ROOT = Path(cdc_assets.__file__).parent
# Dagster's packages have one version, its libraries another.
CORE = ("dagster", "dagster-webserver")
LIBRARIES = ("dagster-pyspark", "dagster-aws")
# As pyproject.toml has them. Before 1.13.24 Dagster refuses a job of assets with partitions if
# others, with partitions of their own, are made by the same function.
OLDEST = ("==1.13.24", "==0.29.24")
NEWEST = (">=1.13.24,<2", ">=0.29.24,<1")


# Strings that begin so and aren't Dagster's: columns, multiprocessing's, ends of our own names.
OURS = {*STAGED_SCHEMA.names, "_args", "_tables", "_tables_of_"}
_PRIVATE = re.compile(r"_[a-z]\w+")


def reached(tree: ast.Module, *, with_dagster: bool = True) -> set[str]:
    """What of Dagster's inside a file imports or names; ``with_dagster``: it may import Dagster."""
    found, said = set[str](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Expr):  # a docstring
            said.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if id(node) not in said and "dagster._" in text:
                found.add(text[text.index("dagster._") :])
            elif with_dagster and _PRIVATE.fullmatch(text) and text not in OURS:
                found.add(f"dagster._: {text}")
    return {name for name in found if name.startswith("dagster._")}


def test_nothing_else_reaches_inside() -> None:
    inside = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT)
        may = name.parts[0].removesuffix(".py") in DAGSTER
        if found := reached(ast.parse(path.read_text()), with_dagster=may):
            inside[name.as_posix()] = found
    assert inside.keys() == {"dagster/internals.py"}, inside


@pytest.mark.parametrize(
    "line",
    [
        "from dagster._core import events",
        "import dagster._time",
        "found = sys.modules.get('dagster._daemon.controller')",
        "_SERVER = 'python -m dagster._grpc.server'",
        "told = getattr(server, '_shutdown_event', None)",
        "_ANSWER = '_get_repository'\nsetattr(server, _ANSWER, once)",
    ],
)
def test_a_planted_reach_is_found(line: str) -> None:
    assert reached(ast.parse(line))
    assert not reached(ast.parse('"""What ``dagster._core`` has."""'))


def test_what_is_reached_by_name_is_there() -> None:
    """In a process of its own: here the modules would count as a daemon's and a server's."""
    code = (
        "import importlib, importlib.util, inspect\n"
        "from cdc_assets.dagster.internals import *\n"
        "from dagster import SensorEvaluationContext as Context\n"
        "daemon, server = map(importlib.import_module, (CONTROLLER, SERVER_MODULE))\n"
        "server, sources = getattr(server, SERVER), inspect.getsource\n"
        "freshness = importlib.import_module(FRESHNESS_MODULE)\n"
        "print({\n"
        " 'DAEMON': importlib.util.find_spec(DAEMON + '.__main__') is not None,\n"
        " 'RELOAD_INTERVAL': hasattr(daemon, RELOAD_INTERVAL),\n"
        " 'FRESHNESS_DAEMON': hasattr(freshness, FRESHNESS_DAEMON),\n"
        " 'FRESHNESS_INTERVAL_VARIABLE': FRESHNESS_INTERVAL_VARIABLE in sources(freshness),\n"
        " 'SERVER_ANSWER': hasattr(server, SERVER_ANSWER),\n"
        " 'SERVER_ID': f'self.{SERVER_ID} = ' in sources(server),\n"
        " 'SERVER_TOLD_TO_END': f'self.{SERVER_TOLD_TO_END} = ' in sources(server),\n"
        " 'SERVER_PROCESSES':"
        " f'self.{SERVER_PROCESSES} = multiprocessing.get_context(' in sources(server),\n"
        " 'RUN_MODULE': importlib.util.find_spec(RUN_MODULE) is not None,\n"
        " 'CONTEXT_REPOSITORY': f'self.{CONTEXT_REPOSITORY} = ' in sources(Context),\n"
        "})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "False" not in done.stdout, done.stdout


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
