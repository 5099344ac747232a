"""Supervised children: processes of ours that can't outlive the process that started them.

Invariant: a child's standard input is a pipe whose write end only its parent holds. However the
parent ends, also by SIGKILL, the kernel closes that end, the child reads end-of-file and stops in
order; after a grace period it exits at once. So there are no pid files to go stale and no orphans.

The pipe also carries one line of settings at the start, because an argument list and an
environment can be read by others, and take 128 kB at most. A child is a session of its own: Ctrl-C
in a terminal reaches the parent only, which decides. Running children are found again by name in
this module's globals, because Dagster rebuilds resources at every tick. Decided elsewhere: what a
child does, and whether it should run.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from cdc_assets.process.backoff import Backoff
from cdc_assets.process.lifeline import GRACE_SECONDS

_log = logging.getLogger(__name__)

# Short, because the time for an orderly stop is over at SIGTERM.
_TERM_SECONDS = 3.0
# Enough of a log's end to hold the last error with its remedy.
_TAIL_LINES = 40


def process_name(pid: int | None = None) -> str:
    """A name for this process, or a child of it, for people who look from elsewhere."""
    return f"process {pid or os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run: ``python -m module arguments…``."""

    module: str
    arguments: tuple[str, ...] = ()
    log: Path = Path(os.devnull)
    """Where stdout and stderr go; kept below ``LOG_LIMIT_BYTES``."""
    settings: str = field(default="", repr=False)
    """One line, as long as it has to be, for the child's stdin (see :func:`read_settings`);
    the place for secrets."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to this process's environment; nothing secret."""


class Child:
    """A running child; made by :meth:`start`."""

    def __init__(self, spec: ChildSpec, process: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self._process = process
        self._writing = threading.Lock()  # held until the settings are sent
        self._asked_to_stop = False
        self.started_at = time.monotonic()
        self._written = (0, self.started_at)  # when its log was, and when that was first seen
        _children.add(self)

    @classmethod
    def start(cls, spec: ChildSpec) -> Child:
        """Start it and return at once; raises OSError if it can't be started."""
        if "\n" in spec.settings:
            raise ValueError("settings have to be one line")
        with _open_log(spec.log) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", spec.module, *spec.arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # unbuffered, or a killed child's last words are lost
                env={**os.environ, **spec.environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        child = cls(spec, process)
        # In a thread: the child is busy importing, and a pipe takes 64 kB.
        child._writing.acquire()
        threading.Thread(target=child._send_settings, name="settings", daemon=True).start()
        return child

    def _send_settings(self) -> None:
        line = memoryview(self.spec.settings.encode() + b"\n")
        try:
            while line:
                line = line[self._pipe.write(line) :]
        except BrokenPipeError:
            pass  # it ended already; its return code will tell
        finally:
            self._writing.release()
        if self._asked_to_stop:
            self.close_stdin()

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal, as in subprocess."""
        return self._process.poll()

    @property
    def silent_seconds(self) -> float:
        """For how long nothing new was seen in its log, by one clock: a volume may have another."""
        with suppress(FileNotFoundError):
            at = self.spec.log.stat().st_mtime_ns
            if at != self._written[0]:
                self._written = (at, time.monotonic())
        return time.monotonic() - self._written[1]

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for its end; the return code, or None if it still runs."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def close_stdin(self) -> None:
        """Ask it to stop, without waiting; it notices once it has read its settings."""
        self._asked_to_stop = True
        if self._writing.acquire(blocking=False):
            self._pipe.close()
            self._writing.release()

    def let_go(self) -> None:
        """Close the pipe in a forked copy of the parent, which doesn't own it."""
        self._pipe.close()

    def stop(self, timeout_seconds: float = GRACE_SECONDS) -> int:
        """Ask, then SIGTERM, then SIGKILL for its whole process group; the return code."""
        self.close_stdin()
        code = self.wait(timeout_seconds)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if code is None:
                _log.warning(
                    "%s (pid %s) did not stop; %s", self.spec.module, self.pid, number.name
                )
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
                code = self.wait(_TERM_SECONDS)
        return code if code is not None else self._process.wait()


_children: weakref.WeakSet[Child] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close the pipes in a forked copy of the parent, which would keep the children alive."""
    for child in list(_children):
        child.let_go()


os.register_at_fork(after_in_child=_close_inherited)


def last_words(log: Path) -> str:
    """The last line of a child's log: why it ended, if it did."""
    try:
        with log.open(errors="replace") as file:
            lines = [line.strip() for line in deque(file, _TAIL_LINES) if line.strip()]
    except FileNotFoundError:
        return "it left no log"
    return lines[-1] if lines else "its log is empty"


def _open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Readable, so that the child can keep its own tail; appending, so that truncation works.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)


@dataclass(frozen=True, slots=True)
class Status:
    """What a supervised child is doing, for a person."""

    running: bool
    pid: int | None
    failures: int
    """Ends in a row without a healthy life between them."""
    last_returncode: int | None
    next_start_in_seconds: float
    """0 while it runs."""
    ended: bool = False
    """Whether it ended by itself since the last one."""
    last_words: str = ""
    """The last line of its log when it ended."""

    @property
    def end(self) -> str | None:
        """How it ended, if that is to be told: by the tick that notices, and while it is down."""
        if self.running and not self.ended:
            return None
        return f"ended with code {self.last_returncode} ({self.failures} times in a row)"

    @property
    def again(self) -> str:
        """When it runs again after an end."""
        if self.running:
            return f"It runs again (pid {self.pid})"
        return f"It is started again in {self.next_start_in_seconds:.0f} s"


class Supervised:
    """A child that is wanted: each tick starts it if it is down and the back-off is over.

    The tick that notices the first end starts it at once: ticks are further apart than the first
    back-off.
    """

    def __init__(self, spec: ChildSpec, backoff: Backoff) -> None:
        self.spec = spec
        self.backoff = backoff
        self.child: Child | None = None
        self._failures = 0
        self._last_returncode: int | None = None
        self._ended_at = 0.0
        self._ended, self._last_words = False, ""

    def tick(self) -> Status:
        """Notice an end, start again when it is time; never waits. Raises OSError."""
        now = time.monotonic()
        if self.child is not None and not self.child.alive:
            self._last_returncode = self.child.returncode
            self._failures = self.backoff.failures(self._failures, now - self.child.started_at)
            self._ended_at, self._ended = now, True
            self._last_words = last_words(self.spec.log)
            _log.warning(
                "%s ended with %s (failure %s in a row); see %s",
                self.spec.module,
                self._last_returncode,
                self._failures,
                self.spec.log,
            )
            self.child = None
        elif self.child is not None and now - self.child.started_at >= self.backoff.healthy_seconds:
            self._failures = 0
        wait = self.backoff.delay_seconds(self._failures) - (now - self._ended_at)
        if self.child is None and (self._failures <= 1 or wait <= 0):
            self.child = Child.start(self.spec)
        running, ended, self._ended = self.child is not None, self._ended, False
        return Status(
            running=running,
            pid=self.child.pid if self.child is not None else None,
            failures=self._failures,
            last_returncode=self._last_returncode,
            next_start_in_seconds=0.0 if running else wait,
            ended=ended,
            last_words=self._last_words,
        )

    def stop(self, timeout_seconds: float = GRACE_SECONDS) -> None:
        if self.child is not None:
            self.child.stop(timeout_seconds)
            self.child = None


# All that outlives a tick of Dagster's: children by name.
_registry: dict[str, Supervised] = {}
_registry_lock = threading.Lock()


def supervise(name: str, spec: ChildSpec, backoff: Backoff | None = None) -> Status:
    """Keep a child of that name running: call it at every tick. Never waits for it to work.

    A changed ``spec`` stops the old child in order, then starts the new one.
    """
    with _registry_lock:
        known = _registry.get(name)
        if known is not None and known.spec != spec:
            known.stop()
            known = None
        if known is None:
            known = _registry[name] = Supervised(spec, backoff or Backoff())
        return known.tick()


def child_of(name: str) -> Child | None:
    """The running child of that name, if this process started one."""
    with _registry_lock:
        known = _registry.get(name)
        return known.child if known is not None else None


def stop(name: str, timeout_seconds: float = GRACE_SECONDS) -> None:
    """Stop and forget the child of that name, if this process started one."""
    with _registry_lock:
        known = _registry.pop(name, None)
    if known is not None:
        known.stop(timeout_seconds)
