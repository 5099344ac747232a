"""A tick that waits for what is starting up, and what it costs others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import dagster as dg
import psycopg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.sensors import pace
from cdc_assets.dagster.sensors.pace import NotYet, UnderWay, patient, reachable, skipped

CONFIG = parse_config(
    {
        "name": "src",
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": "public.t"}],
    },
    "test",
)


def _context(*, threads: bool) -> Any:
    """A tick's context, of an instance with or without threads for sensors."""
    context = Mock(instance_ref=None)
    context.instance.get_settings.return_value = {"use_threads": True} if threads else {}
    return context


THREADS = _context(threads=True)


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "AGAIN_SECONDS", 0.01)


def test_a_tick_looks_again_until_what_it_needs_is_there() -> None:
    missing = [None] * 3

    @patient
    def tick(_: dg.SensorEvaluationContext) -> str:
        if missing:
            missing.pop()
            raise NotYet("Postgres starts")
        return "asked for a run"

    began = time.monotonic()
    assert tick(THREADS) == "asked for a run"
    assert time.monotonic() - began < pace.WAIT_SECONDS


@pytest.mark.parametrize("decorator", [patient, skipped])
def test_a_tick_that_waited_in_vain_says_for_what(
    decorator: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.2)
    looks: list[None] = []

    @decorator
    def tick(_: dg.SensorEvaluationContext) -> None:
        looks.append(None)
        raise NotYet("Postgres starts")

    began = time.monotonic()
    assert tick(THREADS) == dg.SkipReason("Postgres starts")
    if decorator is skipped:
        assert len(looks) == 1
    else:
        assert len(looks) > 2
        assert 0.1 < time.monotonic() - began < 1.0


def test_without_threads_no_tick_waits() -> None:
    looks: list[None] = []

    @patient
    def tick(_: dg.SensorEvaluationContext) -> None:
        looks.append(None)
        raise NotYet("Postgres starts")

    assert tick(_context(threads=False)) == dg.SkipReason("Postgres starts")
    assert len(looks) == 1


def test_a_dear_look_is_repeated_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WAIT_SECONDS", 5.0)
    looks: list[None] = []

    @patient
    def tick(_: dg.SensorEvaluationContext) -> None:
        looks.append(None)
        time.sleep(0.1)
        raise NotYet("no table is copied yet")

    tick(THREADS)
    assert len(looks) == 2  # the second one 30 × 0.1 s later; a third one would end too late


def test_ticks_that_wait_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.4)

    @patient
    def tick(_: dg.SensorEvaluationContext) -> None:
        raise NotYet("Postgres starts")

    def seconds() -> float:
        began = time.monotonic()
        tick(THREADS)
        return time.monotonic() - began

    for _ in range(2):  # the places are given back
        with ThreadPoolExecutor(pace.PLACES + 3) as pool:
            took = [one.result() for one in [pool.submit(seconds) for _ in range(pace.PLACES + 3)]]
        assert sorted(one > 0.3 for one in took) == [False] * 3 + [True] * pace.PLACES


def test_what_is_under_way_for_hours_leaves_places_to_what_starts_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.4)

    @patient
    def tick(_: dg.SensorEvaluationContext) -> None:
        raise UnderWay("public.t: 1/2 chunks, a run is at it")

    def seconds() -> float:
        began = time.monotonic()
        tick(THREADS)
        return time.monotonic() - began

    for _ in range(2):  # the place is given back
        with ThreadPoolExecutor(pace.PLACES) as pool:
            took = [one.result() for one in [pool.submit(seconds) for _ in range(pace.PLACES)]]
        assert sorted(one > 0.3 for one in took) == [False] * (pace.PLACES - 1) + [True]


def test_an_unreachable_database_is_waited_for_and_everything_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tick(error: Exception) -> object:
        @patient
        def one(_: dg.SensorEvaluationContext) -> None:
            with reachable(CONFIG):
                raise error

        return one(THREADS)

    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.1)
    waits = tick(psycopg.OperationalError("connection refused\nIs the server running?"))
    assert waits == dg.SkipReason("Waiting for the Postgres of src: connection refused")
    with pytest.raises(ValueError, match="broken"):
        tick(ValueError("broken"))
    held = [pace._places.acquire(blocking=False) for _ in range(pace.PLACES)]
    assert all(held)  # an error gave its place back, too
    pace._places.release(pace.PLACES)
