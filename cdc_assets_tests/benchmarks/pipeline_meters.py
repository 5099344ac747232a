"""What is measured of a running pipeline: how old its lake's rows are, and whose processor time."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pyiceberg.table import Table

from cdc_assets.config.source import SourceConfig
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.catalog.parsed import ParsedOnce
from cdc_assets.lake.state import lake_state
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.e2e.dev_server import DevServer
from cdc_assets_tests.support.threads import beside

TABLE = TableId("public", "events")

# How often a reader looks; what is committed between two looks is seen at the second.
_LOOK_SECONDS = 0.2


def lake_table(config: SourceConfig, table: TableId) -> Table:
    """The lake table as it is now, to any reader."""
    return open_catalog(config).load_table((config.namespace, config.lake_name(table)))


_TICKS = """
query ($selector: RepositorySelector!) {
  sensorsOrError(repositorySelector: $selector) {
    ... on Sensors { results { name sensorState {
      ticks(limit: 200) { timestamp endTimestamp skipReason error { message } }
    } } }
  }
}
"""
_REPOSITORIES = "{ repositoriesOrError { ... on RepositoryConnection { nodes {"
_REPOSITORIES += " name location { name } } } } }"


@dataclass(slots=True)
class Reader:
    """Looks at the lake table as any reader would: when did which commit time become visible?"""

    config: SourceConfig
    table: TableId = TABLE
    steps: list[tuple[float, float]] = field(default_factory=list)
    offset: int = 0
    written_bytes: int = 0
    _snapshots: set[int] = field(default_factory=set)
    _metadata: str = ""

    def look(self) -> None:
        catalog = open_catalog(self.config)
        assert isinstance(catalog, ParsedOnce)
        place = catalog.led_to((self.config.namespace, self.config.lake_name(self.table)))
        if place == self._metadata:
            return
        loaded, self._metadata = lake_table(self.config, self.table), place
        now, state = time.time(), lake_state(loaded)
        for snapshot in loaded.metadata.snapshots:
            if snapshot.snapshot_id not in self._snapshots and snapshot.summary is not None:
                self._snapshots.add(snapshot.snapshot_id)
                self.written_bytes += int(snapshot.summary["added-files-size"] or 0)
        if state.cursor is not None and state.cursor.commit_time is not None:
            self.offset = state.cursor.offset
            seen = state.cursor.commit_time.timestamp()
            if not self.steps or seen > self.steps[-1][1]:
                self.steps.append((now, seen))

    def freshness(self, began: float, ended: float) -> list[tuple[float, float]]:
        """``(commit time, age when seen)`` ten times a second, without what wasn't seen."""
        found, steps = [], iter(self.steps)
        step = next(steps, None)
        at = began
        while at < ended and step is not None:
            if step[1] < at:
                step = next(steps, None)
                continue
            found.append((at, step[0] - at))
            at += 0.1
        return found


@contextmanager
def looking(reader: Reader, every_seconds: float = _LOOK_SECONDS) -> Iterator[None]:
    def run(over: threading.Event) -> None:
        while not over.wait(every_seconds):
            reader.look()

    with beside(run):
        yield


def _part(command: Sequence[str]) -> str:
    """Which part of the whole a process is."""
    line = " ".join(command)
    for word, part in (
        ("flusher", "flusher"),
        ("python_daemon", "spark_python"),
        ("java", "spark"),
        ("spark.server", "spark"),
        ("cdc_assets.demo", "customers"),
        ("pgbench", "pgbench"),
        ("postgres", "postgres"),
        ("dagster", "dagster"),
        ("multiprocessing", "dagster"),
    ):
        if word in line:
            return part
    return "other"


class Processors:
    """Processor seconds by part, of this process's descendants and of the database's."""

    def __init__(self) -> None:
        self._first: dict[psutil.Process, float] = {}
        self._last: dict[psutil.Process, float] = {}
        self._parts: dict[psutil.Process, str] = {}

    def look(self) -> None:
        first = not self._last
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._parts[process] = (
                    _part(process.cmdline()) if process not in self._parts else self._parts[process]
                )
                self._last[process] = times.user + times.system
        if first:
            self._first = dict(self._last)

    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for process, last in self._last.items():
            part = self._parts[process]
            found[part] = found.get(part, 0.0) + last - self._first.get(process, 0.0)
        return found

    def resident_mb(self) -> dict[str, int]:
        """The memory of each part's processes as of now; what they share counts for each."""
        found: dict[str, float] = {}
        for process, part in self._parts.items():
            with suppress(psutil.Error):
                found[part] = found.get(part, 0.0) + process.memory_info().rss / 1e6
        return {part: round(mb) for part, mb in found.items()}


def dagster_bytes(folder: Path) -> int:
    """Of Dagster's own storage: runs, events, ticks. Of a database, the pages that are in use."""
    return sum(
        _used_bytes(file) if file.suffix == ".db" else file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file() and not file.name.endswith(("-wal", "-shm"))
    )


def _used_bytes(database: Path) -> int:
    """What is in a file of SQLite and its log: both are filled again, and as large as they were."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        [pages], [free], [size] = (
            connection.execute(f"pragma {name}").fetchone()
            for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


def last_ticks(server: DevServer) -> dict[str, list[dict[str, Any]]]:
    """The last ticks of each sensor, the newest first."""
    found = dict[str, list[dict[str, Any]]]()
    for node in server.ask(_REPOSITORIES)["repositoriesOrError"]["nodes"]:
        selector = {
            "repositoryName": node["name"],
            "repositoryLocationName": node["location"]["name"],
        }
        for sensor in server.ask(_TICKS, selector=selector)["sensorsOrError"]["results"]:
            found[sensor["name"]] = sensor["sensorState"]["ticks"]
    return found
