"""``python -m cdc_assets_tests.benchmarks.bench_dev``: the demo of ``make dev``, once settled.

Some 400 changes a second on nine tables, with everything that the shipped workspace does beside:
checks, health, a mart. Measured are the processor time of every part, and how old the oldest change
of each staged file was when its table showed it (its flush may have waited for as long as the flush
interval, which is added). ``cores`` is what the platform takes: without the database and those who
buy. With ``--one-core`` all of it has one core. Prints progress on stderr and one JSON line on
stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import psycopg
from rich.console import Console

from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.errors import CdcError
from cdc_assets.lake.state import lake_state
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.benchmarks.calibration import calibrate
from cdc_assets_tests.benchmarks.pipeline_meters import Processors, lake_table
from cdc_assets_tests.e2e.dev_server import ROOT, dev_server
from cdc_assets_tests.support.threads import beside

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 900.0
_LOAD = ("postgres", "customers")

Entry = tuple[TableId, int, int, float]
"""A staged file: its table, the offset behind it, its rows, and when its flush's last committed."""


class _Watch:
    """When each table's lake showed its log up to which offset."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self.steps: dict[TableId, list[tuple[float, int]]] = {t.id: [] for t in config.tables}

    def run(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_SECONDS):
            for table, steps in self.steps.items():
                cursor = lake_state(lake_table(self._config, table)).cursor
                if cursor is not None and (not steps or cursor.offset > steps[-1][1]):
                    steps.append((time.time(), cursor.offset))

    def seen(self, entry: Entry) -> float | None:
        table, end, _, _ = entry
        return next((at for at, offset in self.steps[table] if offset >= end), None)


def _entries(pipeline: Pipeline, began: float, ended: float) -> list[Entry]:
    rows = pipeline.store.connection.execute(
        "select table_name, end_offset, row_count, extract(epoch from commit_time)::float8"
        " from log_index where extract(epoch from commit_time) between %s and %s",
        (began, ended),
    ).fetchall()
    return [(TableId.parse(name), end, count, at) for name, end, count, at in rows]


def _streaming(config: SourceConfig) -> int:
    """How many tables readers can see the rows of."""
    try:
        with Pipeline.open(config) as pipeline:
            return sum(row.state == "streaming" for row in pipeline.store.tables())
    except (CdcError, psycopg.Error):  # it is starting
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="that are measured")
    parser.add_argument("--settle", type=float, default=120.0, help="before, from the copy on")
    parser.add_argument("--one-core", action="store_true")
    options = parser.parse_args()
    if options.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    calibration = calibrate(stderr.print)
    folder = Path(tempfile.mkdtemp(prefix="bench_dev-"))
    folder.chmod(0o755)
    started = time.time()
    try:
        with dev_server(folder) as server:
            os.environ["CDC_ASSETS_HOME"] = str(server.home)
            config = load_config(ROOT / "cdc_assets" / "defs" / "shop" / "defs.yaml")
            stderr.print("dagster dev has been started; waiting for the copies")
            server.until("the first rows", lambda: _streaming(config), _PATIENCE_SECONDS)
            first = time.time() - started
            stderr.print(f"the lake has its first rows after {first:.0f} s")
            every = len(config.tables)
            server.until("the copies", lambda: _streaming(config) == every, _PATIENCE_SECONDS)
            copied = time.time() - started
            stderr.print(f"all tables are copied after {copied:.0f} s; they settle")
            time.sleep(options.settle)
            watch, processors, began = _Watch(config), Processors(), time.time()
            with beside(watch.run), Pipeline.open(config) as pipeline:
                while (left := began + options.seconds - time.time()) > 0:
                    processors.look()
                    time.sleep(min(left, 1.0))
                ended, seconds = time.time(), processors.seconds()
                entries = _entries(pipeline, began, ended)
                deadline = time.time() + _PATIENCE_SECONDS
                while time.time() < deadline and any(watch.seen(e) is None for e in entries):
                    time.sleep(1.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    waited = config.staging.flush_interval_seconds
    ages = sorted(
        (at - entry[3] + waited, entry[2])
        for entry in entries
        if (at := watch.seen(entry)) is not None
    )
    cores = {part: round(s / (ended - began), 3) for part, s in seconds.items()}
    print(  # noqa: T201
        json.dumps(
            {
                "changes_s": round(sum(e[2] for e in entries) / (ended - began)),
                "freshness_p50": _percentile(ages, 0.5),
                "freshness_p99": _percentile(ages, 0.99),
                "cores": round(sum(c for part, c in cores.items() if part not in _LOAD), 3),
                "cores_by_part": cores,
                "first_rows_seconds": round(first, 1),
                "copied_seconds": round(copied, 1),
                "calibration": calibration.shown(),
                "cpus": len(os.sched_getaffinity(0)),
            }
        )
    )


def _percentile(ages: list[tuple[float, int]], share: float) -> float | None:
    """Of all changes: ``ages`` are of files, with their rows, the youngest first."""
    left = share * sum(rows for _, rows in ages)
    for age, rows in ages:
        left -= rows
        if left <= 0:
            return round(age, 2)
    return None


if __name__ == "__main__":
    main()
