"""The most memory that a process and its children had, as the kernel noted it (VmHWM).

A sum of peaks counts pages that two processes share twice, and moments that weren't the same: it is
never less than what was in use at any one time.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import psutil

SAMPLE_SECONDS = 0.05


class PeakMemory:
    """Watches the peaks (VmHWM) of a process and its children until it ends."""

    def __init__(self, pid: int) -> None:
        self._peaks: dict[int, int] = {}
        self._over = threading.Event()
        self._root = psutil.Process(pid)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            with suppress(psutil.NoSuchProcess):
                for process in (self._root, *self._root.children(recursive=True)):
                    self._peaks[process.pid] = peak_bytes(process.pid)

    def close(self) -> list[int]:
        """The peaks, in bytes, the process's own first."""
        self._over.set()
        self._thread.join()
        return [*self._peaks.values()]


def peak_bytes(pid: int) -> int:
    """The most memory that the process had at any time; raises psutil.NoSuchProcess."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    raise psutil.NoSuchProcess(pid)  # a zombie has no memory


def begin_anew() -> int:
    """This process's peak begins anew: with what it has now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_bytes(os.getpid())
