"""Servers that call their timelines the same, and one that forgets what was acknowledged."""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg
import pytest

from cdc_assets.embedded.binaries import own, server_user
from cdc_assets.errors import SourceMismatch
from cdc_assets.flusher.flusher import run
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.faults.test_failover import (
    _data,
    _fail_over,
    _logged,
    _replicated,
    _synced,
    _writing,
)
from cdc_assets_tests.faults.test_standby import begun, crash, followed
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.waiting import wait_for


def test_a_standby_that_was_promoted_earlier_is_not_the_one_that_the_log_is_of(
    tmp_home: Path, tmp_path: Path, postgres_dsn: NewDatabase
) -> None:
    """Both have the slot, and each calls its timeline 2."""
    with _replicated(tmp_home, tmp_path, postgres_dsn()) as (pair, source, config):
        _synced(source, pair, config)
        pair.standby.stop()
        data, second = _data(pair.standby), tmp_home / "second"
        shutil.copytree(data, second)
        pair.standby_dsn = pair.standby.start()
        source.execute("insert into t select generate_series(1, 1000)")
        source.flush(config)
        _synced(source, pair, config)
        pair.await_replay()
        _fail_over(source, pair)
        source.execute("insert into t select generate_series(1001, 2000)")
        source.flush(config)
        source.flush(config)  # on the timeline that is known by now
        assert len(_logged(source)) == 2000
        pair.standby.stop()
        shutil.rmtree(data)
        shutil.move(second, data)
        for path in [data, *data.rglob("*")]:
            own(path, server_user())
        pair.standby_dsn = pair.standby.start()
        pair.promote()
        source.connection.close()
        source.connection = psycopg.connect(source.dsn, autocommit=True)
        assert source.execute("select count(*) from t") == [(0,)]
        source.execute("insert into t select generate_series(1, 20000)")  # past the log's end
        with pytest.raises(SourceMismatch) as caught:
            source.flush(config)
        assert caught.value.codes == ("timeline_diverged",)


def test_a_promoted_standby_that_crashes_soon_is_streamed_from_on(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has on disk what was acknowledged before the promotion, and the log is beyond that."""
    monkeypatch.setattr("cdc_assets.flusher.reviewer.REVIEW_SECONDS", 0.5)
    with followed(tmp_home, postgres_dsn(), tmp_path) as source:
        both = source.both
        with _writing(both.dsn) as number, flushing(source.config) as progress:
            first = begun(source, progress, number)
            before = number[0]
            both.kill_primary()
            both.promote()
            wait_for(lambda: source.logged()[-1] > before + 50)

            def timeline() -> str | None:
                with Pipeline.open(source.config) as pipeline:
                    return pipeline.store.meta("timeline")

            wait_for(lambda: timeline() == "2")
            sessions = progress.sessions
            crash(both)
            wait_for(lambda: progress.sessions > sessions)
            before = number[0]
            wait_for(lambda: source.logged()[-1] > before + 50)
        with psycopg.connect(both.standby_dsn, autocommit=True) as end:
            run(source.config, until=current_lsn(end))
        logged = source.logged()
        assert len(logged) == len(set(logged))
        assert [n for n in logged if n >= first] == [n for n in source.there() if n >= first]
