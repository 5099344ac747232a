"""More than one flusher: the next takes over when one dies or hangs, and a late one is fenced."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.flusher.progress import Progress
from cdc_assets.log.sessions import heartbeat as heart
from cdc_assets.log.sessions.flusher_status import active_flusher
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.support.flusher import Bench, flushing, start_flusher
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for

# What a user may rely on.
TAKE_OVER_SECONDS = 60


@pytest.fixture
def source(source: Bench) -> Bench:
    source.execute("create table t (id int primary key)")
    Pipeline.open(source.config("public.t")).close()  # makes the schema that is looked at
    return source


@pytest.fixture
def followed(source: Bench) -> Bench:
    """The log has a beginning: everything that is inserted from now on will be in it."""
    source.flush(source.config("public.t"))
    return source


def active(source: Bench) -> str:
    """The process that has the turn, as those who wait are told."""
    with Pipeline.open(source.config("public.t")) as pipeline:
        return str(active_flusher(pipeline.store) or "")


def mine(child: subprocess.Popen[bytes]) -> str:
    return f"process {child.pid} on {socket.gethostname()}"


def words(source: Bench) -> str:
    return (source.folder / "flusher.log").read_text()


@contextmanager
def writing(source: Bench) -> Iterator[list[int]]:
    """A client that inserts 0, 1, 2, … for the length of the block; the list's end is the count."""
    count = [0]

    def work(stop: threading.Event) -> None:
        with psycopg.connect(source.dsn, autocommit=True) as connection:
            while not stop.wait(0.005):
                connection.execute("insert into t values (%s)", (count[0],))
                count[0] += 1

    with beside(work):
        yield count


def all_there(source: Bench, count: int) -> bool:
    return sum(stop - start for start, stop, _ in source.entries("public.t")) >= count


def once_and_in_order(source: Bench, count: int) -> None:
    source.flush(source.config("public.t"))
    assert [int(row.data["id"] or -1) for row in source.log("public.t")] == list(range(count))


def end(*children: subprocess.Popen[bytes] | None) -> None:
    for child in filter(None, children):
        child.kill()  # a stopped one, too
        child.wait()


def test_one_that_waits_reports_nothing_whatever_becomes_of_its_session(followed: Bench) -> None:
    """What a person sees is what the active one says."""
    source, config = followed, followed.config("public.t")
    told, theirs = set[str](), "select pid from pg_stat_activity where datname = current_database()"

    def is_waiting(second: Progress, states: set[str]) -> bool:
        with Pipeline.open(config) as pipeline:
            report, _ = pipeline.store.flusher_report() or ({}, None)
        told.add(str(report.get("state")))
        states.add(second.state)
        return "reconnecting" in states and second.state == "waiting"

    with flushing(config) as first, psycopg.connect(source.dsn, autocommit=True) as client:
        wait_for(lambda: first.state == "streaming")
        wait_for(lambda: is_waiting(first, set()) or "streaming" in told)
        told.clear()
        before = {pid for (pid,) in client.execute(theirs)}
        with flushing(config) as second:
            wait_for(lambda: second.state == "waiting")
            for _ in range(3):
                mine = {pid for (pid,) in client.execute(theirs)} - before
                client.execute("select pg_terminate_backend(p) from unnest(%s) p", (list(mine),))
                wait_for(partial(is_waiting, second, set[str]()))
    assert told == {"streaming"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_second_takes_over(followed: Bench, how: signal.Signals) -> None:
    source = followed
    file = source.config_file("public.t", flush_interval="50ms")
    first, second = start_flusher(file), None
    try:
        with writing(source) as count:
            wait_for(lambda: all_there(source, 20))
            assert active(source) == mine(first)
            second = start_flusher(file)
            wait_for(lambda: f"is active ({mine(first)}); waiting" in words(source))
            first.send_signal(how)
            began, written = time.monotonic(), count[0]
            # Its own last words may have been registered before it stopped.
            wait_for(lambda: all_there(source, written + 20), 2 * TAKE_OVER_SECONDS)
            took = time.monotonic() - began
            assert active(source) == mine(second)
            if how == signal.SIGSTOP:
                first.send_signal(signal.SIGCONT)
                wait_for(lambda: f"is active ({mine(second)}); waiting" in words(source))
                written = count[0]
                wait_for(lambda: all_there(source, written + 20))
                assert active(source) == mine(second)  # the late one waits in line
                assert first.poll() is None
                assert source.confirmed() <= source.flushed()
        second.terminate()
        assert second.wait(30) == 0
        if how == signal.SIGSTOP:
            wait_for(lambda: active(source) == mine(first))  # and has the next turn
            first.terminate()
            assert first.wait(30) == 0
    finally:
        end(first, second)
    once_and_in_order(source, count[0])
    assert took < TAKE_OVER_SECONDS


def test_a_stopped_one_that_was_making_pins_holds_up_nobody(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of the pins is held in another session of its: that one is ended as well."""
    monkeypatch.setattr(heart, "STALE_SECONDS", 3.0)
    monkeypatch.setattr(heart, "HEARTBEAT_SECONDS", 0.5)
    file = source.config_file("public.t", flush_interval="50ms")
    with psycopg.connect(source.dsn) as busy:
        busy.execute("select pg_current_xact_id()")  # slot creation waits for it
        first = start_flusher(file)
        try:
            wait_for(
                lambda: source.execute(
                    "select 1 from pg_stat_activity where query like 'CREATE_REPLICATION_SLOT%'"
                    " and datname = current_database()"
                )
            )
            first.send_signal(signal.SIGSTOP)
            busy.rollback()
            with flushing(source.config("public.t", flush_interval="50ms")):
                source.execute("insert into t values (0)")
                wait_for(lambda: source.ask_log("select 1 from _pg2iceberg.flushed_lsn"))
                source.execute("insert into t values (1)")
                wait_for(lambda: all_there(source, 1), 2 * TAKE_OVER_SECONDS)
        finally:
            end(first)


class _Hole:
    """A proxy to the server whose connections can be made to hang, both ways, without ending."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.swallows = threading.Event()
        self._sockets: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if self.swallows.is_set():
                    return  # and neither end hears of it
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.close()


def test_one_whose_connections_hang_loses_its_turn(
    followed: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = followed
    monkeypatch.setattr(heart, "STALE_SECONDS", 12.0)  # the first one beats every three
    source.execute(f"alter database {source.name} set wal_sender_timeout = '8s'")
    hole = _Hole(int(str(conninfo_to_dict(source.dsn)["port"])))
    through = Bench(
        source.name, make_conninfo(source.dsn, port=hole.port), source.folder, source.connection
    )
    first = start_flusher(through.config_file("public.t", flush_interval="50ms"))
    try:
        with writing(source) as count:
            wait_for(lambda: all_there(source, 20))
            with flushing(source.config("public.t", flush_interval="50ms")):
                hole.swallows.set()
                written = count[0]
                wait_for(lambda: all_there(source, written + 20), 2 * TAKE_OVER_SECONDS)
                assert active(source) != mine(first)
    finally:
        end(first)
        hole.close()
    once_and_in_order(source, count[0])
