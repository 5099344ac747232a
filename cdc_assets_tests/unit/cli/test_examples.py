"""Each command's help ends with examples, and the command line takes each of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from cdc_assets.cli import group
from cdc_assets.cli.main import cli


def _commands(of: click.Group, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in of.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, *names, name)
        else:
            yield (*names, name)


@pytest.mark.parametrize("names", list(_commands(cli)), ids=" ".join)
def test_the_examples_of_a_command(names: tuple[str, ...]) -> None:
    help_text = CliRunner().invoke(cli, [*names, "--help"]).output
    examples = help_text.partition("\nExamples:\n")[2].splitlines()
    assert examples
    for example in examples:
        words = [word for word in shlex.split(example) if not word.startswith("APP_DSN=")]
        words = words[: words.index(">")] if ">" in words else words
        assert words.pop(0) == "cdc-assets"
        assert _taken(words) == names


def _taken(words: list[str]) -> tuple[str, ...]:
    """The command that the words name; raises UsageError if it doesn't take them."""
    context, names = cli.make_context("cdc-assets", words), list[str]()
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        name, command, rest = context.command.resolve_command(context, rest)
        assert name is not None
        assert command is not None
        names.append(name)
        context = command.make_context(name, rest, parent=context)
    assert isinstance(context.command, group._Command)
    return tuple(names)


def test_what_is_not_taken_is_seen() -> None:
    with pytest.raises(click.UsageError):
        _taken(["verify", "--tables", "public.orders"])
