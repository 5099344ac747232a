"""What a shell completes: files, and names of tables that need no quotes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from cdc_assets.cli.main import cli

FILE = """
type: cdc_assets.PostgresSource
attributes:
  name: a
  postgres: {dsn: "${CDC_NOT_SET}"}
  tables: [public.orders, {name: public.parts}, sales.x, 'public."Mixed"', public.*, 3]
"""


def completed(*words: str) -> list[tuple[str, str]]:
    *before, last = words
    found = ShellComplete(cli, {}, "cdc-assets", "_CDC_ASSETS_COMPLETE").get_completions(
        list(before), last
    )
    return [(item.type, item.value) for item in found]


def test_config_completes_files() -> None:
    assert completed("--config", "a") == [("file", "a")]


def test_table_completes_names_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert completed("verify", "--table", "") == []
    (tmp_path / "broken.yaml").write_text("tables: [")
    assert completed("--config", "broken.yaml", "verify", "--table", "") == []
    (tmp_path / "list.yaml").write_text("[tables]")
    assert completed("--config", "list.yaml", "verify", "--table", "") == []
    for name in ("mine.yaml", "cdc_assets.yaml"):
        (tmp_path / name).write_text(FILE)
    for given in (["--config", "mine.yaml"], []):
        names = ["public.orders", "public.parts", "sales.x"]
        assert completed(*given, "verify", "--table", "") == [("plain", name) for name in names]
        assert completed(*given, "verify", "--table", "sa") == [("plain", "sales.x")]
        for command in ("resync", "pause", "resume"):
            assert completed(*given, command, "sa") == [("plain", "sales.x")]
        assert completed(*given, "backfill", "sa") == [("plain", "sales.x")]
        assert completed(*given, "backfill", "p")[0] == ("plain", "pause")
        assert completed(*given, "backfill", "pause", "") == []
        assert completed(*given, "drop-table", "") == []  # these are the ones that it refuses
