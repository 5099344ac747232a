"""Links of the pages that `make docs` doesn't build, and what is said twice."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import cdc_assets

ROOT = Path(cdc_assets.__file__).parents[1]
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "infra/README.md"])
def test_each_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = _LINK.findall(text)
    assert page != "README.md" or links
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_first_page_of_the_guide_has_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = {line.split("  #")[0].strip() for line in readme if line.startswith("    ")}
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8").splitlines()
    said = [line.split("  #")[0].strip() for line in index if line.startswith("    ")]
    assert said
    assert [line for line in said if line not in commands] == []


def test_every_page_is_in_the_guide() -> None:
    """mkdocs warns of one that its navigation lacks, and `make docs` fails; so does this."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in nav] == []


@pytest.mark.parametrize("page", ["README.md", "docs/operate/project.md"])
def test_where_dg_is_used_the_package_that_has_it_is_installed(page: str) -> None:
    """Our locks lack it: it is a tool of a project of one's own."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.search(r"\bdg (scaffold|check|list)\b", text)
    assert re.search(r"pip install /path/to/clone dagster-dg-cli\b", text)


def test_nobody_is_told_to_install_it_by_its_name() -> None:
    """No index has it: somebody else's package would be installed, once there is one."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "infra").rglob("*.md")]
    by_name = re.compile(r"(pip|pipx|uv|uvx)( pip)? (install|add) [^\n#`]*\bcdc[-_]assets\b")
    assert [page.name for page in pages if by_name.search(page.read_text(encoding="utf-8"))] == []


def test_who_has_installed_it_is_told_what_is_next() -> None:
    """And who starts the demo, which installs as well, isn't."""

    def said(*goals: str) -> str:
        quiet = ("make", "--silent", "--assume-old=.venv/.installed")
        return subprocess.run(
            [*quiet, *goals], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    told = said("install")
    assert ". .venv/bin/activate" in told and "cdc-assets init" in told and "make dev" in told
    assert told.count("\n") == 1
    assert "activate" not in said("--dry-run", "dev")
