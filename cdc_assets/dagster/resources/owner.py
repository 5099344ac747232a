"""Runs that don't outlive `dagster dev`, nor Dagster's daemon.

A run watches the process that started its code server, in case that was killed, and is interrupted
then, exactly as by a cancellation. A copy or a merge that is cut off has not happened, and is asked
for again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

import psutil

from cdc_assets.dagster.internals import DAEMON

# A run is over this long after the owner, and the code server half a second later.
LOOK_SECONDS = 1.0

_watching = threading.Event()


def is_code_server(command: Sequence[str]) -> bool:
    """Whether a command line is one of the two processes of a code server."""
    text = " ".join(command)
    return "dagster" in text and (" api grpc" in text or " code-server start" in text)


def is_run_process(command: Sequence[str]) -> bool:
    """Whether a command line is that of a run's process, or of the one that it was forked from."""
    text = " ".join(command)
    return "multiprocessing.spawn" in text or "multiprocessing.forkserver" in text


def is_owner(command: Sequence[str]) -> bool:
    """Whether a command line is `dagster dev`, `dg dev` or Dagster's daemon."""
    words = [word.rsplit("/", 1)[-1] for word in command]
    started = {"dagster", "dg", "dagster-daemon", DAEMON} & set(words)
    return bool(started) and ("dev" in words or "run" in words)


def owner() -> psutil.Process | None:
    """The command that started this run's code server; None if it isn't one of :func:`is_owner`."""
    try:
        above = [p for p in psutil.Process().parents() if not is_run_process(p.cmdline())]
        found = next((p for p in above if not is_code_server(p.cmdline())), None)
        served = any(is_code_server(p.cmdline()) for p in above)
        return found if served and found is not None and is_owner(found.cmdline()) else None
    except psutil.Error:  # it ended while we looked, or isn't ours to look at
        return None


def end_with_owner() -> None:
    """Interrupt this run when its owner is gone; does nothing in a deployment or in a test."""
    if _watching.is_set():
        return
    found = owner()
    if found is None:
        return
    _watching.set()
    threading.Thread(target=_watch, args=(found,), name="owner", daemon=True).start()


def _watch(found: psutil.Process) -> None:
    while found.is_running() and found.status() != psutil.STATUS_ZOMBIE:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)
