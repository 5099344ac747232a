"""What a snapshot's client uses, and what its slot keeps, seen from outside.

Spark's Python workers are children of a daemon that doesn't wait for them, so the kernel adds the
time of one that ended to nobody's: each process is looked at now and then, and what was last seen
of it counts. What a process uses after the last look, and one that lives between two, is missed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil
import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.postgres.slots import slot_status

# A look takes 6 ms of CPU.
_SAMPLE_SECONDS = 0.5


class Usage:
    """CPU seconds since the first sample, and the most memory that was in use at one moment."""

    def __init__(self) -> None:
        self.peak_rss_bytes = 0
        """Shared pages count for every process that has them."""
        self._first: dict[psutil.Process, float] | None = None
        self._last: dict[psutil.Process, float] = {}

    @property
    def cpu_seconds(self) -> float:
        """User and system time; of a process that came later, all of it."""
        return sum(self._last.values()) - sum((self._first or {}).values())

    def sample(self, processes: Iterable[psutil.Process]) -> None:
        rss_bytes = 0
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._last[process] = times.user + times.system
                rss_bytes += process.memory_info().rss
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes)
        if self._first is None:
            self._first = dict(self._last)


def _family(root: psutil.Process) -> list[psutil.Process]:
    """``root`` and its descendants, as far as they live."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process, word: str) -> bool:
    """Whether an argument of its command line is ``word``, or a path that ends with it."""
    try:
        return any(argument.rpartition("/")[2] == word for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


class Watch:
    """Samples, while the snapshot runs, what its client and the flusher use and the slot keeps.

    The client is this process (without the thread that samples), the Spark server with its Python
    workers, and whatever else the snapshot starts; the databases and the traffic are not.
    """

    def __init__(self, config: SourceConfig, dsn: str) -> None:
        self.client, self.flusher = Usage(), Usage()
        self.retained_bytes = 0
        self.own_seconds = 0.0
        self._slot = config.slot
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._over = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def _run(self) -> None:
        began = time.thread_time()
        while not self._over.wait(_SAMPLE_SECONDS):
            self._sample()
        self._sample()
        self.own_seconds = time.thread_time() - began

    def _sample(self) -> None:
        me = psutil.Process()
        client, flusher = [me], list[psutil.Process]()
        for child in me.children():
            if _runs(child, "cdc_assets.flusher.flusher"):
                flusher += _family(child)
            elif not _runs(child, "cdc_assets.embedded.guard") and not _runs(child, "pgbench"):
                client += _family(child)
        self.client.sample(client)
        self.flusher.sample(flusher)
        slot = slot_status(self._connection, self._slot)
        if slot is not None:
            self.retained_bytes = max(self.retained_bytes, slot.retained_bytes)

    def __enter__(self) -> Self:
        self._sample()
        self._running = self._thread.submit(self._run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        with self._connection, self._thread:
            self._running.result()
