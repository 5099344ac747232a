"""A Dagster project of one's own, by the lines of its page in the guide.

The package is installed beside the tools that the page names, which come from an index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import cdc_assets

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]  # it installs a Dagster

ROOT = Path(cdc_assets.__file__).parents[1]
PAGE = ROOT / "docs/operate/project.md"
_CLONE = "/path/to/clone"
# It isn't run: it asks a database, as integration/setup/test_init.py has it do.
_INIT = "cdc-assets init app"
_KEY = "cdc_assets.PostgresSource"
_NOBODYS = "postgresql://nobody@127.0.0.1:9/app"
ADDRESSES = {"APP_DSN": _NOBODYS, "APP_STREAM_DSN": _NOBODYS}
# A folder that is installed is built anew: uv goes by its pyproject.toml's time alone.
_PIP = 'pip() { uv pip "$@" --quiet --refresh-package cdc-assets; }\n'


def blocks() -> list[list[str]]:
    """The page's commands, without what stands behind them."""
    found = re.findall(r"(?:^    \S.*\n)+", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [[line.split("  #")[0].strip() for line in block.splitlines()] for block in found]


@dataclass(frozen=True, slots=True)
class Project:
    """A project in an environment of its own; ``source`` is the file that its page has written."""

    folder: Path
    environment: dict[str, str]

    @property
    def source(self) -> Path:
        [found] = self.folder.rglob("defs/app/defs.yaml")
        return found

    def run(self, script: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-eu", "-c", _PIP + script],
            cwd=self.folder,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            check=False,
        )

    def said(self, script: str, **more: str) -> str:
        """What ``script`` prints, which has to succeed."""
        done = self.run(script, **more)
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
        return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Made by the page's lines up to the one that looks at it."""
    home = tmp_path_factory.mktemp("own")
    [(install, _, init, scaffold, _), anew] = blocks()
    assert (init, _CLONE in install) == (_INIT, True)
    uv, venv = Path(sys.executable).with_name("uv"), home / "venv"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    theirs = ("PYTHON", "APP_", "DAGSTER_", "VIRTUAL_ENV")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(theirs)},
        "PATH": os.pathsep.join([f"{venv}/bin", os.environ["PATH"], str(uv.parent)]),
        "VIRTUAL_ENV": str(venv),
        "CDC_ASSETS_HOME": str(home / "runtime"),
        "COLUMNS": "200",
    }
    made = Project(home, environment)
    made.said("\n".join([install.replace(_CLONE, str(ROOT)), *anew]))
    made = Project(home / "shop", environment)
    made.said(scaffold)
    return made


def test_its_components_are_listed(project: Project) -> None:
    assert _KEY in project.said("dg list components")


def test_what_was_scaffolded_explains_itself_and_is_right(project: Project) -> None:
    text = project.source.read_text(encoding="utf-8")
    assert f"type: {_KEY}" in text
    assert text.count("# ") > 3 and "cdc-assets init app" in text
    assert "validated" in project.said("dg check yaml")


def test_a_wrong_key_is_named_with_its_line(project: Project) -> None:
    right = project.source.read_text(encoding="utf-8")
    wrong = right.replace("  tables:", "  tablez: []\n  tables:", 1)
    line = wrong.splitlines().index("  tablez: []") + 1
    project.source.write_text(wrong, encoding="utf-8")
    try:
        done = project.run("dg check yaml")
    finally:
        project.source.write_text(right, encoding="utf-8")
    assert done.returncode != 0
    assert re.search(rf"defs\.yaml:{line} .*\btablez\b", done.stdout + done.stderr)


@pytest.mark.parametrize("way", ["${APP_DSN}", "{{ env.APP_DSN }}"])
def test_an_address_comes_from_the_environment(project: Project, way: str) -> None:
    right = project.source.read_text(encoding="utf-8")
    assert "${APP_DSN}" in right
    project.source.write_text(right.replace("${APP_DSN}", way), encoding="utf-8")
    *_, look = blocks()[0]
    try:
        assert "app/orders" in project.said(look, **ADDRESSES)
        unset = project.run("dg check yaml && echo checked && dg list defs")
    finally:
        project.source.write_text(right, encoding="utf-8")
    assert unset.returncode != 0
    assert "checked" in unset.stdout  # keys and types alone: the unset variable is found later
    assert re.search(r"APP_DSN\b.*\bnot set", unset.stdout + unset.stderr)
