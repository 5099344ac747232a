"""The file of a configuration: nothing that stands in it is lost without a word."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from dagster.components.core.component_tree import ComponentTree

from cdc_assets.components import PostgresSource
from cdc_assets.config.source import load_config
from cdc_assets.errors import ConfigurationError

LEAST = "name: a\npostgres: {dsn: 'postgresql://u:secret@h/db'}\n"


def refused(folder: Path, text: str) -> str:
    file = folder / "a.yaml"
    file.write_text(LEAST + dedent(text))
    with pytest.raises(ConfigurationError) as error:
        load_config(file)
    assert "secret" not in str(error.value)
    return str(error.value).replace(f"{file}: ", "")


def test_a_key_that_stands_twice_is_refused_with_both_its_lines(tmp_path: Path) -> None:
    twice = "tables: [public.orders]\nowners: []\n'tables': [public.part]"
    assert refused(tmp_path, twice) == (
        "tables stands twice, in lines 3 and 5. Keep one of them, with all that is meant."
    )
    nested = """
        tables:
        - public.orders
        - name: public.part
          columns: {mask: {a: redact, b: last4,
            a: sha256}}
        """
    said = refused(tmp_path, nested)
    assert "tables[entry 2].columns.mask.a stands twice, in lines 7 and 8." in said
    assert "name stands twice, in lines 1 and 4." in refused(tmp_path, "tables: [t]\nname: b\n")


def test_a_component_refuses_it_too(tmp_path: Path) -> None:
    twice = "type: cdc_assets.PostgresSource\nattributes:\n  tables: [a]\n  tables: [b]\n"
    (tmp_path / "defs.yaml").write_text(f"type: x.Y\n---\n{twice}")
    context = ComponentTree.for_test().load_context.for_path(tmp_path)
    given = {"name": "a", "postgres": {"dsn": "postgresql://h/db"}, "tables": ["b"]}
    attributes = PostgresSource.get_model_cls()(**given)
    with pytest.raises(ConfigurationError, match=r"attributes\.tables stands twice, in lines 5 an"):
        PostgresSource.load(attributes, context)
    (tmp_path / "defs.yaml").unlink()
    assert PostgresSource.load(attributes, context).config.name == "a"


def test_what_is_merged_in_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    usual = "{<<: &fast {chunk_pages: 7}, <<: {mode: append}, name: public.a}"
    other = "{<<: *usual, name: public.b, chunk_pages: 9}"
    file.write_text(f"{LEAST}tables: [&usual {usual}, {other}]")
    found = [(t.name, t.chunk_pages, t.mode) for t in load_config(file).tables]
    assert found == [("public.a", 7, "append"), ("public.b", 9, "append")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "tables: &t\n- public.a\n- [*t]",
            "tables[entry 2][entry 1] is an alias to what it stands in, of line 3",
        ),
        ("tables: [a]\nlake: &l\n  x: *l", "lake.x is an alias to what it stands in, of line 4"),
        ("tables: [a]\nlake: &l\n  <<: *l", "lake.<< is an alias to what it stands in, of line 4"),
        ("tables: [a]\nlake: &l {? *l : 1}", "a.yaml is not YAML: while constructing"),
    ],
)
def test_what_has_itself_in_it_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


def test_what_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    assert "a.yaml is nested too deeply" in refused(tmp_path, f"tables: {'[' * 9999}")


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_config(tmp_path / "nowhere.yaml")
    assert str(error.value) == (
        f"can't read the configuration {tmp_path / 'nowhere.yaml'}: No such file or directory."
        " Check --config."
    )
