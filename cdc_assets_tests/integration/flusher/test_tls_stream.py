"""A replication stream through TLS, read past libpq: what libpq reads, and how it is lost."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc_assets.flusher.line import direct
from cdc_assets.flusher.line.direct import DirectLine
from cdc_assets.flusher.line.libpq import LibpqLine
from cdc_assets.flusher.stream import Stream, StreamLost
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.wires import TlsWire
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.waiting import wait_for

_HEADER_BYTES = 25  # kind, two LSNs and the time of sending
_COMMITS = 3


@pytest.fixture
def server(secured: str) -> Iterator[psycopg.Connection]:
    """With a table ``s.t``, its publication ``pub`` and two slots at one LSN."""
    with psycopg.connect(secured, autocommit=True) as server:
        server.execute(
            "create schema s; create table s.t (id int primary key, v text);"
            " create publication pub for table s.t"
        )
        for slot in ("one", "two"):
            server.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        yield server
        server.execute("select pg_terminate_backend(active_pid) from pg_replication_slots")
        wait_for(
            lambda: (
                not server.execute(
                    "select from pg_replication_slots where active and slot_name in ('one', 'two')"
                ).fetchall()
            )
        )
        server.execute("select pg_drop_replication_slot(s) from unnest('{one,two}'::text[]) s")
        server.execute("drop publication pub; drop schema s cascade")


@contextmanager
def _open(dsn: str, slot: str) -> Iterator[Stream]:
    with closing(Stream.start(dsn, "src", slot, ["pub"], Lsn.ZERO)) as stream:
        yield stream


def _messages(stream: Stream, commits: int, limit_bytes: int = 2**20) -> Iterator[bytes]:
    """Without what says when they were sent, up to the last of so many transactions."""
    while commits:
        received = stream.receive(limit_bytes)
        for frame in map(bytes, received.frames):
            if frame.startswith(b"w"):
                yield frame[_HEADER_BYTES:]
                commits -= frame[_HEADER_BYTES:].startswith(b"C")
        if not len(received.lengths) and not stream.has_more:
            assert select.select([stream], [], [], 5)[0], "what is left was told to be none"


class Proxy:
    """Between a client and a server: passes pieces on, holds them, spoils one or hangs up."""

    def __init__(self, dsn: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = int(conninfo_to_dict(dsn)["port"] or 0)
        self.dsn = make_conninfo(dsn, port=self._listener.getsockname()[1])
        self.spoils, self.reads = False, threading.Event()
        self.reads.set()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                self._ends += [near, far]
                for come, go in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(come, go), daemon=True).start()

    def _pass(self, come: socket.socket, go: socket.socket) -> None:
        with suppress(OSError):
            sizes, from_server = [1, 700, 16_000, 3], come is not self._ends[-2]
            while piece := come.recv(sizes[0]):
                sizes = sizes[1:] + sizes[:1]
                if self.spoils and from_server and len(piece) > 20:
                    piece = piece[:-1] + bytes([piece[-1] ^ 1])
                go.sendall(piece)
                if not from_server:
                    self.reads.wait()

    def hang_up(self) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def proxy(secured: str) -> Iterator[Proxy]:
    with closing_proxy(Proxy(secured)) as proxy:
        yield proxy


@contextmanager
def closing_proxy(proxy: Proxy) -> Iterator[Proxy]:
    try:
        yield proxy
    finally:
        proxy.reads.set()
        proxy.hang_up()


def _write(server: psycopg.Connection) -> None:
    """_COMMITS transactions."""
    server.execute(
        "insert into s.t select g, repeat('d', g % 300) from generate_series(1, 20000) g"
    )
    # Two that fill many records, larger than the line's buffer.
    server.execute("update s.t set v = repeat(E'd\\\\t', 3000000) where id = 1")
    server.execute("insert into s.t values (0, repeat('x', 16384))")


@pytest.mark.parametrize("limit_bytes", [1_000, 50_000])
def test_what_is_read_past_libpq_is_what_libpq_reads(
    server: psycopg.Connection,
    secured: str,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    limit_bytes: int,
) -> None:
    _write(server)
    with _open(proxy.dsn, "one") as stream:
        assert isinstance(stream._line, DirectLine)
        assert isinstance(stream._line._wire, TlsWire)
        past = list(_messages(stream, _COMMITS, limit_bytes))
    monkeypatch.setattr(direct, "wire_of", lambda connection: None)
    with _open(secured, "two") as stream:
        assert isinstance(stream._line, LibpqLine)
        assert past == list(_messages(stream, _COMMITS))
    assert len(past) > 20_000


@pytest.mark.parametrize("limit_bytes", [1_000, 5_000])
def test_what_is_left_where_no_socket_tells_it_is_told(
    server: psycopg.Connection, secured: str, limit_bytes: int
) -> None:
    with _open(secured, "one") as stream:
        server.execute("insert into s.t values (1, repeat('x', 100000))")
        end = current_lsn(server)
        sent = "select from pg_stat_replication where sent_lsn >= %s::pg_lsn"
        wait_for(lambda: server.execute(sent, (str(end),)).fetchall())
        time.sleep(0.2)  # all of it has arrived
        assert sum(map(len, _messages(stream, 1, limit_bytes))) > 100_000


def test_a_stream_begins_at_once_though_the_server_says_something_first(
    secured: str, server: psycopg.Connection
) -> None:
    """libpq reads the answer then, and none of it is hidden from it."""
    said = "-c client_min_messages=log -c log_replication_commands=on"
    over = threading.Event()
    busy = threading.Thread(target=lambda: [None for _ in iter(over.is_set, True)])
    busy.start()
    try:
        for _ in range(20):
            began = time.monotonic()
            with _open(make_conninfo(secured, options=said), "one") as stream:
                assert isinstance(stream._line, LibpqLine)
                # Whoever waits in vain does so for the next keepalive, ten seconds.
                assert time.monotonic() - began < 4
    finally:
        over.set()
        busy.join()


def test_a_line_that_was_spoilt_is_lost(server: psycopg.Connection, proxy: Proxy) -> None:
    with _open(proxy.dsn, "one") as stream:
        _write(server)
        found = _messages(stream, _COMMITS)
        next(found)
        proxy.spoils = True
        with pytest.raises(StreamLost, match="TLS ended with an error: "):
            list(found)


def test_a_line_that_was_cut_is_lost(server: psycopg.Connection, proxy: Proxy) -> None:
    with _open(proxy.dsn, "one") as stream:
        _write(server)
        found = _messages(stream, _COMMITS)
        next(found)
        proxy.hang_up()
        with pytest.raises(StreamLost, match="connection was lost"):
            list(found)


def test_what_the_server_says_last_is_told(server: psycopg.Connection, secured: str) -> None:
    with _open(secured, "one") as stream:
        server.execute("select pg_terminate_backend(active_pid) from pg_replication_slots")
        with pytest.raises(StreamLost, match="terminating connection"):
            list(_messages(stream, 1))


def test_a_connection_goes_on_when_its_tls_is_let_go(server: psycopg.Connection) -> None:
    before = server.execute("select pg_backend_pid()").fetchone()
    for _ in range(100):
        wire = TlsWire.of(server.pgconn)
        assert wire is not None
        wire.begin_behind(0)
        wire.close()
        wire.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            wire.receive_into(memoryview(bytearray(9)), 9)
        with pytest.raises(OSError, match="Bad file descriptor"):
            wire.send(b"x")
    assert server.execute("select pg_backend_pid()").fetchone() == before


def test_feedback_waits_for_a_server_that_does_not_read(
    server: psycopg.Connection, proxy: Proxy
) -> None:
    def confirmed() -> Lsn:
        found = server.execute(
            "select confirmed_flush_lsn from pg_replication_slots where slot_name = 'one'"
        ).fetchone()
        assert found
        return Lsn.parse(str(found[0]))

    with _open(proxy.dsn, "one") as stream:
        assert isinstance(stream._line, DirectLine)
        proxy.reads.clear()
        before = confirmed()
        while len(stream._line._unsent) < 2**20:  # retried with more behind it each time
            stream.acknowledge(before)
        proxy.reads.set()
        _write(server)
        end = current_lsn(server)
        assert list(_messages(stream, _COMMITS))
        stream.acknowledge(end)
        wait_for(lambda: stream.receive(2**20).blob is not None and confirmed() >= end)
