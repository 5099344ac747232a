"""``python -m cdc_assets_tests.benchmarks.bench_verify``: comparing the demo's nine tables.

The demo's tables are copied into the lake. Then, round by round, changes are made, and all tables
are compared while a flusher streams, with the changes still to be merged, as the command does it:
with a session of its own on a server that runs. A comparison that isn't equal fails the benchmark.

Prints progress on stderr and one JSON line on stdout. ``seconds`` is the median of the rounds',
``first_seconds`` that of the first one, on a server that has compared nothing yet. CPU is that of
Spark, its Python workers, the flusher and this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.demo.schema import create_demo_schema
from cdc_assets.demo.workload import LiveTraffic
from cdc_assets.flusher.reach import reach
from cdc_assets.operations.copying import snapshot
from cdc_assets.operations.running import Spark, flushing
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets.verify.compare import verify
from cdc_assets_tests.benchmarks.calibration import calibrate, platform_cpu_seconds
from cdc_assets_tests.benchmarks.workplace import forget, fresh_database, workplace

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

_DATABASE = "bench_verify"
_TABLES = [
    *(f"public.pgbench_{name}" for name in ("accounts", "branches", "tellers", "history")),
    *(f"shop.{name}" for name in ("customers", "orders", "order_lines", "empty_table")),
    'shop."Mixed Case.Table"',
]


def prepare(server_dsn: str) -> SourceConfig:
    """A database with the demo's tables, made anew, and its source."""
    dsn = fresh_database(server_dsn, _DATABASE)
    create_demo_schema(dsn)
    return parse_config(
        {
            "name": _DATABASE,
            "postgres": {"dsn": dsn},
            "tables": [{"name": name} for name in _TABLES],
        },
        "bench",
    )


def measure(config: SourceConfig, dsn: str, rounds: int, changes: int) -> list[tuple[float, float]]:
    """Wall and CPU seconds of each round."""
    tables, found = [table.id for table in config.tables], list[tuple[float, float]]()
    with Spark(config) as spark, Pipeline.open(config) as pipeline:
        snapshot(pipeline, spark, tables, lambda p: stderr.print(f"  {p.sentence}"))
        traffic = LiveTraffic(dsn)
        with flushing(config):
            for number in range(1, rounds + 1):
                if changes:
                    traffic.run(changes)
                cpu, began = platform_cpu_seconds(), time.perf_counter()
                with spark.session() as session:
                    compared = verify(
                        pipeline,
                        session,
                        tables,
                        partial(reach, pipeline),
                        lambda said: stderr.print(f"  {said}"),
                    )
                found.append((time.perf_counter() - began, platform_cpu_seconds() - cpu))
                assert all(one.equal for one in compared), compared
                rows = sum(one.source_rows for one in compared)
                stderr.print(
                    f"round {number}: {rows:,} rows in {found[-1][0]:.1f} s,"
                    f" {found[-1][1]:.1f} s of CPU"
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--changes", type=int, default=2_000, help="before each round")
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    calibration = calibrate(stderr.print)
    with workplace(options.cache.absolute(), stderr.print) as postgres:
        server_dsn = postgres.dsn()
        assert server_dsn is not None
        config = prepare(server_dsn)
        try:
            dsn = make_conninfo(server_dsn, dbname=_DATABASE)
            found = measure(config, dsn, options.rounds, options.changes)
        finally:
            with psycopg.connect(server_dsn, autocommit=True) as server:
                forget(server, _DATABASE)
    cpu = statistics.median(taken for _, taken in found)
    print(  # noqa: T201
        json.dumps(
            {
                "seconds": round(statistics.median(taken for taken, _ in found), 2),
                "first_seconds": round(found[0][0], 2),
                "cpu_seconds": round(cpu, 2),
                "calibration": calibration.shown(cpu_seconds=cpu),
                "rounds": options.rounds,
                "changes": options.changes,
                "cpus": os.cpu_count(),
                "load": round(load, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
