"""Tables at the width of a usual terminal: short values whole, words whole, remarks below."""

from __future__ import annotations

import pytest

from cdc_assets.cli import columns, terminal
from cdc_assets.log.sessions.flusher_status import FlusherStatus
from cdc_assets.maintenance.run import Maintained
from cdc_assets.observe.report import Health
from cdc_assets.observe.status import SourceStatus, TableStatus
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

WHY = "the role cdc_app may not read it. Grant it: grant select on nokey to cdc_app;"
TOLD = f"sales.parts: {WHY}"


def status(capsys: pytest.CaptureFixture[str], *tables: TableStatus) -> list[str]:
    source = SourceStatus("app", tables, "s", None, FlusherStatus("down"), {})
    terminal.show_health(Health(source, (), ()))
    return capsys.readouterr().out.splitlines()


def streaming(name: str, **more: object) -> TableStatus:
    settings = {
        "chunks_total": 12,
        "chunks_done": 12,
        "applied_lsn": str(Lsn.parse("0/1DB46802")),
        "lag_seconds": 4.1,
        "lag_bytes": 1234,
        "pending_rows": 1234,
        **more,
    }
    return TableStatus(name, f"app.{name}", "streaming", **settings)  # type: ignore[arg-type]


def test_a_tables_row_is_one_line_and_its_reason_is_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = status(capsys, streaming("sales.parts", reason=TOLD), streaming("public.t"))
    rows = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["sales.parts", "streaming", "12/12", "0/1DB46802", "4.1 s, 1,234 B", "1,234"],
        ["public.t", "streaming", "12/12", "0/1DB46802", "4.1 s, 1,234 B", "1,234"],
    ]
    assert max(map(len, lines[: lines.index(TOLD)])) <= 80
    monkeypatch.setenv("COLUMNS", "180")
    lines = status(capsys, streaming("sales.parts", reason=WHY))
    assert TOLD not in lines
    assert any(" ".join(WHY.split()[:6]) in line for line in lines)


def test_a_long_name_takes_nothing_from_short_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = status(capsys, streaming("public.a_table_of_a_name_that_is_long"))
    rows = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    shown = [[cell.strip() for cell in row] for row in rows]
    assert shown[0][1:] == ["streaming", "12/12", "0/1DB46802", "4.1 s,", "1,234"]
    assert "".join(row[0] for row in shown) == "public.a_table_of_a_name_that_is_long"


@pytest.mark.parametrize(
    ("room", "found"),
    [
        (35, [12, 12, 10]),
        (30, [12, 9, 9]),
        (27, [12, 7, 8]),  # the headers, and each the longest word
        (20, [8, 6, 6]),
        (3, [1, 1, 1]),
        (-3, [1, 1, 1]),
    ],
)
def test_what_gives_way_first(room: int, found: list[int]) -> None:
    rows = [("public.lines", "one, another", "a pendency"), ("t", "", "")]
    assert columns.widths(("table", "the key", "is"), rows, room) == found


def test_a_number_keeps_its_unit() -> None:
    assert columns.widths(("table", "lag"), [("t", "4.1 s, 1,234 B")], 12) == [5, 7]


def test_maintain_cuts_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "another run maintains it; it is left for the next one, which begins within the hour."
    done = [
        Maintained(TableId("public", "MixedCase"), data_files=12, snapshots=3),
        Maintained(TableId("public", "My.Table"), left_alone=why),
    ]
    monkeypatch.setenv("COLUMNS", "80")
    terminal.show_maintained(done)
    lines = capsys.readouterr().out.splitlines()
    names = [line.strip("│").split("│")[0] for line in lines if line.startswith("│")]
    assert [name for name in map(str.strip, names) if name] == [
        'public."MixedCase"',
        'public."My.Table"',
    ]
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == f'public."My.Table": {why}'
    monkeypatch.delenv("COLUMNS")
    terminal.show_maintained(done)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if '"MixedCase"' in line and "12 files, 3 snapshots" in line]
    assert [line for line in lines if '"My.Table"' in line and why in line]
