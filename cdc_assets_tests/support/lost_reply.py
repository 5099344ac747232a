"""A line to a Postgres on which the reply to one commit of the catalog's is lost, with its session.

The server has carried the statement out by then, and nobody hears of it: as when a network breaks,
or when a server is stopped whose commit waits for a standby.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit, urlunsplit


class LosingLine:
    """Listens on loopback at ``dsn``. It loses nothing until it is told to."""

    def __init__(self, server_dsn: str) -> None:
        self.server_dsn = server_dsn
        parts = urlsplit(server_dsn)
        self._server = parts.hostname or "", parts.port or 5432
        self._listener = socket.create_server(("127.0.0.1", 0))
        user = parts.netloc.rpartition("@")[0]
        place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.dsn = urlunsplit(parts._replace(netloc=f"{user}@{place}" if user else place))
        self._wanted: bytes | None = None
        self._skipped = 0
        self.lost = 0

    def __enter__(self) -> Self:
        _beside(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends its accept
        self._listener.close()

    def lose_reply(self, table: str, *, after: int = 0) -> None:
        """Lose the reply to a coming commit of the lake table in folder ``table``.

        ``after`` commits of it are answered before.
        """
        self._skipped, self._wanted = after, f"/{table}/metadata/".encode()

    def _listen(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._server)
            asked = threading.Event()
            _beside(self._asks, near, far, asked)
            _beside(self._answers, near, far, asked)

    def _asks(self, near: socket.socket, far: socket.socket, asked: threading.Event) -> None:
        while piece := near.recv(65536):
            if self._wanted is not None and self._wanted in piece:
                if self._skipped == 0:
                    self._wanted = None
                    self.lost += 1
                    asked.set()
                self._skipped -= 1
            far.sendall(piece)
        far.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answers(near: socket.socket, far: socket.socket, asked: threading.Event) -> None:
        with near, far:
            while (piece := far.recv(65536)) and not asked.is_set():
                near.sendall(piece)
            near.shutdown(socket.SHUT_RDWR)


def _beside(work: Callable[..., None], *given: object) -> None:
    def quietly() -> None:
        with suppress(OSError):  # the other end is gone
            work(*given)

    threading.Thread(target=quietly, daemon=True).start()
