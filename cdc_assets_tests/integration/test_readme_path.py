"""The README's first path, word for word in a shell: from an address to a source that is ready."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

import cdc_assets
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets_tests.integration.test_readme import Newcomer, newcomer_at

REPOSITORY = Path(cdc_assets.__file__).parents[1]
_ROLES = ("cdc_app", "cdc_app_stream")
# What isn't tried here: it installs, or goes on for ever.
_MAKE = ("make install && . .venv/bin/activate", "make dev")


def steps() -> list[str]:
    """The commands of "Your own Postgres" before it is done by hand."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = text.split("## Your own Postgres", 1)[1].split("\nBy hand", 1)[0]
    lines = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    assert [line for line in lines if line.startswith("make")] == list(_MAKE)
    return [line for line in lines if line not in _MAKE]


@pytest.fixture
def newcomer(postgres: EmbeddedPostgres, tmp_home: Path, tmp_path: Path) -> Iterator[Newcomer]:
    """In a folder that is as a fresh clone for ``init``."""
    (tmp_path / "cdc_assets/defs").mkdir(parents=True)
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    with newcomer_at(postgres, tmp_path) as made:
        yield made
    with psycopg.connect(postgres.start(), autocommit=True) as superuser:
        for role in _ROLES:
            superuser.execute(f"drop role if exists {role}".encode())


def shell(newcomer: Newcomer, script: str, answers: str = "") -> str:
    """What bash prints; without a terminal, psql reads its answers where it is told to."""
    programs = [Path(sys.executable).parent, newcomer.server.bindir]
    done = subprocess.run(
        ["bash", "-eu", "-c", script],
        cwd=newcomer.folder,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PG")},
            "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY),
        },
        input=answers,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "ERROR" not in done.stderr
    return done.stdout


def test_the_first_path_ends_where_all_is_ready(newcomer: Newcomer) -> None:
    there = conninfo_to_dict(newcomer.admin)
    place = f"{there['host']}:{there['port']}"

    def here(line: str) -> str:
        """With this server's place, and passwords for the dots."""
        password = there["password"] if f"//{there['user']}:" in line else "pw"
        return line.replace("db.example.com", place).replace("…", str(password))

    address, init, prepare, addresses, check = steps()
    asked = f"{here(address)}\n{here(init)}"
    printed = shell(newcomer, asked)
    # The addresses that it prints are those of the README, which says so.
    exports = re.findall(r"(APP\w*_DSN)='?(postgresql://\S+?)'?$", printed, re.MULTILINE)
    told = re.findall(r"(APP\w*_DSN)='(\S+)'", addresses.replace("db.example.com", place))
    assert exports == told
    file = "cdc_assets/defs/app/defs.yaml"
    written = yaml.safe_load((newcomer.folder / file).read_text())
    assert written["attributes"]["tables"] == ['public."My.Table"', "public.orders"]

    given = "\n".join(map(here, (address, prepare, addresses, check)))
    said = shell(newcomer, given, answers="pw\n" * 2 * len(_ROLES))
    assert said.splitlines()[-1].startswith("ready: 2 tables")
    assert f" {file} " in check
