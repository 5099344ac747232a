"""A child's side of ``process.children``: it ends with its parent."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

_log = logging.getLogger(__name__)


# A log a person can still open, and days of an ordinary child's output.
LOG_LIMIT_BYTES = 16 * 2**20
_LOG_KEPT_BYTES = 4 * 2**20
# How often a child looks at its log's size; end-of-file on stdin is seen at once.
_LOG_CHECK_SECONDS = 5.0
# Longer than any orderly stop takes (a flush, a fast shutdown), short enough for a person to wait.
GRACE_SECONDS = 20.0
# How soon a waiting process takes over from one that ended.
_LOCK_POLL_SECONDS = 0.2


def read_settings() -> str:
    """The line that the parent sent; "" if there is none. Call it once, first."""
    if not _stdin_is_a_pipe():
        return ""
    # Nothing follows the line but the end, which the watchdog finds again.
    line = bytearray()
    while not line.endswith(b"\n") and (more := os.read(0, 2**16)):
        line += more
    return line.decode().removesuffix("\n") if line.endswith(b"\n") else ""


def die_with_parent(grace_seconds: float = GRACE_SECONDS) -> threading.Event:
    """Return an event that is set when stdin ends or SIGTERM or SIGINT comes: stop in order then.

    If the process still exists ``grace_seconds`` later, it exits at once. If it was started by hand
    (stdin is no pipe), only the signals count. Call it from the main thread.
    """
    stopping = threading.Event()

    def begin(*_: object) -> None:
        if not stopping.is_set():
            stopping.set()
            end_within(grace_seconds)

    signal.signal(signal.SIGTERM, begin)
    signal.signal(signal.SIGINT, begin)
    if _stdin_is_a_pipe():
        threading.Thread(target=_watch_stdin, args=(begin,), daemon=True).start()
    return stopping


def end_within(grace_seconds: float = GRACE_SECONDS) -> None:
    """Return at once; if this process still exists ``grace_seconds`` later, it exits.

    A call that hangs, to a database or a disk, ends with the process.
    """
    threading.Thread(target=_last_seconds, args=(grace_seconds,), daemon=True).start()


def acquire(lock: IO[Any], stopping: threading.Event) -> bool:
    """Wait for the exclusive lock of an open file; False if the process has to stop before.

    The kernel releases it when the holder ends, however it ends, so it can't go stale.
    """
    while not stopping.is_set():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stopping.wait(_LOCK_POLL_SECONDS)
        else:
            return True
    return False


def _stdin_is_a_pipe() -> bool:
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _watch_stdin(begin: Callable[[], None]) -> None:
    while True:
        readable, _, _ = select.select([0], [], [], _LOG_CHECK_SECONDS)
        if readable and not os.read(0, 4096):
            begin()
            return
        with suppress(OSError):  # not a file of ours
            _bound_log()


def _last_seconds(grace_seconds: float) -> None:
    time.sleep(grace_seconds)
    _log.error("still here %s s after the request to stop: exiting", grace_seconds)
    os._exit(70)  # EX_SOFTWARE


def _bound_log(limit_bytes: int = LOG_LIMIT_BYTES, kept_bytes: int = _LOG_KEPT_BYTES) -> None:
    """Cut the file that stdout goes to down to its last lines when it has grown too large."""
    status = os.fstat(1)
    if not stat.S_ISREG(status.st_mode) or status.st_size <= limit_bytes:
        return
    tail = os.pread(1, kept_bytes, status.st_size - kept_bytes)
    os.ftruncate(1, 0)
    os.write(1, b"(older lines were cut off)\n" + tail[tail.find(b"\n") + 1 :])
