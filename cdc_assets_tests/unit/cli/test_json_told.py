"""Which commands print JSON is what the README says; each one's help tells the form."""

from __future__ import annotations

import re
from pathlib import Path

import click
from click.testing import CliRunner

import cdc_assets
from cdc_assets.cli.main import cli

README = Path(cdc_assets.__file__).parents[1] / "README.md"


# Those of config print a file, as it is.
COMMANDS = {name: each for name, each in cli.commands.items() if not isinstance(each, click.Group)}


def _has_json(command: click.Command) -> bool:
    return any("--json" in option.opts for option in command.params)


def test_the_readme_names_the_commands_that_print_no_json() -> None:
    found = re.search(r"form; (.*) have none\.", README.read_text(encoding="utf-8"))
    assert found is not None
    without = {name for name, command in COMMANDS.items() if not _has_json(command)}
    assert without == set(re.findall(r"`(\w+)`", found[1]))


def test_the_help_tells_the_form() -> None:
    told = {
        name: " ".join(CliRunner().invoke(cli, [name, "--help"]).output.split())
        for name, command in COMMANDS.items()
        if _has_json(command)
    }
    assert {"sync", "check", "drop-table"} <= told.keys()
    assert [name for name, text in told.items() if "With --json: It prints " not in text] == []
