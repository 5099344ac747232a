"""How the flusher ends, what it survives, and how it begins anew."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher import flusher as main
from cdc_assets.flusher.line.frames import Received
from cdc_assets.flusher.stream import Stream, StreamLost
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.process.backoff import Backoff
from cdc_assets_tests.support.flusher import Bench, bench, ended, flushing, start_flusher
from cdc_assets_tests.support.waiting import wait_for


def test_a_decoder_that_fails_ends_the_run_with_its_words(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    source.flush(config)
    source.execute("insert into t values (1, 'x')")
    real = Stream.receive

    def broken(self: Stream, limit_bytes: int) -> Received:
        return Received.of([b"what is this?" for _ in real(self, limit_bytes).frames])

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "receive", broken)
        with pytest.raises(ReplicationProblem, match=r"the decoder failed: .*broken"):
            source.flush(config)
    source.flush(config)
    assert len(source.log("public.t")) == 1


def test_who_waits_is_told_that_nothing_ever_lets_it_stream(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a wrong password. A flusher that nobody waits for goes on trying."""
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    source.flush(config)
    source.execute("insert into t values (1, 'x')")
    monkeypatch.setattr(main, "BACKOFF", Backoff(first_seconds=0.05))
    dsn = SecretStr(make_conninfo(source.dsn, user="nobody_may"))
    refused = config.model_copy(
        update={"postgres": config.postgres.model_copy(update={"replication_dsn": dsn})}
    )
    with pytest.raises(StreamLost, match="password authentication failed"):
        source.flush(refused)
    with flushing(refused) as progress:
        wait_for(lambda: "nobody_may" in (progress.last_error or ""))
        time.sleep(1)
        assert progress.state == "reconnecting"
    source.flush(config)
    assert len(source.log("public.t")) == 1


def test_a_killed_decoder_ends_the_run(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    source.flush(config)

    def decoders() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(os.getpid()).children():
            with suppress(psutil.NoSuchProcess):  # or a zombie: its parent hasn't seen its end yet
                if "cdc_assets.flusher.decoder_process.main" in child.cmdline():
                    found.append(child)
        return found

    def kill_it() -> None:
        with flushing(config):
            wait_for(decoders)
            for decoder in decoders():
                decoder.kill()
            wait_for(lambda: not decoders())
            time.sleep(0.5)

    with pytest.raises(ReplicationProblem, match="decoder process"):
        kill_it()


@pytest.mark.parametrize("lost", ["flusher", "log"])
def test_lost_connections_are_made_again(source: Bench, lost: str) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t", flush_interval="50ms")
    source.flush(config)
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")  # before that it is no loss
        for number in range(1, 61):
            source.execute(
                "insert into t select %s * 100 + g, 'x' from generate_series(1, 50) g", number
            )
            if number in (20, 40):
                wait_for(lambda: source.terminate(lost))
            time.sleep(0.05)
        written = current_lsn(source.connection)
        wait_for(lambda: source.flushed() >= written)
    ids = [int(r.data["id"] or 0) for r in source.log("public.t")]
    assert ids == [n * 100 + g for n in range(1, 61) for g in range(1, 51)]


@pytest.mark.parametrize("how", ["SIGTERM", "stdin"])
def test_an_orderly_stop_leaves_nothing_behind(source: Bench, how: str) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.flush(source.config("public.t"))
    child = start_flusher(source.config_file("public.t", flush_interval="1h"))
    wait_for(lambda: source.terminate("nobody") or len(psutil.Process(child.pid).children()) == 1)
    source.execute("insert into t select g, 'x' from generate_series(1, 1000) g")
    time.sleep(1)
    children = psutil.Process(child.pid).children()
    if how == "SIGTERM":
        child.terminate()
    else:
        assert child.stdin is not None
        child.stdin.close()
    assert child.wait(30) == 0
    assert all(map(ended, children))
    assert len(source.log("public.t")) == 1000  # what was complete is in the log
    assert source.confirmed() == source.flushed()


def test_a_killed_flusher_leaves_no_child(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    child = start_flusher(source.config_file("public.t"))
    wait_for(lambda: psutil.Process(child.pid).children())
    (decoder,) = psutil.Process(child.pid).children()
    child.kill()
    child.wait()
    wait_for(lambda: ended(decoder), 10)


def test_a_server_restart(tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path / "postgres", settings={"fsync": "off"})
    dsn = postgres.start()
    try:
        with bench(dsn, "restarted", tmp_path) as source:
            source.execute("create table t (id int primary key, v text)")
            config = source.config("public.t", flush_interval="50ms")
            source.flush(config)
            with flushing(config):
                source.execute("insert into t values (1, 'before')")
                wait_for(lambda: len(source.log("public.t")) == 1)
                postgres.stop()
                time.sleep(1)
                postgres.start()
                source.connection = psycopg.connect(source.dsn, autocommit=True)
                source.execute("insert into t values (2, 'after')")
                wait_for(lambda: len(source.log("public.t")) == 2)
            source.connection.close()
    finally:
        postgres.stop()
