"""A tick that waits for what is starting up, and what it costs others."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import dagster as dg
import psycopg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.sensors import pace
from cdc_assets.dagster.sensors.pace import NotYet, patient, reachable, skipped

CONFIG = parse_config(
    {
        "name": "src",
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": "public.t"}],
    },
    "test",
)


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "AGAIN_SECONDS", 0.01)


def test_a_tick_looks_again_until_what_it_needs_is_there() -> None:
    missing = [None] * 3

    @patient
    def tick() -> str:
        if missing:
            missing.pop()
            raise NotYet("Postgres starts")
        return "asked for a run"

    began = time.monotonic()
    assert tick() == "asked for a run"
    assert time.monotonic() - began < pace.WAIT_SECONDS


@pytest.mark.parametrize("decorator", [patient, skipped])
def test_a_tick_that_waited_in_vain_says_for_what(
    decorator: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.2)
    looks: list[None] = []

    @decorator
    def tick() -> None:
        looks.append(None)
        raise NotYet("Postgres starts")

    began = time.monotonic()
    assert tick() == dg.SkipReason("Postgres starts")
    if decorator is skipped:
        assert len(looks) == 1
    else:
        assert len(looks) > 2
        assert 0.1 < time.monotonic() - began < 1.0


def test_a_dear_look_is_repeated_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WAIT_SECONDS", 1.5)
    looks: list[None] = []

    @patient
    def tick() -> None:
        looks.append(None)
        time.sleep(0.03)
        raise NotYet("no table is copied yet")

    tick()
    assert len(looks) == 2  # the second one 30 × 0.03 s later; a third one would end too late


def test_ticks_that_wait_leave_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.4)

    @patient
    def tick() -> None:
        raise NotYet("Postgres starts")

    def seconds() -> float:
        began = time.monotonic()
        tick()
        return time.monotonic() - began

    for _ in range(2):  # the places are given back
        with ThreadPoolExecutor(pace.PLACES + 3) as pool:
            took = [one.result() for one in [pool.submit(seconds) for _ in range(pace.PLACES + 3)]]
        assert sorted(one > 0.3 for one in took) == [False] * 3 + [True] * pace.PLACES


def test_an_unreachable_database_is_waited_for_and_everything_else_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @patient
    def tick(error: Exception) -> None:
        with reachable(CONFIG):
            raise error

    monkeypatch.setattr(pace, "WAIT_SECONDS", 0.1)
    waits = tick(psycopg.OperationalError("connection refused\nIs the server running?"))
    assert waits == dg.SkipReason("Waiting for the Postgres of src: connection refused")
    with pytest.raises(ValueError, match="broken"):
        tick(ValueError("broken"))
    held = [pace._places.acquire(blocking=False) for _ in range(pace.PLACES)]
    assert all(held)  # an error gave its place back, too
    pace._places.release(pace.PLACES)
