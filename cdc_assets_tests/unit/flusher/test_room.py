"""How often the line is looked at while frames flow."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

import pytest

from cdc_assets.flusher.line.room import (
    LONGEST_SECONDS,
    ROOM_BYTES,
    SHORTEST_SECONDS,
    Gathering,
    make_room,
)


@pytest.mark.parametrize(
    ("bytes_per_second", "flush_seconds", "seconds"),
    [
        (1_000, 1.0, 0.1),  # it won't be full for long
        (1_000, 0.5, 0.05),
        (1_000, 0.05, LONGEST_SECONDS[0]),
        (1_000, 60.0, LONGEST_SECONDS[1]),
        (25_000_000, 1.0, 0.01),  # as long as the room lasts
        (10_000_000_000, 1.0, SHORTEST_SECONDS),
    ],
)
def test_a_look_comes_when_the_room_is_used(
    bytes_per_second: int, flush_seconds: float, seconds: float
) -> None:
    gathering, waited = Gathering(250_000, flush_seconds), 0.001
    for _ in range(20):
        waited = gathering.seconds(int(waited * bytes_per_second))
    assert waited == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("message_bytes", [50, 120, 250, 1_000, 10_000])
def test_a_full_line_is_known_as_full(message_bytes: int) -> None:
    """Else a look waits for what can't come: the server waits for the look."""
    near, far = socket.socketpair()  # of Unix, as to a server of the same machine
    with near, far:
        room = make_room(near.fileno())
        far.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                far.send(bytes(message_bytes))
        gathering, waited = Gathering(room, 1.0), 1.0
        for _ in range(20):
            waited = gathering.seconds(len(near.recv(ROOM_BYTES, socket.MSG_PEEK)))
        assert waited == SHORTEST_SECONDS


def test_a_socket_gets_room_and_is_readable_with_one_byte() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            before = near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert make_room(near.fileno()) >= min(ROOM_BYTES // 2, before // 4)
            far.send(b"x")
            assert select.select([near], [], [], 5)[0]
            assert near.recv(9) == b"x"
