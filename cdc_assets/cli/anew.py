"""Commands that go on for ever: how they are told to end, and how they take up a changed file.

``flush`` and ``materialize --follow`` look at their configuration's file. Once it says something
else, and is valid, the command ends in order, as by SIGTERM, and the process executes itself with
the arguments it was given: what follows is an ordinary start, and nothing of the old configuration
is left. One that is invalid is told once, and the one before goes on.

The file is read at the second look that finds it as it is: an editor may still be writing it, and
half of it may well be valid.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError
from cdc_assets.messages.texts import one_line
from cdc_assets.readiness.foreign_errors import explained

logger = logging.getLogger(__name__)

# A look is a system call; a change is taken up at the second one.
LOOK_SECONDS = 2.0
# A source with patterns is asked for its tables, and may be away: then it is asked again.
AGAIN_SECONDS = 30.0

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_Version = tuple[int, ...] | None


def until_told(told: Callable[[], None] = lambda: None) -> threading.Event:
    """An event that SIGTERM or SIGINT sets; ``told`` is called before that, once."""
    stop = threading.Event()

    def end(*_: object) -> None:
        if not stop.is_set():
            told()
        stop.set()

    _on_signals(end)
    return stop


def _on_signals(handler: Callable[..., None]) -> dict[signal.Signals, Any]:
    """The handlers before it."""
    return {number: signal.signal(number, handler) for number in SIGNALS}


class ConfigurationFile:
    """A file as it was when this was made, which has to be before it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_first = self.version()

    def version(self) -> _Version:
        """Another one for whatever is written there; None if it isn't there, or is no file."""
        try:
            now = self._path.stat()
        except OSError:
            return None
        if not self._path.is_file():
            return None
        return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns

    @contextmanager
    def until_changed(
        self,
        known: SourceConfig,
        read: Callable[[], SourceConfig],
        told: Callable[[], None] = lambda: None,
    ) -> Iterator[threading.Event]:
        """Like :func:`until_told`; the event is set, too, once ``read`` returns not ``known``.

        In that case the process begins anew at the end of the block, unless a signal came as well.
        A pipe, which can be read once, isn't looked at. Call it from the main thread.
        """
        stop, is_signalled, has_changed = threading.Event(), threading.Event(), threading.Event()

        def end(by: threading.Event) -> None:
            by.set()
            if not stop.is_set():
                told()
            stop.set()

        before = _on_signals(lambda *_: end(is_signalled))
        if self._at_first is not None:
            look = _Look(self, self._at_first, known, read)

            def watch() -> None:
                if look.until(stop):
                    end(has_changed)

            threading.Thread(target=watch, name="file", daemon=True).start()
        try:
            yield stop
        finally:
            stop.set()
            # From here on a signal ends the process at once, also as its next one.
            for number, handler in before.items():
                signal.signal(number, handler)
        if has_changed.is_set() and not is_signalled.is_set():
            _begin_anew()


class _Look:
    """What a thread knows of the file while it looks at it."""

    def __init__(
        self,
        file: ConfigurationFile,
        at_first: _Version,
        known: SourceConfig,
        read: Callable[[], SourceConfig],
    ) -> None:
        self._file, self._known, self._read = file, known, read
        self._seen = self._judged = at_first
        self._again_at, self._problem = math.inf, ""

    def until(self, stop: threading.Event) -> bool:
        """Look again and again; True once there is another configuration, False by ``stop``."""
        while not stop.wait(LOOK_SECONDS):
            seen, self._seen = self._seen, self._file.version()
            is_due = self._seen != self._judged or time.monotonic() >= self._again_at
            if seen == self._seen and is_due and self._is_another():
                return True
        return False

    def _is_another(self) -> bool:
        self._judged, self._again_at = self._seen, math.inf
        try:
            found = self._read()
        except Exception as error:  # noqa: BLE001 - whatever it is, the one before goes on
            problem = explained(error, self._known)
            if not isinstance(problem, ConfigurationError):  # that takes another file
                self._again_at = time.monotonic() + AGAIN_SECONDS
            if (said := one_line(str(problem))) != self._problem:
                logger.warning("the changed configuration isn't taken, the old one stays: %s", said)
            self._problem = said
            return False
        self._problem = ""
        if found.dump() == self._known.dump():
            return False
        logger.warning("the configuration has changed: ending, to begin anew with it")
        return True


def _begin_anew() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Nothing of ours outlives it: what Python, libpq and gRPC open is closed by the call.
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - as it was called
