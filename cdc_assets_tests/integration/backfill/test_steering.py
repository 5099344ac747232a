"""Backfills are paused, resumed, stopped and killed; commands and signals ask for them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from pyspark.errors.exceptions.connect import SparkConnectException

from cdc_assets.backfill import apply as applying
from cdc_assets.backfill import carry_out as carrying
from cdc_assets.backfill import reader
from cdc_assets.backfill import round as rounds
from cdc_assets.backfill.request import request
from cdc_assets.cli.main import cli
from cdc_assets.errors import ConfigurationError
from cdc_assets.log import backfills as record
from cdc_assets.operations.backfilling import wish
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets_tests.support.backfills import T, backfilled, carried_out, damage
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture
def in_chunks(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    """A commit for each chunk, of which there are some."""
    monkeypatch.setattr("cdc_assets.backfill.planning._CHUNK_PAGES", 1)
    monkeypatch.setattr(carrying, "_GROUP_BYTES", 1)
    setup = "create table t (id int primary key, v text);"
    setup += "insert into t select i, repeat('v', 1000) from generate_series(1, 300) i;"
    with new_lake(setup, {"name": "t", "chunk_pages": 8}) as source:
        source.pin()
        source.copy()
        yield source


def test_a_large_table_has_larger_chunks(in_chunks: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backfilled(in_chunks).chunks > 4
    monkeypatch.setattr("cdc_assets.backfill.planning._MOST_CHUNKS", 3)
    assert backfilled(in_chunks).chunks in (3, 4)


def test_a_paused_backfill_holds_nothing_and_goes_on_where_it_was(
    in_chunks: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = in_chunks
    store, applied, times = source.pipeline.store, applying.apply, list[int]()
    number = request(source.pipeline, T).number

    def apply(*about: Any) -> Any:
        done = applied(*about)
        times.append(1)
        if len(times) == 2:
            with Pipeline.open(source.config) as other:
                wish(other, "pause", number)
        return done

    monkeypatch.setattr(rounds, "apply", apply)
    monkeypatch.setattr(carrying, "_LOOK_SECONDS", 0.0)
    paused = carried_out(source, number)
    assert paused.state == "paused" and 0 < paused.chunks_done < paused.chunks
    assert not store.is_locked(carrying.backfill_lock(number))
    assert not source.execute(
        "select from pg_stat_activity where application_name like '%backfill' and state <> 'idle'"
    )
    assert carried_out(source, number).state == "paused"
    assert wish(source.pipeline, "resume", number).state == "requested"
    done = carried_out(source, number)
    assert (done.state, done.chunks_done) == ("done", done.chunks)
    assert done.read < 300 + 300  # what was applied isn't read again
    with pytest.raises(ConfigurationError, match="can't pause: it is done"):
        wish(source.pipeline, "pause", number)


def test_a_backfill_whose_spark_server_ends_goes_on_unless_it_may_have_ended_it(
    in_chunks: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = in_chunks
    applied, ends, times = applying.apply, [3, 4], list[int]()
    number = request(source.pipeline, T).number

    def apply(*about: Any) -> Any:
        times.append(1)
        if len(times) in ends:
            raise SparkConnectException("[INVALID_HANDLE.SESSION_NOT_FOUND]")
        return applied(*about)

    monkeypatch.setattr(rounds, "apply", apply)
    for state in ("running", "failed"):
        with pytest.raises(SparkConnectException):
            carried_out(source, number)
        now = record.backfill(source.pipeline.store, number)
        assert now.state == state and "SESSION_NOT_FOUND" in str(now.reason)
        assert 0 < now.chunks_done < now.chunks
    wish(source.pipeline, "resume", number)
    assert carried_out(source, number).state == "done"


def test_a_stopped_backfill_is_not_taken_up_again(source: Lake) -> None:
    number = request(source.pipeline, T).number
    assert wish(source.pipeline, "stop", number).state == "stopped"
    assert carried_out(source, number).read == 0
    with pytest.raises(ConfigurationError, match="can't resume: it is stopped"):
        wish(source.pipeline, "resume", number)
    with pytest.raises(ConfigurationError, match="has no backfill 4711"):
        wish(source.pipeline, "resume", 4711)


def test_one_process_at_a_time_carries_a_backfill_out(source: Lake) -> None:
    number = request(source.pipeline, T).number
    with Pipeline.open(source.config) as other:
        assert other.store.try_lock(carrying.backfill_lock(number))
        assert carried_out(source, number).state == "requested"
    wait_for(lambda: carried_out(source, number).state == "done")  # that session ends in a moment


def test_a_horizon_that_a_transaction_holds_up_is_told(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "_TOLD_SECONDS", 0.2)
    number = request(source.pipeline, T).number
    stop = threading.Event()
    with source.source.transaction():
        source.execute("update t set v = 'open' where id = 1")
        with Pipeline.open(source.config) as other:
            done = list[Any]()
            thread = threading.Thread(
                target=lambda: done.append(
                    carrying.carry_out(
                        other, source.session, number, lambda *_, **__: None, print, stop
                    )
                )
            )
            thread.start()
            said = wait_for(lambda: record.backfill(source.pipeline.store, number).reason)
            assert "it waits for transactions that have written: process " in str(said)
            stop.set()
            thread.join()
    assert [one.state for one in done] == ["running"]
    assert carried_out(source, number).state == "done"


# --- the command ---


def configuration(source: Lake, folder: Path) -> str:
    path = folder / "source.json"
    path.write_text(source.config.dump())
    return str(path)


def test_the_command_carries_out_lists_and_steers(source: Lake, tmp_path: Path) -> None:
    damage(source, "update lake.src.t set v = 'wrong' where id in (3, 200)")
    path = configuration(source, tmp_path)

    def command(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["--config", path, "backfill", *arguments])

    asked = command("public.t", "--where", "id < 100")
    assert (asked.exit_code, asked.stdout) == (
        0,
        "backfill 1 of public.t where id < 100: requested\n",
    )
    assert "The sensor backfills_src has it carried out" in asked.stderr
    assert json.loads(command("--list", "--json").stdout)[0]["state"] == "requested"
    assert command("pause", "1").stdout.endswith(": paused\n")
    done = command("resume", "1", "--wait", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["applied"] == 99
    done = command("public.t", "--wait", "--replace")
    assert "300 applied (1 differed), 0 left to the stream, 0 removed" in done.stdout
    assert source.equal(T)
    for wrong, said in (
        ((), "name one table"),
        (("public.t", "public.t"), "name one table"),
        (("pause",), "say which backfill is to pause"),
        (("stop", "x"), "say which backfill is to stop"),
        (("public.nothing",), "public.nothing"),
        (("public.t", "--where", "id = 1", "--replace"), "where and replace exclude each other"),
    ):
        refused = command(*wrong)
        assert refused.exit_code == 2 and said in refused.stderr, refused.stderr


def test_a_backfill_killed_again_and_again_ends_with_the_truth(
    new_lake: NewLake, tmp_path: Path
) -> None:
    setup = "create table t (id int primary key, v text, w text);"
    setup += "insert into t select i, 'v' || i, repeat('w', 200) from generate_series(1, 60000) i;"
    with new_lake(setup, {"name": "t", "chunk_pages": 64}) as source:
        source.pin()
        source.copy()
        damage(
            source,
            "delete from lake.src.t where id % 5 = 0",
            "insert into lake.src.t select -id, v, w from lake.src.t where id < 100",
        )
        path = configuration(source, tmp_path)
        for round_ in range(5):
            what = ["public.t", "--replace"] if not round_ else ["resume", "1"]
            process = subprocess.Popen(
                [sys.executable, "-m", "cdc_assets", "--config", path, "backfill", *what, "--wait"],
                env={**os.environ, "CDC_ASSETS_HOME": str(home())},
                stderr=subprocess.PIPE,
                text=True,
            )
            assert process.stderr is not None
            for line in process.stderr:  # killed in the midst of its work, always a bit later
                if "rows read" in line:
                    time.sleep(0.4 * round_)
                    process.send_signal(signal.SIGKILL)
                    break
            process.wait()
            process.stderr.close()
            source.execute(f"update t set v = 'r{round_}', w = '' where id % 1000 = {round_}")
            source.execute(f"delete from t where id % 1001 = {round_}")
            source.execute(
                f"insert into t select -i, 'n', 'n' from generate_series(1, {round_}) i"
                " on conflict do nothing"
            )
        if record.backfill(source.pipeline.store, 1).state != "done":
            assert carried_out(source, 1).state == "done"
        source.catch_up()
        assert source.equal(T)
        assert backfilled(source).state == "done"


def test_a_statement_that_somebody_cancels_costs_no_chunk_that_is_applied(
    in_chunks: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, times, said = reader.add_rows, list[int](), list[str]()

    def added(*about: Any) -> None:
        times.append(1)
        if len(times) == 4:
            raise psycopg.errors.QueryCanceled("canceling statement due to user request")
        add(*about)

    monkeypatch.setattr(reader, "add_rows", added)
    monkeypatch.setattr(carrying, "_AGAIN_SECONDS", 0.1)
    number = request(in_chunks.pipeline, T).number
    assert carried_out(in_chunks, number, on_progress=said.append).state == "done"
    done, of = 0, 0
    for text in said:
        if (found := re.search(r"(\d+) of (\d+) chunks", text)) is not None:
            assert int(found[1]) >= done
            done, of = int(found[1]), int(found[2])
    assert done == of > 4
