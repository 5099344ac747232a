"""Tables in a terminal: no name is cut, however narrow it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc_assets.cli import terminal
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.inventory import Listed

LONG = "a_table_of_a_name_that_is_rather_long"
FOUND = [
    Listed(TableId("public", LONG), 10, 8192, 3, ("id", "at"), "default", ()),
    Listed(
        TableId("public", "x"),
        None,
        0,
        0,
        (),
        "nothing",
        (Finding("replica_identity", "error", "Bad [red]name[/red]\x1b[1m.", "Mend it."),),
    ),
]


@pytest.mark.parametrize(("columns", "wide"), [("60", False), ("60", True), ("200", False)])
def test_no_name_is_cut(
    columns: str, wide: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    terminal.show_tables(FOUND, wide=wide)
    out = capsys.readouterr().out
    assert "…" not in out
    whole = "public." + LONG
    assert (whole in out) is (wide or columns == "200")
    if wide:
        assert f"{whole} (3 partitions)" in out
    assert "10" in out
    assert "8.2 kB" in out


@pytest.mark.parametrize("columns", ["40", "60", "80"])
def test_nothing_is_cut_off(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    terminal.show_tables(FOUND)
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "│┃┏└"]
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= int(columns)
    assert {line[-1] for line in lines} == {"│", "┃", "┓", "┘"}
    cells = [line.strip("│┃").replace("┃", "│").split("│") for line in lines if line[0] in "│┃"]
    shown = ["".join(cell.strip() for cell in column) for column in zip(*cells, strict=True)]
    assert LONG in shown[0]
    assert "replica_identity" in shown[-1]


def test_for_a_program_lines_are_as_long_as_they_need_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.show_tables(FOUND)
    assert f"public.{LONG} (3 partitions)" in capsys.readouterr().out


def test_what_is_in_the_way_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_tables(FOUND)
    said = capsys.readouterr().err
    assert "replica_identity: Bad [red]name[/red]\\x1b[1m." in said


def test_what_is_configured_is_not_said_to_be_replicated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is of the source alone, which doesn't know whether anything was copied."""
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.show_tables([replace(FOUND[0], configured=True)])
    out = capsys.readouterr().out
    assert "nothing (configured)" in out
    assert "replicated" not in out
