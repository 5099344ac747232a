"""Processes of groups: killed, fenced, several of one group, and dead ones. No Spark."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.consumers import Begin, Fenced, beginning, follow
from cdc_assets.errors import ConfigurationError
from cdc_assets.log.cursors import Cursor
from cdc_assets.maintenance.staged import mark_passed, passed_offset, remove_passed
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import Facts
from cdc_assets.observe.status import collect
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.discovery import discovered
from cdc_assets_tests.support import follower_process
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.groups import TABLES, begin, change, changed, given
from cdc_assets_tests.support.waiting import wait_for

A = TableId("public", "a")
NO_GRACE = timedelta(0)


def command(source: Bench, file: Path, *more: str) -> list[str]:
    program = [sys.executable, "-m", follower_process.__name__]
    return [*program, str(source.folder / "source.json"), "search", str(file), *more]


def run(source: Bench, file: Path, *more: str) -> int:
    return subprocess.run(command(source, file, *more), check=False, timeout=120).returncode


def test_a_program_killed_before_its_commit_applies_each_change_once(
    source: Bench, config: SourceConfig, tmp_path: Path
) -> None:
    begin(config)
    source.execute("delete from _pg2iceberg.mat_cursor")  # the program has no token of that
    file = tmp_path / "rows.db"
    assert run(source, file) == 0
    for number in range(2):
        change(source, config, 100 * number)
        source.execute(
            "update a set v = 'changed' where id % 3 = 0; delete from b where id % 4 = 0"
        )
        assert run(source, file, "SIGKILL", str(1 + 2 * number)) == -9
    source.flush(config)
    assert run(source, file) == 0
    with sqlite3.connect(file) as database:
        for name in TABLES:
            rows = database.execute(
                "select id, v from rows where name = ? order by id", (f"public.{name}",)
            ).fetchall()
            assert rows == source.execute(f"select id, v from {name} order by id")


def test_without_tokens_what_wasn_t_committed_comes_once_more(
    source: Bench, config: SourceConfig
) -> None:
    begin(config)
    change(source, config, 0)
    with given(config) as (_, events):
        first = changed(events)
        assert len(first) == 40
        for event in events:
            if event.table == "public.a":
                event.commit()
    with given(config) as (_, events):
        assert sorted(changed(events)) == sorted(f for f in first if f[0] != "public.a")


def test_a_token_that_the_log_goes_on_from_no_more_begins_anew(
    source: Bench, config: SourceConfig
) -> None:
    begin(config)
    change(source, config, 0)
    with given(config) as (_, events):
        kept = {event.table: event.token for event in events}
    with follow(config, "search", token=kept.get, wait=False) as stream:
        assert list(stream) == []
    source.execute("update _pg2iceberg.tables set epoch = epoch + 1 where table_name = 'public.b'")
    with follow(config, "search", token=kept.get, wait=False) as stream:
        [begun] = stream
    assert isinstance(begun, Begin)
    assert (begun.table, begun.snapshot) == ("public.b", False)


def test_processes_of_a_group_share_its_tables(source: Bench, config: SourceConfig) -> None:
    begin(config)
    with ExitStack() as both:
        one, two = (both.enter_context(follow(config, "search", wait=False)) for _ in range(2))

        def shared() -> bool:
            found = [list(one), list(two)]
            assert found == [[], []]
            return len(one.tables) == len(two.tables) == 2

        wait_for(shared)
        assert not set(one.tables) & set(two.tables)
        change(source, config, 0)
        for stream in (one, two):
            events = list(stream)
            assert {table for table, _ in changed(events)} == set(stream.tables)
            stream.commit()
    with given(config) as (_, events):
        assert changed(events) == []


def test_a_process_whose_tables_were_taken_over_can_t_commit(
    source: Bench, config: SourceConfig
) -> None:
    begin(config)
    change(source, config, 0)
    with ExitStack() as stack:
        _, events = stack.enter_context(given(config))
        late = next(event for event in events if event.table == "public.a")
        # What the others do with one that isn't heard of.
        source.execute("delete from _pg2iceberg.consumer")
        with follow(config, "search", wait=False) as other:
            taken = list(other)
            with pytest.raises(Fenced, match=r"public\.a: another process of the group search"):
                late.commit()
            assert sorted(changed(taken)) == sorted(changed(events))
            other.commit()
            with pytest.raises(Fenced):
                late.commit()
    with given(config) as (_, events):
        assert changed(events) == []


def test_a_process_that_is_paused_for_too_long_can_t_commit(
    source: Bench, config: SourceConfig, tmp_path: Path
) -> None:
    file = tmp_path / "rows.db"
    assert run(source, file) == 0
    change(source, config, 0)
    paused = subprocess.Popen(
        command(source, file, "SIGSTOP", "1"), stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: psutil.Process(paused.pid).status() == psutil.STATUS_STOPPED)
        with follow(config, "search") as other:
            taken = set[str]()
            for event in other:
                taken.add(event.table)
                event.commit()
                if len(taken) == len(TABLES):
                    break
        paused.send_signal(signal.SIGCONT)
        _, said = paused.communicate(timeout=60)
        assert "Fenced" in said
    finally:
        paused.kill()
    assert paused.returncode == 1


def test_a_table_that_comes_later_is_followed(
    source: Bench, config: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = parse_config(
        {
            **source.settings(),
            "tables": ["public.*"],
            "consumers": [{"name": "search", "tables": ["public.?"], "start": "now"}],
        },
        "test",
    )
    begun = list[str]()
    with follow(written, "search") as stream, ExitStack() as stack:
        for event in stream:
            begun.append(event.table)
            event.commit()
            if len(begun) == len(TABLES):
                source.execute("create table e (id int primary key)")
                stack.enter_context(flushing(discovered(written)))
            if "public.e" in begun:
                break
    assert sorted(begun) == [f"public.{name}" for name in (*TABLES, "e")]


def test_a_process_whose_session_was_ended_can_t_commit(
    source: Bench, config: SourceConfig
) -> None:
    begin(config)
    change(source, config, 0)
    with given(config) as (opened, _):
        source.terminate("log")
        with pytest.raises(Fenced, match="this process's session is over"):
            opened.commit()


def test_an_iteration_whose_session_was_ended_says_that_it_must_begin_again(
    source: Bench, config: SourceConfig
) -> None:
    begin(config)
    with follow(config, "search") as stream:
        source.terminate("log")
        with pytest.raises(Fenced, match="session is over"):
            list(stream)


def test_only_a_table_that_is_read_begins_again(config: SourceConfig) -> None:
    begin(config)
    with (
        given(config) as (stream, _),
        pytest.raises(ConfigurationError, match=r"public\.none isn't one of the tables that"),
    ):
        stream.begin_again("public.none")


def files_left(pipeline: Pipeline, lake: int) -> int:
    """How many staged files of a table are left once the lake is at that offset."""
    row = pipeline.store.table(A)
    assert row is not None
    offset = passed_offset(pipeline.store, row, Cursor(lake, Lsn(2**40)))
    mark_passed(pipeline.store, row, offset)
    remove_passed(pipeline.store, A, pipeline.store.places, NO_GRACE)
    return len(pipeline.store.entries(A, 0))


def test_a_dead_group_keeps_staged_files_until_it_is_dropped_and_is_told(
    source: Bench, config: SourceConfig
) -> None:
    begin(config)
    begin(config, "other")
    for number in range(3):
        change(source, config, 100 * number)
    with given(config, "other") as (stream, _):
        stream.commit()
    with Pipeline.open(config) as pipeline:
        pipeline.store.set_cursor(A, Cursor(20, Lsn(2**40)))
        assert files_left(pipeline, 30) == 3
        source.execute(
            "update _pg2iceberg.log_index set commit_time = commit_time - interval '2 hours'"
        )
        found = collect(pipeline)
        other, dead = found.groups
        assert (other.name, other.pending_rows, other.lag_seconds) == ("other", 0, None)
        assert (dead.name, dead.tables, dead.pending_rows) == ("search", 4, 120)
        assert dead.processes == []
        assert dead.held_bytes > 0
        told = conditions(Facts(datetime.now().astimezone(), status=found), config)
        [condition] = [c for c in told if c.key.startswith("group:")]
        assert (condition.key, condition.what) == (
            "group:search",
            "the consumer group search is behind",
        )
        assert condition.limits.grade(dead.lag_seconds or 0.0) == "warn"
        assert "drop-group search" in condition.remedy

        dropped = CliRunner().invoke(
            cli, ["--config", str(source.folder / "source.json"), "drop-group", "search", "--json"]
        )
        assert dropped.exit_code == 0, dropped.output
        assert json.loads(dropped.output)["tables"] == [f"public.{name}" for name in TABLES]
        assert files_left(pipeline, 30) == 0
        assert [group.name for group in collect(pipeline).groups] == ["other"]


def test_a_claim_holds_the_log_before_there_is_a_cursor(
    source: Bench, config: SourceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(source, config, 0)
    with Pipeline.open(config) as pipeline:
        left = list[int]()

        def choose(*_: object) -> str:
            left.append(files_left(pipeline, 10))
            return "not yet"

        monkeypatch.setattr(beginning, "choose", choose)
        late = config.model_copy(
            update={
                "consumers": tuple(
                    group.model_copy(update={"start": "snapshot"}) for group in config.consumers
                )
            }
        )
        with follow(late, "search", wait=False) as opened:
            assert list(opened) == []
            assert opened.waits == {f"public.{name}": "not yet" for name in TABLES}
    assert left[0] == 1


def test_a_group_that_is_read_isn_t_dropped(source: Bench, config: SourceConfig) -> None:
    file = ["--config", str(source.folder / "source.json"), "drop-group"]
    with follow(config, "search", wait=False) as opened:
        list(opened)
        refused = CliRunner().invoke(cli, [*file, "search"])
        assert refused.exit_code == 2
        assert "is being read by" in refused.output
    nobody = CliRunner().invoke(cli, [*file, "nobody"])
    assert "no consumer group nobody" in nobody.output
    lake = CliRunner().invoke(cli, [*file, "lake"])
    assert "lake is the lake itself" in lake.output


def test_a_group_is_one_of_the_configuration(config: SourceConfig) -> None:
    with pytest.raises(ConfigurationError, match="no consumer group nobody"):
        follow(config, "nobody")
    other = config.consumers[0].model_copy(update={"tables": ("public.elsewhere",)})
    wrong = config.model_copy(update={"consumers": (other,)})
    with pytest.raises(ConfigurationError, match=r"search reads public\.elsewhere"):
        follow(wrong, "search").__enter__()
