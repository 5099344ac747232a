"""A thread beside the main work that goes on whatever happens, reports problems, and backs off.

Nobody notices when a thread that beats, pins or reports in the background is gone: locks are lost,
tables wait, a report grows old. So no error ends such a thread, not even a defect of ours: its step
is tried again, at growing intervals. Its owner decides what the step does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import psycopg

from cdc_assets.errors import CdcError, first_line
from cdc_assets.process.traces import noted

logger = logging.getLogger(__name__)

Note = Callable[[str, str | None], None]
"""Called with a thread's name and what it can't do now, or None when it can again."""

# The end of a process doesn't wait for a database that doesn't answer.
_JOIN_SECONDS = 3.0


class HelperThread:
    """Calls ``step`` every ``seconds`` until it is closed, then ``at_end`` once.

    Both run in the thread. After an error it waits twice as long each time, up to
    ``longest_seconds``.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        seconds: float,
        *,
        longest_seconds: float | None = None,
        at_end: Callable[[], None] = lambda: None,
        note: Note = lambda _name, _trouble: None,
    ) -> None:
        self.name = name
        self._step = step
        self._seconds = seconds
        self._longest_seconds = longest_seconds or seconds
        self._at_end = at_end
        self._note = note
        self._trouble: str | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self) -> None:
        """Have the next step begin now, and not when its time comes."""
        self._wake.set()

    def close(self) -> bool:
        """Ask it to end and wait a little; returns whether it has."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait = self._seconds
        while True:
            self._wake.wait(wait)
            self._wake.clear()  # before the look at _stop, which is set first
            if self._stop.is_set():
                break
            if self._tried(self._step):
                self._is_well()
                wait = self._seconds
            else:
                wait = min(2 * wait, self._longest_seconds)
        self._tried(self._at_end)

    def _tried(self, what: Callable[[], None]) -> bool:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - whatever it is, the thread goes on
            self._say(error)
            return False
        return True

    def _is_well(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            self._note(self.name, None)
            logger.info("%s: all is well again", self.name)

    def _say(self, error: Exception) -> None:
        expected = isinstance(error, (CdcError, psycopg.Error, OSError))
        told = first_line(error)
        trouble = told if expected else f"{type(error).__name__}: {told}"
        if trouble == self._trouble:
            return
        self._trouble = trouble
        self._note(self.name, trouble)
        # A defect's trace is kept, once.
        logger.warning("%s: %s", self.name, trouble if expected else noted(error))
