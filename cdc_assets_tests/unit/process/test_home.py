"""The runtime home, where nobody said where it is to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.process.home import at_home, home


def test_a_home_in_a_project_is_of_no_interest_to_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CDC_ASSETS_HOME", raising=False)
    assert home() == tmp_path / ".cdc_assets"
    assert (home() / ".gitignore").read_text() == "*\n"
    (home() / ".gitignore").write_text("!warehouse\n")
    assert (home() / ".gitignore").read_text() == "!warehouse\n"


def test_who_starts_in_another_folder_is_told_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CDC_ASSETS_HOME", raising=False)
    assert str(tmp_path / ".cdc_assets") in at_home(f"file://{tmp_path}/.cdc_assets/app/staging")
    assert at_home("s3://bucket/lake") == ""
    monkeypatch.setenv("CDC_ASSETS_HOME", str(tmp_path / ".cdc_assets"))
    assert at_home(f"file://{tmp_path}/.cdc_assets/app/staging") == ""


@pytest.mark.parametrize("name", ["a b", "hé", "100%25"])
def test_the_home_is_known_in_a_uri_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged files are named by URIs, the warehouse's folder is not escaped."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    monkeypatch.delenv("CDC_ASSETS_HOME", raising=False)
    below = tmp_path / name / ".cdc_assets" / "app" / "staging"
    assert "If it was made by a start in another folder" in at_home(below.as_uri())
    assert at_home(below.as_uri()) == at_home(f"file://{below}") == at_home(f"its files: {below}")
    assert at_home((tmp_path / "elsewhere").as_uri()) == ""
