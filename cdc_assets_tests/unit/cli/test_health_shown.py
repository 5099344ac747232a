"""What ``status`` says of a source, to a person."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any, Literal

import pytest

from cdc_assets.cli import terminal
from cdc_assets.log.sessions.flusher_status import FlusherStatus
from cdc_assets.log.sessions.workers import KnownWorker
from cdc_assets.observe.condition import Condition
from cdc_assets.observe.report import Health, Problem
from cdc_assets.observe.status import SourceStatus, TableStatus
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


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


def test_why_a_table_is_parked_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # there the reasons stand below the table
    reason = "the role app may not read it. grant select on t to app;"
    condition = Condition("parked:public.t", "public.t is parked", reason, "It is copied then.")
    tables = (
        TableStatus("public.t", "app.t", "parked", reason=reason),
        TableStatus("public.u", "app.u", "waiting", reason="somebody has locked it"),
    )
    status = SourceStatus("app", tables, "s", None, FlusherStatus("down"), {})
    terminal.show_health(Health(status, (Problem(condition, "fail"),), ()))
    output = capsys.readouterr()
    assert (output.out + output.err).count(reason) == 1
    assert "somebody has locked it" in output.out


def lines(capsys: pytest.CaptureFixture[str], flusher: FlusherStatus, **more: Any) -> list[str]:
    tables = (TableStatus("public.t", "app.t", "streaming"),)
    status = SourceStatus("app", tables, "s", None, flusher, {}, left=("public.gone",), **more)
    terminal.show_health(Health(status, (), ()))
    return capsys.readouterr().out.splitlines()


REPORT = {
    "received_lsn": "0/500",
    "staged_lsn": "0/400",
    "acknowledged_lsn": "0/300",
    "lag_seconds": 0.0,
    "staging_retries": 1,
    "changes": {"public.t": {"insert": 1, "update": 2}},
    "bytes": {"public.t": 2_000_000},
}


def test_what_is_of_the_flusher_stays_together(capsys: pytest.CaptureFixture[str]) -> None:
    flusher = FlusherStatus("streaming", True, Lsn(0x400), 2.0, 256, 0.5, REPORT)
    said = lines(capsys, flusher)
    at = next(n for n, line in enumerate(said) if line.startswith("flusher: "))
    assert said[at + 1 : at + 4] == [
        (
            "  received 0/500, staged 0/400, acknowledged 0/300; 256 B and 2.0 s behind;"
            " staging was retried 1 time (told 0 s ago)"
        ),
        "  public.t: 1 insert, 2 updates; 2.0 MB staged",
        (
            "still staged: public.gone: it is out of the configuration; to end that: cdc-assets"
            " drop-table public.gone"
        ),
    ]


def test_a_flusher_that_ended_is_as_far_behind_as_its_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = {**REPORT, "received_lsn": "0/0", "staged_lsn": "0/0", "acknowledged_lsn": "0/0"}
    said = lines(capsys, FlusherStatus("down", False, Lsn(0x400), 10.8, 137_872, 9.0, report))
    line = "  received nothing yet; 137,872 B and 10.8 s behind; staging was retried 1 time"
    assert f"{line} (told 9 s ago)" in said


def test_of_a_workers_many_tables_some_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    def line(count: int) -> str:
        claims = {TableId("public", f"t{number:03}"): 1 for number in range(count)}
        known = (uuid.UUID(int=1), "process 1", frozenset(claims), datetime(2026, 1, 1, tzinfo=UTC))
        worker = KnownWorker(*known, 1.0, alive=True, claims=claims)
        said = lines(capsys, FlusherStatus("down"), workers=(worker,))
        return next(line for line in said if line.startswith("worker process 1"))

    assert line(500).endswith("public.t018, public.t019 and 480 more")
    assert line(20).endswith("public.t018, public.t019")
    assert line(0).endswith(": no table")


def test_a_dropped_source_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(capsys, FlusherStatus("dropped"))
    assert "source app: dropped; to take it up again: cdc-assets resume" in said
