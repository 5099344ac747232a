"""Runs that don't outlive their code server, nor `dagster dev`.

A code server that is asked to end waits for its runs, and a run of ours goes on for minutes.
Meanwhile nothing takes over, and in the end a person kills all of it. So the code server
interrupts its runs when asked to end, exactly as a cancellation does; and a run watches the process
that started its code server, in case that was killed. A copy or a merge that is cut off has not
happened, and is asked for again.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from cdc_assets.dagster.internals import DAEMON, SERVER, SERVER_TOLD_TO_END

logger = logging.getLogger(__name__)

# A run is over this long after the owner, and the code server half a second later.
LOOK_SECONDS = 1.0

# What a run may take to end in order: a statement is interrupted, sessions are closed.
ORDERLY_SECONDS = 10.0

_watching = threading.Event()


def is_code_server(command: Sequence[str]) -> bool:
    """Whether a command line is one of the two processes of a code server."""
    text = " ".join(command)
    return "dagster" in text and (" api grpc" in text or " code-server start" in text)


def is_owner(command: Sequence[str]) -> bool:
    """Whether a command line is `dagster dev`, `dg dev` or Dagster's daemon."""
    words = [word.rsplit("/", 1)[-1] for word in command]
    started = {"dagster", "dg", "dagster-daemon", DAEMON} & set(words)
    return bool(started) and ("dev" in words or "run" in words)


def owner() -> psutil.Process | None:
    """The command that started this run's code server; None if it isn't one of :func:`is_owner`."""
    try:
        above = psutil.Process().parents()
        found = next((p for p in above if not is_code_server(p.cmdline())), None)
        served = any(is_code_server(p.cmdline()) for p in above)
        return found if served and found is not None and is_owner(found.cmdline()) else None
    except psutil.Error:  # it ended while we looked, or isn't ours to look at
        return None


def end_runs_with_code_server() -> None:
    """In a code server: interrupt its runs once it is told to end. Elsewhere it does nothing."""
    if _watching.is_set() or not is_code_server(psutil.Process().cmdline()):
        return
    # Dagster has no public API for it, so it is looked for by its class's name.
    servers = (found for found in gc.get_objects() if type(found).__name__ == SERVER)
    told = getattr(next(servers, None), SERVER_TOLD_TO_END, None)
    if isinstance(told, threading.Event):
        _watching.set()
        threading.Thread(target=_end_runs, args=(told,), name="runs", daemon=True).start()
    else:
        logger.warning("this Dagster doesn't say when a code server ends: it waits for its runs")


def _end_runs(told: threading.Event) -> None:
    told.wait()
    for number in (signal.SIGINT, signal.SIGKILL):
        runs = multiprocessing.active_children()
        for run in runs:
            assert run.pid is not None
            logger.info("the code server ends: %s to run process %s", number.name, run.pid)
            with suppress(ProcessLookupError):
                os.kill(run.pid, number)
        deadline = time.monotonic() + ORDERLY_SECONDS
        for run in runs:
            run.join(max(0.0, deadline - time.monotonic()))
    _end_left_tails()


def _end_left_tails() -> None:
    """End each ``tail`` of a step's output that has outlived its run.

    Dagster starts two for a step, and forgets one if interrupted while starting it. That one
    would run for ever, and keep open whatever the code server's own output is piped to.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended while we looked, or isn't ours to look at
            if _is_left_tail(process):
                logger.info("ending a tail (pid %s) that was left by a run", process.pid)
                process.terminate()


def _is_left_tail(process: psutil.Process) -> bool:
    command = process.cmdline()
    if command[:4] != ["tail", "-F", "-c", "+0"] or "/compute_logs/" not in command[-1]:
        return False
    home = "DAGSTER_HOME"
    if process.environ().get(home) != os.environ.get(home):  # another platform's
        return False
    parent = process.parent()
    # Orphaned: the parent was a run, which is a Python process, and not this server itself.
    return parent is None or parent.pid in {1, os.getpid()} or "python" not in parent.name()


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
