"""A merge waits for its target, and no longer."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.log.batch import BATCH_ROWS
from cdc_assets.log.cursors import Backlog
from cdc_assets.materializer.workers.cadence import Cadence
from cdc_assets.postgres.names import TableId

T = TableId("public", "t")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def config(target: str) -> SourceConfig:
    tables = [{"name": "public.t", "freshness": {"target": target}}]
    dsn = "postgresql://u@h/d"
    return parse_config({"name": "s", "postgres": {"dsn": dsn}, "tables": tables}, "test")


def backlog(seconds: float, **more: Any) -> Backlog:
    """One change of that age."""
    values = {"rows": 1, "bytes": 100, "offset": 0, **more}
    return Backlog(table=T, oldest_commit=NOW - timedelta(seconds=seconds), **values)


def test_a_merge_begins_so_that_the_oldest_change_is_visible_at_the_target() -> None:
    cadence = Cadence(config("10s"))
    cadence.took(T, 4.0)
    # A file's commit is its last one's; the first may be a flush interval, 1 s, older.
    assert cadence.due_seconds(backlog(4.5), NOW) == pytest.approx(0.5)
    cadence.took(T, 30.0)
    cadence.took(T, 30.0)  # longer than the target: one follows the other
    assert cadence.due_seconds(backlog(0.0), NOW) < 0


def test_the_longest_of_the_last_merges_is_expected_again_unless_it_was_an_odd_one() -> None:
    cadence = Cadence(config("10s"))
    for seconds in (4.0, 3.0, 2.5):
        cadence.took(T, seconds)
    assert cadence.due_seconds(backlog(4.5), NOW) == pytest.approx(0.5)
    for _ in range(12):
        cadence.took(T, 2.5)
    assert cadence.due_seconds(backlog(4.5), NOW) == pytest.approx(2.0)
    cadence.took(T, 60.0)
    assert cadence.due_seconds(backlog(3.5), NOW) == pytest.approx(0.5)


@pytest.mark.parametrize("full", [{"bytes": 10**9}, {"rows": BATCH_ROWS}])
def test_a_full_batch_is_due_at_once(full: dict[str, int]) -> None:
    assert Cadence(config("4m")).due_seconds(backlog(0.0, **full), NOW) <= 0


def test_a_target_of_nothing_waits_for_nothing() -> None:
    assert Cadence(config("0s")).due_seconds(backlog(0.0), NOW) <= 0


def test_a_clock_that_is_ahead_delays_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    cadence, ahead = Cadence(config("10s")), backlog(-3600.0)
    began = time.monotonic()
    assert cadence.due_seconds(ahead, NOW) > 0
    monkeypatch.setattr(time, "monotonic", lambda: began + 9.5)
    assert cadence.due_seconds(ahead, NOW) < 0
    assert cadence.due_seconds(backlog(-3600.0, offset=7), NOW) > 0  # applied: another one waits
