"""Looks at the coordination database for whoever scrapes: none unless somebody does.

One look serves every scrape of LOOK_SECONDS, and so does one that failed. It has a thread and a
connection of its own, so a database that doesn't answer holds up neither the stream nor, for more
than PATIENCE_SECONDS after the look began, a scrape.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.sessions.connection import connect_log
from cdc_assets.log.store import LogStore
from cdc_assets.observe.figures.look import Figures, look
from cdc_assets.postgres.session.kept import KeptConnection
from cdc_assets.process.helper_thread import HelperThread, Note

# Prometheus scrapes every 15 seconds or more rarely: each of its scrapes has a look of its own.
LOOK_SECONDS = 10.0
# Prometheus gives up a scrape after 10 seconds. The figures of 500 tables take a tenth of one.
PATIENCE_SECONDS = 3.0
_TIMEOUT = "5s"
# The thread is woken when it is needed.
_ASLEEP_SECONDS = 3600.0


class Looks:
    """The last look, for any thread, from :meth:`start` until :meth:`close`."""

    def __init__(self, config: SourceConfig, note: Note) -> None:
        self._config = config
        self._connection = KeptConnection(self._connect)
        self._changed = threading.Condition()
        self._figures: Figures | None = None
        self._asked_at = self._over_at = float("-inf")
        self._thread = HelperThread(
            "metrics", self._step, _ASLEEP_SECONDS, at_end=self._connection.close, note=note
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def latest(self) -> Figures | None:
        """Figures that aren't older than LOOK_SECONDS; None if there are none to be had."""
        with self._changed:
            now = time.monotonic()
            if self._is_over and now - self._over_at > LOOK_SECONDS:
                self._asked_at = now
                self._thread.soon()
            patience = self._asked_at + PATIENCE_SECONDS - now
            self._changed.wait_for(lambda: self._is_over, max(0.0, patience))
            return self._figures if self._is_over else None

    @property
    def _is_over(self) -> bool:
        """Whether no look is under way."""
        return self._over_at >= self._asked_at

    def _step(self) -> None:
        if self._is_over:
            return
        figures: Figures | None = None
        try:
            with self._connection.use() as connection:
                state = self._config.state.schema_
                figures = look(LogStore(connection, self._config.name, state))
        finally:
            with self._changed:
                self._figures, self._over_at = figures, time.monotonic()
                self._changed.notify_all()

    def _connect(self) -> psycopg.Connection[Any]:
        connection = connect_log(self._config, "metrics")
        connection.execute(f"set statement_timeout = '{_TIMEOUT}'")
        return connection
