"""How much a server can send before somebody reads it.

A look at the line costs the same however much has arrived, and each one that falls into a server's
sending costs the server, too. So the line is looked at seldom, and has room for what arrives
meanwhile: a server that finds it full has to wait.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final

ROOM_BYTES: Final = 2**20
# Of a Unix socket the sender's buffer is the limit, and it counts what the system keeps beside each
# message: with small ones it is full at 14 kB.
UNIX_BYTES: Final = 2**13
# Seconds from one look to the next while frames flow. On two cores, with changes of 200 bytes, a
# change cost 0.87, 0.77 and 0.37 µs of CPU here at 2, 6 and 20 ms, and 5.4, 3.9 and 2.7 µs at the
# server. The longest is a share of the flush interval, within bounds: where other databases of a
# server write, a quiet source has a keepalive at each look, and that is all it costs.
SHORTEST_SECONDS: Final = 0.001
LONGEST_SECONDS: Final = 0.02, 0.1
_SHARE: Final = 0.1


def make_room(descriptor: int) -> int:
    """Have the socket hold ROOM_BYTES if the system lets it; returns what it holds for sure."""
    with socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.family == socket.AF_UNIX:
            return UNIX_BYTES
        # Linux gives a socket twice what makes it readable, and goes on to tune it; once SO_RCVBUF
        # was set it doesn't. Then one byte makes it readable again.
        for least in (ROOM_BYTES, 1):
            with suppress(OSError):
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
        # It counts what the system keeps beside the bytes, which is as much for small packets.
        holds = opened.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 4
        return min(holds, ROOM_BYTES // 2)  # a look brings no more than ROOM_BYTES


class Gathering:
    """How long to wait until the next look, such that about ``room`` bytes will have arrived.

    ``flush_seconds``: how often is flushed what has arrived.
    """

    def __init__(self, room: int, flush_seconds: float) -> None:
        self._room = room
        self._seconds = SHORTEST_SECONDS
        least, most = LONGEST_SECONDS
        self._longest_seconds = min(max(least, _SHARE * flush_seconds), most)

    def seconds(self, arrived_bytes: int) -> float:
        """After a look that brought so many bytes."""
        fits = self._seconds * min(self._room / max(1, arrived_bytes), 2.0)
        self._seconds = min(max(fits, SHORTEST_SECONDS), self._longest_seconds)
        return self._seconds
