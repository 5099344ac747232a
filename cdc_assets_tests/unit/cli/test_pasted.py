"""Commands that messages tell can be pasted as they stand."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.cli.main import cli
from cdc_assets.cli.pasted import called_by, told
from cdc_assets.messages.texts import command, copy_anew, plain
from cdc_assets.postgres.names import TableId

HIDDEN = [
    *map(chr, (*range(1, 32), *range(127, 160), 0x61C, 0x200E, 0x200F)),
    *map(chr, (*range(0x2028, 0x202F), *range(0x2066, 0x206A))),
]
SHOWN = st.characters(exclude_characters=["\0", *HIDDEN], codec="utf-8")


@given(st.text(SHOWN, min_size=1))
def test_a_shell_reads_the_name_of_any_table_as_it_is(name: str) -> None:
    table = TableId("public", name)
    words = shlex.split(command("resync", table))
    assert words == ["cdc-assets", "resync", str(table)]
    assert TableId.parse(words[2]) == table


def test_a_name_that_no_terminal_shows_can_be_pasted() -> None:
    names = [f"{end}a{hidden}'b\\n\"" for hidden in HIDDEN for end in ("", "\\", "'")]
    words = [command("x", TableId("public", name)).removeprefix("cdc-assets x ") for name in names]
    assert not [word for word in words if word != plain(word) or "\n" in word or "\t" in word]
    told = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"],
        env={"LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=True,
    )
    read = told.stdout.decode().split("\0")[:-1]
    assert [TableId.parse(word) for word in read] == [TableId("public", name) for name in names]


def test_a_plain_name_has_no_quotes_and_nothing_after_it() -> None:
    assert copy_anew(TableId("public", "t")) == "Copy it anew: cdc-assets resync public.t"


def test_a_command_of_a_message_has_the_configuration_that_ours_was_given() -> None:
    called_by("o'brien/my app.yaml", cli.commands)
    said = told("Mend it, then `cdc-assets --config FILE resync 'public.\"T\"'`.")
    assert shlex.split(said.split("`")[1]) == [
        *("cdc-assets", "--config", "o'brien/my app.yaml", "resync", 'public."T"')
    ]
    assert "cdc-assets --config " in told("See: cdc-assets status.")


def test_without_one_it_needs_none() -> None:
    called_by(None, cli.commands)
    assert told("`cdc-assets --config FILE status` says") == "`cdc-assets status` says"


@pytest.mark.parametrize(
    "text",
    [
        "cdc-assets has a defect: KeyError",
        "cdc-assets --config other.yaml check",
        "the slot of cdc-assets",
        "cdc-assets",
    ],
)
def test_what_is_no_command_of_ours_stays(text: str) -> None:
    called_by("app.yaml", cli.commands)
    assert told(text) == text
