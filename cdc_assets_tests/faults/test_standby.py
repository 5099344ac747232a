"""A standby that is streamed from is restarted, lags, is promoted, or loses its slot."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import SourceMismatch
from cdc_assets.flusher.flusher import run
from cdc_assets.flusher.progress import Progress
from cdc_assets.observe.condition import Condition
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import facts
from cdc_assets.observe.status import collect
from cdc_assets.operations.drop import drop_source
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.slots import LOG_RUNNING, current_lsn
from cdc_assets.readiness.source.now import review
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.faults.test_failover import Pair, _writing
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.standby import of_standby, published
from cdc_assets_tests.support.waiting import wait_for

SETUP = "create table t (id int primary key)"


class Followed:
    """A flusher's configuration of a standby, and the log that it makes."""

    def __init__(self, both: Pair, client: psycopg.Connection[object], log: str, folder: Path):
        self.both = both
        self.config: SourceConfig = of_standby(
            both, log, folder, "public.t", snapshot={"mode": "never"}
        )
        self.bench = Bench("src", both.primary.start(), folder, client, log)

    def logged(self) -> list[int]:
        return sorted(int(row.data["id"] or 0) for row in self.bench.log("public.t"))

    def there(self) -> list[int]:
        """At the standby, or what became of it."""
        return [int(str(n)) for (n,) in self.both.ask_standby("select id from t order by id")]

    def streams(self) -> bool:
        rows = self.bench.ask_log("select state from _pg2iceberg.tables")
        return rows == [("streaming",)]

    def codes(self) -> set[str]:
        with Pipeline.open(self.config) as pipeline, pipeline.connect_source("test") as source:
            found, _ = review(source, self.config, pipeline.store)
        return {finding.code for finding in found.source}


@contextmanager
def followed(
    home: Path, log: str, folder: Path, version: int = 18, **standby: str
) -> Iterator[Followed]:
    with published(home, SETUP, "t", standby=standby, version=version) as (both, client):
        yield Followed(both, client, log, folder)


def begun(source: Followed, progress: Progress, number: list[int]) -> int:
    """Once the table's changes are staged; what had been written by then."""
    wait_for(lambda: progress.state == "streaming" and source.streams())
    before = number[0]
    wait_for(lambda: number[0] > before + 100 and source.logged()[-1:] > [before + 50])
    return before + 50


@pytest.mark.parametrize("version", [16, 18])
def test_invariant_1_a_promoted_standby_is_streamed_from_on(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path, version: int
) -> None:
    with followed(tmp_home, postgres_dsn(), tmp_path, version) as source:
        both = source.both
        with _writing(both.dsn) as number:
            with flushing(source.config) as progress:
                first = begun(source, progress, number)
                before = number[0]
                both.kill_primary()
                both.promote()
                wait_for(lambda: number[0] > before + 100)
                wait_for(lambda: source.logged()[-1] > before + 50)
                assert source.codes() == set(), "the log went on to the new timeline with it"
            before = number[0]
            with flushing(source.config):  # a session of the promoted one
                wait_for(lambda: source.logged()[-1] > before + 50)
        with psycopg.connect(both.standby_dsn, autocommit=True) as end:
            run(source.config, until=current_lsn(end))
        logged, there = source.logged(), source.there()
        assert len(logged) == len(set(logged)), "no change is in the log twice"
        assert [n for n in logged if n >= first] == [n for n in there if n >= first]
        with Pipeline.open(source.config) as pipeline:
            assert pipeline.store.meta("timeline") == "2"


def test_what_is_not_acknowledged_yet_is_known_to_be_the_new_timelines(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with followed(tmp_home, postgres_dsn(), tmp_path) as source:
        both = source.both
        with _writing(both.dsn) as number, flushing(source.config) as progress:
            begun(source, progress, number)
            monkeypatch.setattr(
                "cdc_assets.flusher.session.Session._acknowledge", lambda *_, **__: None
            )
            before = number[0]
            both.kill_primary()
            both.promote()
            wait_for(lambda: source.logged()[-1] > before + 50)
            assert source.codes() == set()


def test_a_log_of_another_standby_is_not_continued_by_one_that_was_promoted_before_its_end(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    """As one that is restored from an older copy of the standby's files, with its slot."""
    with followed(tmp_home, postgres_dsn(), tmp_path) as source:
        both = source.both
        with _writing(both.dsn) as number, flushing(source.config) as progress:
            begun(source, progress, number)
        both.await_replay()
        with Pipeline.open(source.config) as pipeline:
            end = pipeline.store.flushed_lsn()
            assert end is not None
            both.kill_primary()
            both.promote()
            with psycopg.connect(both.standby_dsn, autocommit=True) as promoted:
                row = promoted.execute("select pg_current_wal_insert_lsn()::text").fetchone()
                promoted.execute("insert into t select i from generate_series(1000000, 1010000) i")
            assert row is not None
            pipeline.store.connection.execute("update flushed_lsn set lsn = %s", row)
        assert "timeline_diverged" in source.codes()
        with pytest.raises(SourceMismatch):
            run(source.config, until=end)


def restart(both: Pair) -> None:
    both.standby.stop()
    both.standby_dsn = both.standby.start()


def crash(both: Pair) -> None:
    """The server ends all its processes, and recovers."""
    sender = "select active_pid from pg_replication_slots where slot_name = 'cdc_src'"
    os.kill(int(str(both.ask_standby(sender)[0][0])), signal.SIGKILL)


def test_a_restarted_standby_is_waited_for_and_nothing_is_lost_or_twice(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with followed(tmp_home, postgres_dsn(), tmp_path) as source:
        both = source.both
        with _writing(both.primary.start()) as number, flushing(source.config) as progress:
            first = begun(source, progress, number)
            for how in (restart, crash):
                sessions = progress.sessions
                how(both)
                wait_for(lambda: progress.sessions > sessions)  # noqa: B023
                before = number[0]
                wait_for(lambda: source.logged()[-1] > before)  # noqa: B023
        source.bench.flush(source.config)
        logged = source.logged()
        assert len(logged) == len(set(logged))
        assert [n for n in logged if n >= first] == [n for n in source.there() if n >= first]


def test_a_standby_that_has_not_replayed_up_to_the_log_is_waited_for(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    """As one is for a moment after a restart."""
    with followed(tmp_home, postgres_dsn(), tmp_path) as source:
        source.bench.flush(source.config)
        with Pipeline.open(source.config) as pipeline:
            pipeline.store.connection.execute("update flushed_lsn set lsn = lsn + 1000000")
        assert source.codes() == {"standby_behind_log"}
        source.bench.execute(
            "select pg_logical_emit_message(false, 'x', repeat('x', 1000)) "
            "from generate_series(1, 2000)"
        )
        source.both.await_replay()
        assert source.codes() == set()


def told(config: SourceConfig) -> dict[str, Condition]:
    with Pipeline.open(config) as pipeline:
        return {c.key: c for c in conditions(facts(pipeline), config)}


def test_a_paused_replay_is_told_with_what_waits(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with followed(tmp_home, postgres_dsn(), tmp_path) as source:
        source.bench.flush(source.config)
        source.both.ask_standby("select pg_wal_replay_pause()")
        source.bench.execute("insert into t select i from generate_series(1, 20000) i")
        with Pipeline.open(source.config) as pipeline:

            def behind() -> bool:
                replay = collect(pipeline).standby
                return replay is not None and replay.behind_bytes > 1_000_000

            wait_for(behind)
            shown = collect(pipeline)
            assert shown.standby is not None
            assert shown.standby.paused
            assert shown.flusher.lag_bytes is not None
            assert shown.flusher.lag_bytes > 1_000_000, "what was received isn't in the log"
        assert "paused" in told(source.config)["standby:replay"].what
        source.both.ask_standby("select pg_wal_replay_resume()")
        source.bench.flush(source.config)
        assert source.logged() == [*range(1, 20001)]
        assert "standby:replay" not in told(source.config)


def test_a_slot_that_the_primarys_vacuum_invalidated_is_told_with_the_way_out(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with followed(tmp_home, postgres_dsn(), tmp_path, hot_standby_feedback="off") as source:
        with flushing(source.config) as progress:
            wait_for(lambda: progress.state == "streaming" and source.streams())
        for _ in range(3):  # rows of the catalog that the slot may need
            source.bench.execute("create table gone (i int)")
            source.bench.execute("drop table gone")
        source.bench.execute("vacuum pg_class")
        source.bench.execute("vacuum pg_attribute")
        wait_for(lambda: "slot_invalidated" in source.codes())
        with pytest.raises(SourceMismatch) as error:
            run(source.config, until=current_lsn(source.bench.connection))
        assert "hot_standby_feedback" in str(error.value)
        assert "resync --all" in error.value.remedy


def test_dropping_a_source_leaves_the_publication_to_the_primary(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    with followed(tmp_home, postgres_dsn(), tmp_path) as source:
        source.bench.flush(source.config)
        with Pipeline.open(source.config) as pipeline:
            dropped = drop_source(pipeline)
        assert (dropped.slot, dropped.publication) == ("cdc_src", None)
        assert 'drop publication if exists "cdc_src"' in dropped.refused[0]
        assert source.both.ask_standby("select slot_name from pg_replication_slots") == []


def test_a_copy_of_the_primarys_slot_is_told_and_not_streamed_from(
    tmp_home: Path, postgres_dsn: NewDatabase, tmp_path: Path
) -> None:
    """As a source has it that streamed from the primary before, and whose slot is synchronized."""
    with followed(tmp_home, postgres_dsn(), tmp_path, sync_replication_slots="on") as source:
        make = "select pg_create_logical_replication_slot(%s, 'pgoutput', failover => true)"
        source.bench.execute(make, source.config.slot)

        def synced() -> bool:
            source.bench.execute(LOG_RUNNING)
            return bool(source.both.ask_standby("select 1 from pg_replication_slots where synced"))

        wait_for(synced)
        with pytest.raises(SourceMismatch) as error:
            run(source.config, until=current_lsn(source.bench.connection))
        assert error.value.codes == ("slot_synced",)
