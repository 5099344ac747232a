"""A hot standby as the source: it tells no running transaction, so that a lag has to cover them."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg

from cdc_assets.log.staged.watermarks import watermarks
from cdc_assets.poller.bounds import WHOLE
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.faults.test_failover import standby_pair
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, T, queried

LAGGING = BY_CLOCK | {"watermark": {"column": "updated_at", "lag": "2s"}}


def test_a_standby_is_polled(tmp_home: Path) -> None:
    with (
        standby_pair(tmp_home, {}, {}) as both,
        psycopg.connect(both.primary.start(), autocommit=True) as primary,
    ):
        primary.execute("create database log")
        state = {"postgres_url": both.primary.start().replace("dbname=postgres", "dbname=log")}
        created = (primary, CLOCKED)
        dsn = both.standby_dsn
        with queried(dsn, "select 1", BY_CLOCK, state=state, pinned=False, created=created) as bare:
            both.await_replay()
            codes = {f.code for f in source_findings(bare.config) if f.severity == "error"}
            assert codes == {"watermark_lag"}
        with queried(dsn, "select 1", LAGGING, state=state) as source:
            assert not [f for f in source_findings(source.config) if f.severity == "error"]
            primary.execute("insert into t values (1, 'x')")
            both.await_replay()
            source.flush()
            assert source.is_level()
            with psycopg.connect(both.primary.start(), autocommit=True) as late:
                late.execute("begin")
                late.execute("insert into t values (2, 'late')")
                for number in range(3):
                    primary.execute(f"insert into t values ({10 + number}, 'x')")
                    both.await_replay()
                    source.poll()
                    time.sleep(0.3)
                late.execute("commit")
            both.await_replay()
            source.poll()
            assert source.is_level()
            before = len(source.staged())
            source.poll()
            assert len(source.staged()) == before, "what is read again is staged once"


def test_a_standby_that_was_started_anew_is_not_read_whole_at_each_poll(
    tmp_home: Path, postgres_dsn: NewDatabase
) -> None:
    """Until its primary commits again it can't tell as of when it shows the rows."""
    state = {"postgres_url": postgres_dsn()}
    with standby_pair(tmp_home, {}, {"autovacuum": "off"}) as both:
        with psycopg.connect(both.primary.start(), autocommit=True) as primary:
            primary.execute(CLOCKED.encode())
            both.await_replay()
            with queried(both.standby_dsn, "select 1", LAGGING, state=state) as source:
                primary.execute("insert into t select i, 'x' from generate_series(1, 500) i")
                both.await_replay()
                source.poll()
                assert source.is_level()
            primary.execute("checkpoint")
            both.await_replay()
        both.standby.stop()
        with queried(both.standby.start(), "select 1", LAGGING, state=state) as source:
            assert source.execute("select pg_last_xact_replay_timestamp()") == [(None,)]
            source.poll()
            assert watermarks(source.pipeline.store)[T].bound > WHOLE
            staged = len(source.staged())
            assert staged <= 1000
            source.poll()
            assert len(source.staged()) == staged
            with psycopg.connect(both.primary.start(), autocommit=True) as primary:
                primary.execute("insert into t values (1000, 'x')")
                both.await_replay()
            source.poll()
            assert source.is_level()
            assert len(source.staged()) <= staged + 501
