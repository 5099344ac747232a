"""Quiet times: parts of a day in which nothing is merged by itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cdc_assets.config.base import DailyWindow, seconds_left
from cdc_assets.config.source import parse_config
from cdc_assets.config.tables import FreshnessConfig
from cdc_assets.errors import ConfigurationError

HOUR = 3600.0


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("windows", "moment", "hours"),
    [
        (["08:00-18:00"], "2026-01-14T08:00", 10),
        (["08:00-18:00"], "2026-01-14T17:00", 1),
        (["08:00-18:00"], "2026-01-14T18:00", 0),
        (["08:00-18:00"], "2026-01-14T07:59", 0),
        (["22:00-06:00"], "2026-01-14T23:00", 7),
        (["22:00-06:00"], "2026-01-14T05:00", 1),
        (["22:00-06:00"], "2026-01-14T12:00", 0),
        (["22:00-06:00", "06:00-07:00"], "2026-01-14T05:00", 2),
        (["12:00-11:00", "11:00-12:00"], "2026-01-14T05:00", 24),
        (["08:00-18:00 Europe/Berlin"], "2026-01-14T07:00", 10),
        (["08:00-18:00 Europe/Berlin"], "2026-07-14T06:00", 10),
        (["01:00-04:00 Europe/Berlin"], "2026-03-29T00:00", 2),  # an hour of that night is none
        (["01:00-04:00 Europe/Berlin"], "2026-10-24T23:00", 4),
        (["00:00-06:00 Pacific/Auckland"], "2026-01-14T12:00", 5),
    ],
)
def test_how_long_it_is_quiet(windows: list[str], moment: str, hours: float) -> None:
    found = seconds_left([DailyWindow.parse(text) for text in windows], at(moment))
    assert found == hours * HOUR


@pytest.mark.parametrize(
    "text", ["8-18", "08:00", "25:00-26:00", "08:00-08:00", "08:00-09:00 Mars"]
)
def test_what_is_no_window_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DailyWindow.parse(text)


def _freshness(**settings: Any) -> FreshnessConfig:
    data = {"name": "s", "postgres": {"dsn": "postgresql://u@h/d"}}
    table = {"name": "t", "freshness": settings}
    return parse_config({**data, "tables": [table]}, "test").tables[0].freshness


def test_a_change_may_wait_for_as_long_as_it_is_quiet() -> None:
    """So that neither the alerts nor Dagster take what was asked for for a fault."""
    with pytest.raises(ConfigurationError, match=r"may wait for 10\.0 h, and warn has to be"):
        _freshness(quiet=["08:00-18:00"])
    with pytest.raises(ConfigurationError, match=r"may wait for 10\.5 h"):
        _freshness(quiet=["08:00-18:00"], target="30m", warn="601m", fail="12h")
    with pytest.raises(ConfigurationError, match=r"it is quiet all day"):
        _freshness(quiet=["08:00-18:00", "18:00-08:00"], warn="25h", fail="26h")
    with pytest.raises(ConfigurationError, match=r"may wait for 9\.0 h"):  # in one night of a year
        _freshness(quiet=["22:00-06:00 Europe/Berlin"], warn="530m", fail="12h")
    two = ["00:00-08:00 Europe/Berlin", "06:00-14:00"]
    with pytest.raises(ConfigurationError, match=r"may wait for 16\.0 h"):  # in summer
        _freshness(quiet=two, warn="930m", fail="17h")
    assert _freshness(quiet=["08:00-18:00"], warn="11h", fail="12h").quiet


def test_what_waits_in_quiet_times_is_not_overdue() -> None:
    freshness = _freshness(quiet=["08:00-18:00"], target="15m", warn="11h", fail="12h")
    minutes = timedelta(minutes=1).total_seconds()
    assert freshness.overdue_seconds(9 * HOUR, at("2026-01-14T17:00")) == 0
    assert freshness.overdue_seconds(10 * HOUR, at("2026-01-14T18:01")) == minutes
    assert freshness.overdue_seconds(14 * minutes, at("2026-01-14T20:00")) == 0
    assert freshness.overdue_seconds(20 * minutes, at("2026-01-14T20:00")) == 5 * minutes
