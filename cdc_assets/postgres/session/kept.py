"""A connection that is kept between uses and made anew after an error."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

Open = Callable[[], psycopg.Connection[Any]]


class KeptConnection:
    """Opened at first use by ``open_one``; for one thread.

    One that the server has ended meanwhile is made anew, and one that is older than ``seconds``:
    whether a session can still be had, and where the address leads to now, is found out then.
    """

    def __init__(self, open_one: Open, seconds: float = math.inf) -> None:
        self._open, self._seconds = open_one, seconds
        self._connection: psycopg.Connection[Any] | None = None
        self._opened = 0.0

    @contextmanager
    def use(self) -> Iterator[psycopg.Connection[Any]]:
        """The connection; an error of it closes it, and the next use has another one."""
        if self._connection is not None and self._is_stale(self._connection):
            self.close()
        if self._connection is None:
            self._connection, self._opened = self._open(), time.monotonic()
        try:
            yield self._connection
        except psycopg.Error:
            self.close()
            raise

    def _is_stale(self, connection: psycopg.Connection[Any]) -> bool:
        if connection.closed or time.monotonic() - self._opened > self._seconds:
            return True
        # Nothing was asked, so what is there to be read is the end, or a notice that nobody needs.
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()
