"""The YAML of a new source: read back it names the same tables, whatever they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.config.source import parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.addresses import has_password, of_role, user_of
from cdc_assets.setup.files import defs_folder, files_of, text_of, write

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(NAMES, min_size=1, unique_by=str.lower), st.booleans())
def test_the_tables_come_back(names: list[str], component: bool) -> None:
    tables = [TableId(f"schema {name}", name) for name in names]
    text = text_of("app", tables, component=component, apart=True)
    data = yaml.safe_load(text)
    attributes = data["attributes"] if component else data
    attributes["postgres"] = {"embedded": True}
    attributes["lake"] = {"namespace": "lake"}
    config = parse_config(data, "test")
    assert [table.id for table in config.tables] == tables


def test_a_component_goes_where_the_project_has_its_components(tmp_path: Path) -> None:
    assert defs_folder(tmp_path) is None
    assert files_of("app", None, tmp_path).yaml == tmp_path / "app.yaml"
    (tmp_path / "pyproject.toml").write_text('[tool.dg.project]\nroot_module = "shop"\n')
    assert files_of("app", None, tmp_path).component is False
    (tmp_path / "other" / "defs").mkdir(parents=True)
    (tmp_path / "dg.toml").write_text('[project]\nroot_module = "other"\n')
    assert defs_folder(tmp_path) == tmp_path / "other" / "defs"
    (tmp_path / "dg.toml").unlink()
    (tmp_path / "src" / "shop" / "defs").mkdir(parents=True)
    found = files_of("app", None, tmp_path)
    assert found.yaml == tmp_path / "src" / "shop" / "defs" / "app" / "defs.yaml"
    assert found.sql == found.yaml.with_name("prepare.sql")
    given = files_of("app", tmp_path / "x.yml", tmp_path)
    assert (given.yaml.name, given.sql.name, given.component) == ("x.yml", "x.sql", False)


@pytest.mark.parametrize("text", ["", "[tool.dg", "[tool]\ndg = 1\n", "[tool.dg.project]\n"])
def test_a_project_of_something_else_is_none_of_dagsters(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert defs_folder(tmp_path) is None


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="is there already"):
        write(path, "theirs")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        (
            "postgresql://me:hush@h:1/app?sslmode=require",
            "postgresql://cdc:…@h:1/app?sslmode=require",
        ),
        ("postgres://h/app", "postgresql://cdc:…@h/app"),
        ("postgresql:///app?host=h&password=hush&user=me", "postgresql://cdc:…@h/app"),
        ("postgresql://[::1]:5/a%20b?sslpassword=hush", "postgresql://cdc:…@[::1]:5/a%20b"),
        ("host=/tmp dbname=app password=hush", "dbname=app host=/tmp user=cdc password=…"),
        ("host=h dbname=app user=me password=hush", "postgresql://cdc:…@h/app"),
    ],
)
def test_an_address_is_shown_for_another_role(dsn: str, shown: str) -> None:
    assert of_role(dsn, "cdc") == shown
    assert "hush" not in shown
    assert has_password(dsn) is ("hush" in dsn)
    assert user_of(shown) == "cdc"
