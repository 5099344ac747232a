"""A connection that is kept between uses and made anew after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

Open = Callable[[], psycopg.Connection[Any]]


class KeptConnection:
    """Opened at first use by ``open_one``; for one thread."""

    def __init__(self, open_one: Open) -> None:
        self._open = open_one
        self._connection: psycopg.Connection[Any] | None = None

    @contextmanager
    def use(self) -> Iterator[psycopg.Connection[Any]]:
        """The connection; an error of it closes it, and the next use has another one."""
        if self._connection is None:
            self._connection = self._open()
        try:
            yield self._connection
        except psycopg.Error:
            self.close()
            raise

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()
