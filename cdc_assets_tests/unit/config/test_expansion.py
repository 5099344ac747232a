"""References: the same value by either spelling, and a source table's name that is nobody's."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.errors import ConfigurationError


def read(folder: Path, tables: str) -> SourceConfig:
    file = folder / "a.yaml"
    file.write_text(f"name: a\npostgres: {{dsn: 'postgresql://h/db'}}\ntables: {tables}")
    return load_config(file)


@pytest.mark.parametrize("spelt", ["${CDC_AS}", "{{ env.CDC_AS }}", "{{env.CDC_AS}}"])
def test_as_is_a_value(spelt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = f"[{{name: public.orders, as: '{spelt}'}}]"
    with pytest.raises(ConfigurationError, match="variable CDC_AS is not set"):
        read(tmp_path, tables)
    monkeypatch.setenv("CDC_AS", "sold_${b")
    (table,) = read(tmp_path, tables).tables
    assert table.as_ == "sold_${b"


@pytest.mark.parametrize("entry", ["{}", "{{name: {}}}"])
def test_a_template_in_a_name_needs_no_variable(entry: str, tmp_path: Path) -> None:
    name = 'public."{{ env.CDC_NOT_SET }}"'
    config = read(tmp_path, f"[{entry.format(repr(name))}]")
    assert [table.name for table in config.tables] == [name]
