"""Passing a log on: what comes, what is held, and what ends it. No Spark."""

from __future__ import annotations

import threading
import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.config.groups.consumers import ConsumerConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.consumers.drop import drop_group
from cdc_assets.errors import ConfigurationError
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.without_slot import relaying
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.groups.standing import groups
from cdc_assets.log.staged.places import staged_places
from cdc_assets.maintenance.staged import (
    mark_passed,
    passed_offset,
    remove_passed,
    remove_staged_orphans,
    settle,
)
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import Facts
from cdc_assets.observe.status import collect
from cdc_assets.operations.copying import resume
from cdc_assets.operations.drop import drop_source
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.relay import passing
from cdc_assets.relay.first import first_log, refuse_shared_log
from cdc_assets.relay.passing import Passed
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.second import (
    GROUP,
    SecondLog,
    copied_anew,
    pinned,
    second_config,
    second_log,
)
from cdc_assets_tests.support.waiting import wait_for

A = TableId("public", "a")
NO_GRACE = timedelta(0)


def change(source: Bench, first: SourceConfig, begin: int, count: int = 10) -> None:
    for name in ("a", "b"):
        source.execute(f"insert into {name} select generate_series({begin}, {begin + count - 1})")
    source.flush(first)


def go_on(source: Bench, first: SourceConfig, second: SecondLog, begin: int) -> None:
    """The tables that wait are pinned, and what changes then is passed on."""
    second.pin()
    change(source, first, begin)
    second.flush()


def care(config: SourceConfig) -> None:
    """What maintain does of the log; the lakes are at the cursors that the log has of them."""
    with Pipeline.open(config) as pipeline:
        store = pipeline.store
        for row in store.tables():
            mark_passed(store, row, passed_offset(store, row, store.cursor(row.table)))
            remove_passed(store, row.table, staged_places(config), NO_GRACE)


def merged(config: SourceConfig, offset: int) -> None:
    with Pipeline.open(config) as pipeline:
        for name in ("a", "b"):
            pipeline.store.set_cursor(TableId("public", name), Cursor(offset, Lsn.ZERO))


def test_entries_have_their_offsets_and_files(source: Bench, first: SourceConfig) -> None:
    """Begun late, with a log that lacks its beginning."""
    change(source, first, 0)
    merged(first, 10)
    care(first)
    with second_log(source, first) as second:
        assert not second.entries("a", of=first.name)
        second.pin()
        for number in range(1, 4):
            change(source, first, 100 * number)
            second.flush()
        assert [entry[:2] for entry in second.entries("a")] == [(10, 20), (20, 30), (30, 40)]
        assert second.is_whole("a")
        assert second.is_whole("b")
        assert second.store.flushed_lsn() == first_log(second.config, second.store).flushed_lsn()
        assert source.execute("select count(*) from pg_replication_slots") == [(1,)]


@pytest.mark.parametrize("snapshot", [{"pin": "lock"}, {"strategy": "incremental"}])
def test_other_pins(source: Bench, first: SourceConfig, snapshot: dict[str, str]) -> None:
    with second_log(source, first, snapshot=snapshot) as second:
        go_on(source, first, second, 0)
        assert second.is_whole("a")
        assert len(second.entries("a")) == 1


def test_a_long_backlog_is_passed_on_before_the_log_counts_as_level(
    source: Bench, first: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passing, "MOST_ENTRIES", 2)
    with second_log(source, first) as second:
        second.pin()
        second.flush()
        before = second.store.flushed_lsn()
        for number in range(5):
            change(source, first, 100 * number)
        source.execute("insert into b values (1000)")
        source.flush(first)
        there = first_log(second.config, second.store)
        for passed in (4, 4, 3, 0):
            done = passing.pass_on(second.config, second.store, there, most_marks=1)
            assert done.entries == passed
            ends = {second.entries(name)[-1][4] for name in ("a", "b")}
            assert done.flushed is not None and before is not None and done.flushed > before
            assert max(map(Lsn.parse, ends)) <= done.flushed, "a mark would have later commits"
            assert done.is_level is (passed == 0)
            before = done.flushed
        assert second.is_whole("a")
        assert second.is_whole("b")


def test_the_first_one_keeps_what_the_second_hasn_t_merged(
    source: Bench, first: SourceConfig
) -> None:
    with second_log(source, first) as second:
        second.pin()
        change(source, first, 0)
        change(source, first, 10)
        second.flush()
        merged(first, 20)
        second.let_go()
        care(first)
        files = [entry[2] for entry in second.entries("a", of=first.name)]
        assert len(files) == 2
        assert second.held() == {"public.a": 0, "public.b": 0}
        with Pipeline.open(first) as pipeline:
            status = collect(pipeline)
        (group,) = status.groups
        assert (group.name, group.tables, group.pending_rows) == (GROUP, 2, 40)
        listed = [ConsumerConfig(name=GROUP, warn=timedelta(0))]
        told = conditions(
            Facts(datetime.now().astimezone(), status=status),
            first.model_copy(update={"consumers": tuple(listed)}),
        )
        (alert,) = [condition for condition in told if condition.key.startswith("group:")]
        assert alert.what == f"the consumer group {GROUP} is behind"
        assert "the flusher and the merges of its lake" in alert.remedy
        merged(second.config, 10)
        second.let_go()
        care(second.config)
        assert len(second.entries("a")) == 1
        assert all(Path(file.removeprefix("file://")).exists() for file in files)
        care(first)
        assert [entry[:2] for entry in second.entries("a", of=first.name)] == [(10, 20)]
        assert not Path(files[0].removeprefix("file://")).exists()
        assert Path(files[1].removeprefix("file://")).exists()


def test_the_second_one_s_care_is_before_the_first_one_s(
    source: Bench, first: SourceConfig
) -> None:
    """Only that one knows how far its lake is. Of what it doesn't hold, entries go with files."""
    with second_log(source, first) as second:
        second.pin()
        change(source, first, 0)
        change(source, first, 10)
        second.flush()
        for config in (first, second.config):
            merged(config, 20)
        second.let_go()

        def left(of: SourceConfig, table: str = "a") -> list[tuple[int, int]]:
            return [entry[:2] for entry in second.entries(table, of=of.name)]

        care(first)
        assert left(first) == left(second.config) == [(0, 10), (10, 20)]
        merged(second.config, 10)  # its lake table was set back
        care(second.config)
        care(first)
        assert left(first) == left(second.config) == [(10, 20)]
        second.store.park(A, "a value doesn't fit.")
        second.let_go()
        care(first)
        assert left(first) == left(second.config) == []
        assert second.store.log_end(A) == 20
        merged(second.config, 20)
        second.let_go()
        care(second.config)
        care(first)
        assert left(first, "b") == []


def test_the_second_removes_no_file_of_the_first(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        go_on(source, first, second, 0)
        (file,) = {entry[2] for entry in second.entries("a")}
        now = second.store.server_now() + timedelta(days=30)
        for table in (A, None):
            remove_staged_orphans(second.pipeline, table, now, now)
        assert settle(second.pipeline) is None
        drop_source(second.pipeline, files=True)
        assert Path(file.removeprefix("file://")).exists()
        assert second.held() == {}
        assert source.execute("select pubname from pg_publication order by 1")[0] == (
            f"cdc_{first.name}",
        )
    change(source, first, 100)  # its slot is there


def test_a_copy_anew_of_the_first_is_one_of_the_second(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        go_on(source, first, second, 0)
        before = second.store.table(A)
        copied_anew(first)
        pinned(first)
        change(source, first, 10)
        change(source, first, 20)
        second.flush()
        now = second.store.table(A)
        assert before is not None and now is not None
        assert (now.state, now.epoch) == ("waiting", before.epoch + 1)
        assert now.reason is None, "the first one logs it again"
        assert len(second.entries("a")) == 1, "something of the next copy was passed on"
        assert second.state("b")[0] == "streaming"
        go_on(source, first, second, 30)
        assert second.is_whole("a")
        assert len(second.entries("a")) == 1


def test_a_copy_anew_of_the_second_is_its_own(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        go_on(source, first, second, 0)
        copied_anew(second.config)
        change(source, first, 10)
        second.flush()
        second.pin()
        change(source, first, 20)
        second.flush()
        assert [entry[:2] for entry in second.entries("a")] == [(0, 10), (10, 20), (20, 30)]
        with Pipeline.open(first) as pipeline:
            row = pipeline.store.table(A)
            assert row is not None and (row.epoch, row.state) == (1, "streaming")


def test_what_is_parked_in_the_first_waits_and_holds_nothing(
    source: Bench, first: SourceConfig
) -> None:
    with second_log(source, first) as second:
        second.pin()
        with Pipeline.open(first) as pipeline:
            pipeline.store.park(A, "somebody is in the way.")
        change(source, first, 0)
        second.flush()
        second.let_go()
        state, reason = second.state("a")
        assert state == "waiting"
        assert reason is not None and "somebody is in the way" in reason
        assert second.held() == {"public.b": 0}


def test_what_is_parked_in_the_second_holds_nothing(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        second.pin()
        second.store.park(A, "a value doesn't fit.")
        change(source, first, 0)
        second.flush()
        second.let_go()
        assert second.held() == {"public.b": 0}
        copied_anew(second.config)
        go_on(source, first, second, 10)
        assert second.is_whole("a")


def test_a_group_that_was_dropped_begins_anew(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        go_on(source, first, second, 0)
        with Pipeline.open(first) as pipeline:
            assert len(drop_group(pipeline, GROUP)) == 2
        change(source, first, 10)
        second.flush()
        for name in ("a", "b"):
            state, reason = second.state(name)
            assert state == "parked"
            assert reason is not None
            assert f"group {GROUP} of source {first.name} holds nothing" in reason
            assert f"cdc-assets resync public.{name}" in reason
            copied_anew(second.config, name)
        go_on(source, first, second, 20)
        assert second.is_whole("a")
        assert second.is_whole("b")


def test_a_group_isn_t_dropped_while_it_is_passed_on(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        second.pin()
        with flushing(second.config) as progress, Pipeline.open(first) as pipeline:
            wait_for(lambda: progress.state == "streaming" and groups(pipeline.store)[0].processes)
            with pytest.raises(ConfigurationError, match="is being read by"):
                drop_group(pipeline, GROUP)
            wait_for(lambda: "nobody flushes" in progress.troubles.get("log", ""))
        with Pipeline.open(first) as pipeline:
            assert groups(pipeline.store)[0].processes == []


def test_who_waits_in_vain_leaves_the_first_log_in_peace(
    source: Bench, first: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody flushes it, so it needn't be looked at often; and nothing is written to it again."""
    steps, written = list[object](), "select xmin::text, ctid::text from _pg2iceberg.flushed_lsn"

    def counted(*about: Any, **how: Any) -> Passed:
        steps.append(source.ask_log(written) if steps else None)
        return passing.pass_on(*about, **how)

    monkeypatch.setattr(relaying, "pass_on", counted)
    with second_log(source, first) as second:
        go_on(source, first, second, 0)
        second.store.note_awaited(Lsn(2**40))
        stop = threading.Event()
        session = relaying.Relaying(second.pipeline, Progress(), uuid.uuid4(), stop=stop)
        end = threading.Timer(3.5, stop.set)
        del steps[:]
        end.start()
        session.run()
        end.join()
        assert 0 < len(steps) <= 4
        assert steps[1:] == [source.ask_log(written)] * (len(steps) - 1)


def test_a_first_log_that_begins_anew(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        go_on(source, first, second, 0)
        for name in ("a", "b"):
            copied_anew(first, name)
        source.drop_slot()
        source.execute("insert into a values (50); insert into b values (50)")
        pinned(first)
        change(source, first, 10)
        change(source, first, 20)
        second.flush()
        assert {second.state(name)[0] for name in ("a", "b")} == {"waiting"}
        go_on(source, first, second, 30)
        assert second.is_whole("a")


def test_it_goes_on_with_a_slot_of_its_own(source: Bench, first: SourceConfig) -> None:
    with second_log(source, first) as second:
        go_on(source, first, second, 0)
        drop_source(second.pipeline)
        assert second.held() == {}
        alone = second_config(first, log=None, snapshot={"mode": "never"})
        assert resume(second.pipeline)
        pinned(alone)
        source.execute("insert into a values (1000)")
        source.flush(alone)
        assert len(second.entries("a")) == 1
        assert f"/{alone.name}/" in second.entries("a")[0][2]
        with Pipeline.open(first) as pipeline:
            refuse_shared_log(first, pipeline.store)
