"""SIGKILL at every step of passing a log on: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import signal
from pathlib import Path

from cdc_assets_tests.faults.killed_at import RELAY
from cdc_assets_tests.support.flusher import Bench, start_flusher
from cdc_assets_tests.support.second import second_log


def test_every_step(source: Bench, tmp_home: Path, tmp_path: Path) -> None:
    source.execute("create table a (id int primary key)")
    first = source.config("a")
    source.flush(first)
    with second_log(source, first) as second:
        second.pin()
        file = tmp_path / "second.json"
        file.write_text(second.config.dump())
        for number, step in enumerate(RELAY):
            source.execute(f"insert into a select {10 * number} + generate_series(1, 10)")
            source.flush(first)
            child = start_flusher(file, "cdc_assets_tests.faults.killed_at", step, "1")
            assert child.wait(60) == -signal.SIGKILL, step
            second.flush()
            assert second.is_whole("a"), step
            assert len(second.entries("a")) == number + 1, step
        assert second.held() == {"public.a": 0}
