"""What a code server does about its runs, beyond what Dagster has it do.

It forks them. Dagster has each run begin with a new interpreter, which imports Dagster and all that
is ours: 2 s of CPU, and the first seconds of whatever a person or a sensor asks for. A process that
has imported these once, and has done nothing else, is forked instead, in milliseconds.

It ends them. A code server that is asked to end waits for its runs, and a run of ours goes on for
minutes. Meanwhile nothing takes over, and in the end a person kills all of it. So the code server
interrupts its runs when asked to end, exactly as a cancellation does. A copy or a merge that is cut
off has not happened, and is asked for again.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from cdc_assets.dagster.internals import (
    RUN_MODULE,
    SERVER,
    SERVER_PROCESSES,
    SERVER_TOLD_TO_END,
)
from cdc_assets.dagster.resources.owner import is_code_server

logger = logging.getLogger(__name__)

# What runs are forked with.
_IMPORTED = (RUN_MODULE, "cdc_assets.dagster.build")
# What a run may take to end in order: a statement is interrupted, sessions are closed.
ORDERLY_SECONDS = 10.0

_tended = threading.Event()


def tend_runs() -> None:
    """In a code server: have its runs forked, and interrupted once it is told to end.

    Elsewhere it does nothing.
    """
    if _tended.is_set() or not is_code_server(psutil.Process().cmdline()):
        return
    # Dagster has no public API for it, so it is looked for by its class's name.
    servers = (found for found in gc.get_objects() if type(found).__name__ == SERVER)
    server = next(servers, None)
    if isinstance(getattr(server, SERVER_PROCESSES, None), SpawnContext):
        setattr(server, SERVER_PROCESSES, _forks())
    told = getattr(server, SERVER_TOLD_TO_END, None)
    if isinstance(told, threading.Event):
        _tended.set()
        threading.Thread(target=_end_runs, args=(told,), name="runs", daemon=True).start()
    else:
        logger.warning("this Dagster doesn't say when a code server ends: it waits for its runs")


class _RunProcess(ForkServerProcess):
    """Forked, or begun with a new interpreter where there is nothing to be forked from."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:  # noqa: N802 - it is multiprocessing's
        try:
            return ForkServerProcess._Popen(process)
        except OSError as error:  # no room for a socket, or somebody removed it
            logger.warning("a run can't be forked, and takes seconds longer to begin: %s", error)
            return SpawnProcess._Popen(process)


class _Context(ForkServerContext):
    Process = _RunProcess


def _forks() -> ForkServerContext:
    """What starts processes by forking one that starts with the first of them."""
    context = _Context()
    context.set_forkserver_preload([*_IMPORTED])
    return context


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
