"""A thread beside the main work outlives whatever goes wrong in it, and says so."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest

from cdc_assets.errors import SparkProblem
from cdc_assets.flusher.progress import Probe, Progress
from cdc_assets.log.session import STALE_SECONDS
from cdc_assets.log.sessions.heartbeat import Watch
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.process.helper_thread import HelperThread


def test_no_error_ends_it_and_each_is_noted_until_it_is_over(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDC_ASSETS_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    progress, calls, done = Progress(), count(), threading.Event()
    errors = [SparkProblem("no Spark."), *2 * [IndexError("pop from an empty deque")]]
    noted = list[str]()

    def step() -> None:
        noted.append(progress.troubles.get("pins", "well"))
        if (call := next(calls)) < len(errors):
            raise errors[call]
        if call > len(errors):
            done.set()

    ended: list[bool] = []
    thread = HelperThread(
        "pins",
        step,
        0.001,
        longest_seconds=0.01,
        at_end=lambda: ended.append(True),
        note=progress.note,
    )
    thread.start()
    assert done.wait(20)
    assert thread.close()
    index_error = "IndexError: pop from an empty deque"
    assert noted[:5] == ["well", "no Spark.", index_error, index_error, "well"]
    assert (ended, progress.troubles) == ([True], {})
    lines = [record for record in caplog.records if record.name.endswith("helper_thread")]
    assert [line.getMessage() for line in lines] == [
        "pins: no Spark.",
        f"pins: {index_error} (see {tmp_path / 'traces.log'})",  # of a defect, where
        "pins: all is well again",
    ]


def test_a_close_in_the_middle_of_a_wake_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    thread = HelperThread("late", lambda: None, 3600.0, at_end=ended.set)
    original, asked = thread._wake.clear, threading.Event()

    def clear() -> None:
        if not asked.is_set():  # what close does, before the wake is forgotten
            asked.set()
            thread._stop.set()
            thread._wake.set()
        original()

    monkeypatch.setattr(thread._wake, "clear", clear)
    thread.start()
    thread.soon()
    assert ended.wait(20)
    assert thread.close()


def test_a_step_that_is_wanted_soon_waits_for_no_time() -> None:
    steps = threading.Semaphore(0)
    thread = HelperThread("health", steps.release, 60.0)
    progress = Progress(on_state=thread.soon)
    thread.start()
    assert not steps.acquire(timeout=0.05)
    progress.enter("streaming")
    assert steps.acquire(timeout=20)
    progress.enter("streaming")
    assert not steps.acquire(timeout=0.05)
    assert thread.close()


class _AskedMeanwhile:
    """A level beyond everything; while it is compared another thread asks the probe, too."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def __ge__(self, _: object) -> bool:
        other = threading.Thread(target=self._probe.lag_seconds, args=(2.0, Lsn(2**40)))
        other.start()
        other.join(0.2)
        return True


def test_a_probe_is_asked_by_several_threads() -> None:
    probe = Probe()
    probe.saw(1.0, Lsn(2**30))
    assert probe.lag_seconds(2.0, _AskedMeanwhile(probe)) == 0.0  # type: ignore[arg-type]


def test_silence_counts_where_the_one_who_finds_it_was_awake_meanwhile() -> None:
    watch, began = Watch(), datetime(2026, 1, 1, tzinfo=UTC)

    def at(seconds: float) -> float | None:
        since = watch.beat(began + timedelta(seconds=seconds))
        return (since - began).total_seconds() if since is not None else None

    assert STALE_SECONDS == 30
    assert [at(second) for second in (0, 10, 20, 29)] == [None] * 4
    assert [at(30), at(33)] == [0, 3]
    assert [at(49), at(60), at(75), at(78)] == [None, None, None, None]  # it overslept by 13 s
    assert at(79) == 49
    assert at(40) is None  # another server, or its clock was put back
    assert [at(55), at(70)] == [None, 40]
