"""Watermarks that are alike, that go back, or that a sequence gives; and what else a table does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc_assets.log.staged.watermarks import watermarks
from cdc_assets.log.states import TableState
from cdc_assets.readiness.flushing import source_findings
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.queried import BY_CLOCK, CLOCKED, Queried, T, queried
from cdc_assets_tests.support.waiting import wait_for

NUMBERED = """
create sequence versions;
create table t (id int primary key, v text, version bigint not null default nextval('versions'));
create index on t (version);
"""
BY_NUMBER = {"name": "t", "watermark": {"column": "version", "order": "sequence"}}


@pytest.fixture
def source(postgres_dsn: NewDatabase, tmp_home: object) -> Iterator[Queried]:
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK) as opened:
        yield opened


@pytest.mark.parametrize("index", [True, False])
def test_thousands_of_one_time_are_cut_by_pages(
    source: Queried, monkeypatch: pytest.MonkeyPatch, index: bool
) -> None:
    monkeypatch.setattr("cdc_assets.poller.rows.PAGE_ROWS", 1000)
    monkeypatch.setattr("cdc_assets.poller.rows.PART_BYTES", 20_000)
    if not index:
        source.execute("drop index t_updated_at_idx")
    source.execute("insert into t select i, 'x' from generate_series(1, 500) i")
    source.execute("insert into t select i, 'y' from generate_series(501, 10500) i")
    source.execute("insert into t select i, 'z' from generate_series(10501, 12000) i")
    source.poll()
    assert len(source.staged()) == 12000, "each row once"
    assert source.is_level()


def test_what_is_staged_before_a_poll_ends_is_in_the_log_early(
    postgres_dsn: NewDatabase, tmp_home: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by staging.flush_bytes; the bound moves with the last rows alone."""
    monkeypatch.setattr("cdc_assets.poller.rows.PAGE_ROWS", 100)
    monkeypatch.setattr("cdc_assets.poller.rows.PART_BYTES", 2_000)
    with queried(postgres_dsn(), CLOCKED, BY_CLOCK, staging={"flush_bytes": 10_000}) as source:
        for number in range(20):
            source.execute(
                "insert into t select i, 'x' from"
                f" generate_series({100 * number}, {100 * number + 99}) i"
            )
        before = watermarks(source.pipeline.store)[T]
        seen = []
        register = source.pipeline.store.register

        def noted(*given: object) -> None:
            seen.append(watermarks(source.pipeline.store)[T])
            register(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(source.pipeline.store, "register", noted)
        source.poll()
        assert len(seen) > 3
        assert set(seen) == {before}
        assert watermarks(source.pipeline.store)[T] != before
        assert source.is_level()


def test_a_clock_that_is_set_back_hides_nothing(
    source: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("insert into t values (1, 'x')")
    source.poll()
    monkeypatch.setattr(
        "cdc_assets.poller.source.CLOCK", "(pg_catalog.clock_timestamp() - interval '1 hour')"
    )
    source.execute("insert into t values (2, 'in the past', now() - interval '1 hour')")
    source.poll()
    assert source.is_level()
    source.execute("insert into t values (3, 'later', now() - interval '1 hour')")
    source.poll()
    assert source.is_level()


def test_a_clock_that_was_set_back_while_nobody_looked_has_all_read_again(
    source: Queried, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("insert into t values (1, 'x')")
    source.poll()
    monkeypatch.setattr(
        "cdc_assets.poller.source.CLOCK", "(pg_catalog.clock_timestamp() - interval '1 hour')"
    )
    source.execute("insert into t values (2, 'long past', now() - interval '59 minutes')")
    source.execute("insert into t values (3, 'far past', now() - interval '3 hours')")
    source.begin()
    source.poll()
    assert source.is_level()


def test_a_watermark_of_the_future_is_read_again_and_staged_once(source: Queried) -> None:
    source.execute("insert into t values (1, 'future', now() + interval '1 year')")
    source.execute("insert into t values (2, 'for ever', 'infinity')")
    source.execute("insert into t values (3, 'x')")
    for _ in range(3):
        source.poll()
    assert len(source.staged()) == 3
    source.execute("update t set v = 'y' where id < 3")
    source.execute("insert into t values (4, 'x')")
    source.poll()
    assert source.is_level()


@pytest.mark.parametrize("order", ["plain", "late"])
def test_numbers_of_a_sequence(postgres_dsn: NewDatabase, tmp_home: object, order: str) -> None:
    with queried(postgres_dsn(), NUMBERED, BY_NUMBER) as source:
        with source.session() as older:
            if order == "late":  # it has its number, and hasn't written
                older.execute("begin")
                older.execute("select nextval('versions')")
            source.execute("insert into t values (10, 'x'), (11, 'x')")
            source.poll()
            source.execute("insert into t values (12, 'x')")
            source.poll()
            if order == "late":
                older.execute("insert into t values (1, 'late', 1)")
                source.poll()
                older.execute("commit")
            source.execute("update t set v = 'y', version = nextval('versions') where id = 10")
            source.poll()
        assert source.is_level()


def test_numbers_that_sessions_cache_need_a_lag(
    postgres_dsn: NewDatabase, tmp_home: object
) -> None:
    cached = f"{NUMBERED} alter sequence versions cache 10;"
    of = {"name": "t", "watermark": BY_NUMBER["watermark"] | {"lag_numbers": 100}}  # type: ignore[operator]
    for table, refused in ((BY_NUMBER, True), (of, False)):
        with queried(postgres_dsn(), cached, table) as source:
            codes = {finding.code for finding in source_findings(source.config)}
            assert ("watermark_cached" in codes) == refused
            if refused:
                continue
            with source.session() as one, source.session() as other:
                one.execute("insert into t values (1, 'x')")
                other.execute("insert into t values (2, 'x')")
                source.poll()
                one.execute("insert into t values (3, 'cached')")
                source.poll()
            assert source.is_level()


def test_a_column_that_is_added_is_followed(source: Queried) -> None:
    source.execute("insert into t values (1, 'x')")
    source.poll()
    source.execute("alter table t add w int not null default 7")
    source.execute("insert into t values (2, 'y', now(), 8)")
    source.poll()
    assert source.found()["2"]["w"] == "8"
    source.execute("alter table t rename v to u")
    source.execute("insert into t values (3, 'z', now(), 9)")
    source.poll()
    assert source.found()["3"].keys() == {"id", "u", "updated_at", "w"}


def test_a_table_that_is_locked_is_read_later_and_says_so(source: Queried) -> None:
    flushed = source.pipeline.store.flushed_lsn()
    source.execute("insert into t values (1, 'x')")
    with source.session() as locking:
        locking.execute("begin; lock table t")
        assert not source.poll()
        assert "wasn't read" in source.progress.troubles["queries"]
        assert source.pipeline.store.flushed_lsn() == flushed, "the log isn't level with the source"
        locking.execute("rollback")
    wait_for(source.poll)  # it is tried again a moment later
    assert "queries" not in source.progress.troubles
    assert source.is_level()


def test_a_table_that_is_dropped_or_loses_its_watermark_is_parked(source: Queried) -> None:
    source.execute("alter table t drop updated_at")
    source.poll()
    [row] = source.pipeline.store.tables()
    assert row.state == TableState.PARKED
    assert "it has lost the column updated_at" in str(row.reason)
