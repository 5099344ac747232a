"""SIGKILL at every step of a poll: nothing is lost, and the log leaves each row once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.faults.killed_at import POLLS
from cdc_assets_tests.support.flusher import start_flusher
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, T, queried


@pytest.fixture
def source(postgres_dsn: NewDatabase, tmp_home: object) -> Iterator[Queried]:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as opened:
        yield opened


def test_every_step(source: Queried, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction is open at each death: the next process knows nothing of it but the bound."""
    monkeypatch.setattr("cdc_assets.poller.source.MARGIN", 0)
    file = tmp_path / "source.json"
    file.write_text(source.config.dump())
    for number, step in enumerate(POLLS):
        with source.session() as late:
            late.execute("begin")
            late.execute(f"insert into t values ({10 * number}, 'late')")
            source.execute(f"insert into t values ({10 * number + 1}, 'x')")
            source.execute(f"update t set v = '{step}', updated_at = now() where id % 10 = 1")
            child = start_flusher(file, "cdc_assets_tests.faults.killed_at", step, "1")
            assert child.wait(60) == -signal.SIGKILL, step
            late.execute("commit")
        source.flush()
        assert source.is_level(), step
    names = {str(table) for table in source.pipeline.store.log_ends()}
    assert names == {str(T)}
    assert json.loads(source.pipeline.store.meta("query_read") or "{}")
