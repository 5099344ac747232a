"""Processor time of groups of processes, and a limit to it, by Linux's control groups.

Whatever a process of a group starts is of the group, and counts after its end, too. Version 2 of
control groups counts; it limits, too, unless this system has given that to version 1. Needs root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cdc_assets_tests.support.waiting import wait_for

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """A group; ``limited`` is where its limit is written."""

    counted: Path
    limited: Path

    def add(self, pids: Iterable[int]) -> None:
        for pid in pids:
            for folder in {self.counted, self.limited}:
                (folder / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float) -> None:
        quota = round(cores * _PERIOD_US)
        if self.counted == self.limited:
            (self.limited / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (self.limited / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self.limited / "cpu.cfs_quota_us").write_text(str(quota))

    @property
    def seconds(self) -> float:
        """User and system time so far."""
        words = (self.counted / "cpu.stat").read_text().split()
        return int(words[words.index("usage_usec") + 1]) / 1e6


@contextmanager
def cpu_group(name: str) -> Iterator[CpuGroup]:
    """An empty group, which is removed when its processes have ended."""
    version_2 = _ROOT if (_ROOT / "cgroup.controllers").exists() else _ROOT / "unified"
    limits = "cpu" in (version_2 / "cgroup.controllers").read_text().split()
    if limits:
        (version_2 / "cgroup.subtree_control").write_text("+cpu")
    group = CpuGroup(version_2 / name, (version_2 if limits else _ROOT / "cpu") / name)
    with ExitStack() as cleanup:
        for folder in {group.counted, group.limited}:
            folder.mkdir()
            cleanup.callback(_remove, folder)
        yield group


def _remove(folder: Path) -> None:
    wait_for(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()
