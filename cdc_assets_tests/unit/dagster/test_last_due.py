"""When a schedule came last, by its interval: as its cron line has it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cdc_assets.dagster.sensors.schedules import cron, last_due


@pytest.mark.parametrize(
    ("minutes", "line", "at", "due"),
    [
        (15, "*/15 * * * *", "31T10:44", "31T10:30"),
        (15, "*/15 * * * *", "31T10:45", "31T10:45"),
        (60, "7 * * * *", "31T10:06", "31T09:07"),
        (60, "7 * * * *", "31T10:07", "31T10:07"),
        (360, "7 */6 * * *", "31T00:06", "30T18:07"),
        (360, "7 */6 * * *", "31T23:59", "31T18:07"),
        (1440, "7 3 * * *", "31T03:06", "30T03:07"),
        (1440, "7 3 * * *", "31T03:07", "31T03:07"),
    ],
)
def test_an_interval_is_due_when_its_cron_line_says_so(
    minutes: int, line: str, at: str, due: str
) -> None:
    every = timedelta(minutes=minutes)
    assert cron(every) == line
    now, then = (
        datetime.fromisoformat(f"2026-12-{text}").replace(tzinfo=UTC) for text in (at, due)
    )
    assert last_due(every, now) == then
