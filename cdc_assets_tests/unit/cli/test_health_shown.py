"""What ``status`` says of a source, to a person."""

from __future__ import annotations

from typing import Literal

import pytest

from cdc_assets.cli import terminal
from cdc_assets.log.sessions.flusher_status import FlusherStatus
from cdc_assets.observe.condition import Condition
from cdc_assets.observe.report import Health, Problem
from cdc_assets.observe.status import SourceStatus, TableStatus


def behind(name: str, severity: Literal["warn", "fail"] = "warn") -> Problem:
    told = f"app.{name} is behind public.{name}", "849 s", "`cdc-assets status` says where."
    return Problem(Condition(f"freshness:app.{name}", *told), severity)


def told(capsys: pytest.CaptureFixture[str], *problems: Problem) -> str:
    tables = (TableStatus("public.t", "app.t", "streaming"),)
    left = ("public.gone",)
    status = SourceStatus("app", tables, "s", None, FlusherStatus("down"), {}, left=left)
    terminal.show_health(Health(status, problems, ()))
    output = capsys.readouterr()
    assert "still staged: public.gone: it is out of the configuration" in output.out
    return output.err


def test_what_all_tables_have_is_said_once_and_its_cause_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cause = Problem(Condition("flusher", "nobody streams", "down", "Start it."), None)
    young = Problem(Condition("spark", "Spark can't be reached", "gone", "Start it."), None)
    lines = told(capsys, cause, young, behind("b"), behind("a", "fail")).splitlines()
    assert lines == [
        "warn nobody streams: down",
        "    Start it.",
        "warn Spark can't be reached: gone",
        "    Start it.",
        "fail 2 lake tables are behind: app.a, app.b",
    ]
    assert told(capsys, cause) == ""


def test_one_table_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, behind("a")).splitlines()[0] == "warn app.a is behind public.a: 849 s"
