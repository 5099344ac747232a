"""What commands say of their results: numbers that agree, and what to do next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cdc_assets.cli import terminal
from cdc_assets.cli.main import cli
from cdc_assets.messages.texts import counted
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.difference import Comparison

T = TableId("public", "o'brien notes")


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 keys differ"), (1, "1 key differs"), (2000, "2,000 keys differ")]
)
def test_a_number_agrees_with_its_words(number: int, said: str) -> None:
    assert counted(number, "key", "differ") == said
    assert counted(number, "key") == said.rpartition(" ")[0]


def test_who_finds_differences_is_told_how_they_are_corrected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Comparison(T, Lsn(5), 1, 1, 1, ("#1",))
    terminal.show_compared([found])
    said = capsys.readouterr().out.splitlines()
    assert said == [
        """public."o'brien notes": 1 key differs (source 1 row, lake 1 row)""",
        "    #1",
        """    To correct it: cdc-assets verify --table 'public."o'"'"'brien notes"' --repair""",
    ]
    terminal.show_compared([replace(found, unrepaired="more than that differ")])
    assert "--repair" not in capsys.readouterr().out
    terminal.show_compared([replace(found, differing=0, repaired=1)])
    assert "    1 key was corrected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--config", "app.yaml"), "cdc-assets --config app.yaml status"),
        (("--config=my app.yaml",), "cdc-assets --config 'my app.yaml' status"),
        (("--json", "-v"), "cdc-assets -v status"),
        (("--config",), "cdc-assets --config FILE status"),
    ],
)
def test_an_option_of_all_commands_that_stands_after_one_is_pointed_out(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(cli, ["status", *words])
    assert result.exit_code == 2
    assert f"goes before the command: {told}" in result.stderr
