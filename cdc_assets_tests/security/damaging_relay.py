"""A line to a server on which the length of one replication message is damaged, once.

``python -m cdc_assets_tests.security.damaging_relay HOST PORT MORE`` prints the port that it
listens on, and ``damaged`` once; if MORE is ``slow``, each row takes SLOW_SECONDS instead. It is a
process, because while libpq connects no thread of its own process runs.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SLOW_SECONDS, _PIECES = 1.2, 24


class DamagingRelay:
    """Listens on loopback; ``damage`` changes the length of the first Insert.

    Without it each is slow.
    """

    def __init__(self, host: str, port: int, damage: Callable[[int], int] | None) -> None:
        self._target = host, port
        self._damage = damage
        self.is_damaged = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            for line in (near, far):  # or each answer of several messages takes 40 ms
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for work in (self._to_server, self._to_client):
                threading.Thread(target=work, args=(near, far), daemon=True).start()

    @staticmethod
    def _to_server(near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(65536):
                far.sendall(data)
            far.shutdown(socket.SHUT_RDWR)

    def _to_client(self, near: socket.socket, far: socket.socket) -> None:
        """Message by message: its kind, its length without the kind, the rest."""
        with suppress(OSError), far.makefile("rb") as server:
            while len(head := server.read(5)) == 5:
                (length,) = struct.unpack(">i", head[1:])
                body = server.read(length - 4)
                if self._damage is None and body[25:26] == b"I":
                    self._dribble(near, head + body)
                    continue
                if (
                    self._damage is not None
                    and not self.is_damaged
                    and head[:1] == b"d"
                    and body[25:26] == b"I"
                ):
                    self.is_damaged = True
                    print("damaged", flush=True)  # noqa: T201
                    head = head[:1] + struct.pack(">i", self._damage(length))
                near.sendall(head + body)
            near.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _dribble(near: socket.socket, message: bytes) -> None:
        step = -(-len(message) // _PIECES)
        for at in range(0, len(message), step):
            time.sleep(SLOW_SECONDS / _PIECES)
            near.sendall(message[at : at + step])


def _damage(more: int) -> Callable[[int], int]:
    return lambda length: length + more if more else -1


def main() -> None:
    how = None if sys.argv[3] == "slow" else _damage(int(sys.argv[3]))
    relay = DamagingRelay(sys.argv[1], int(sys.argv[2]), how)
    print(relay.port, flush=True)  # noqa: T201
    relay.serve()


if __name__ == "__main__":
    main()
