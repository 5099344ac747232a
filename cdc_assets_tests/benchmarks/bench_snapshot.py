"""``python -m cdc_assets_tests.benchmarks.bench_snapshot``: the snapshot against plain COPY.

All eight TPC-H tables are read by turns: by two ``psql`` with binary COPY into nothing, which is as
fast as this Postgres gives rows away; and by the snapshot, pinned and incremental, into Iceberg
tables, with a warm Spark server, while a flusher streams light traffic on one more table. What was
copied is counted in the lake. Prints progress on stderr and one JSON line on stdout; the ratio is
the median of the rounds': the snapshot's time over COPY's. With ``--compare-scales`` it measures a
tenth of the rows as well, and a hundredth, which is hardly more than what a snapshot of eight
tables costs before its first row; it ends with 1 if the two scales' costs of each row beyond that
are far apart.

The databases are kept in ``--cache`` for the next time; everything else is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psycopg
from psycopg import sql
from rich.console import Console

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.operations.copying import snapshot
from cdc_assets.operations.running import Spark, flushing
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import slot_status
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.calibration import Calibration, calibrate
from cdc_assets_tests.benchmarks.copy_out import copy_out
from cdc_assets_tests.benchmarks.tpch import TABLES, Connection, Tpch, prepare
from cdc_assets_tests.benchmarks.watch import Watch
from cdc_assets_tests.benchmarks.workplace import workplace

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

SMALL_SCALE, START_SCALE = 0.1, 0.01
# How far a row's costs at --scale and at SMALL_SCALE may be apart: the copy is linear in its rows.
GROWTH_ALLOWED = 1.3
_PATIENCE_SECONDS = 60
# 200 rows a second, in few transactions: what they cost the server is not what is measured.
_TRAFFIC_RATE, _TRAFFIC_ROWS = 20, 10
_TRAFFIC = f"""
    insert into traffic (note) select repeat('x', 100) from generate_series(1, {_TRAFFIC_ROWS});
"""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How much is read at a time."""

    tables: int
    chunks: int
    readers: int
    """Of COPY."""


@dataclass(frozen=True, slots=True)
class Round:
    """One of each, as measured; CPU of COPY with its backends, of the snapshot its client's."""

    limit_seconds: float
    limit_cpu_us_row: float
    snapshot_seconds: float
    incremental_seconds: float
    ratio: float
    cpu_us_row: float
    flusher_cpu_seconds: float
    peak_rss_mb: float
    max_retained_wal_mb: float
    traffic_rows_s: float


# -- the snapshot


def _config(
    name: str, dsn: str, tables: Sequence[str], parallel: Parallel, strategy: str = "pinned"
) -> SourceConfig:
    """Slot, publication, schema, staging and warehouse are all called after ``name``."""
    settings = {
        "name": name,
        "postgres": {"dsn": dsn},
        "tables": [{"name": f"public.{table}"} for table in (*tables, "traffic")],
        "snapshot": {
            "strategy": strategy,
            "max_parallel_tables": parallel.tables,
            "max_parallel_chunks": parallel.chunks,
        },
        "state": {"schema": name},
    }
    return parse_config(settings, "bench")


@contextmanager
def _traffic(postgres: EmbeddedPostgres, dsn: str) -> Iterator[None]:
    """Inserts into ``traffic`` while it lasts."""
    script = home() / "traffic.sql"
    script.write_text(" ".join(_TRAFFIC.split()))
    environment = {**connection_environment(dsn), "PGOPTIONS": "-c synchronous_commit=off"}
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("drop table if exists traffic")
        connection.execute(
            "create table traffic (id bigint generated always as identity primary key, note text)"
        )
    pgbench = subprocess.Popen(
        [
            str(postgres.program("pgbench")), "--no-vacuum", "--file", str(script),
            "--rate", str(_TRAFFIC_RATE), "--time", "1000000",
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
        if pgbench.poll() is not None:
            raise RuntimeError(f"pgbench ended with {pgbench.returncode}: there was no traffic")
    finally:
        pgbench.terminate()
        pgbench.wait()


def _count(connection: Connection) -> int:
    row = connection.execute("select count(*) from traffic").fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def _flushed(config: SourceConfig, connection: Connection) -> Iterator[None]:
    """A flusher that has begun to stream: its start is not part of what is measured."""
    with flushing(config):
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (slot := slot_status(connection, config.slot)) is None or slot.active_pid is None:
            if time.monotonic() > deadline:
                log = (home() / config.name / "flusher.log").read_text()
                raise RuntimeError(f"the flusher doesn't stream: {log[-2000:]}")
            time.sleep(0.1)
        yield


def _copied(config: SourceConfig, tables: Sequence[str]) -> dict[str, int]:
    """The rows of each lake table, as its metadata has them."""
    catalog = open_catalog(config)
    rows = {}
    for table in tables:
        lake = config.lake_name(TableId("public", table))
        current = catalog.load_table((config.namespace, lake)).current_snapshot()
        summary = current.summary if current is not None else None
        rows[table] = int(summary["total-records"] or 0) if summary is not None else 0
    return rows


def _copy(
    postgres: EmbeddedPostgres, config: SourceConfig, spark: Spark, rows: dict[str, int]
) -> tuple[float, Watch, float]:
    """Snapshot the tables of ``rows``: wall seconds, what was seen, traffic rows a second."""
    assert config.postgres.dsn is not None
    dsn = config.postgres.dsn.get_secret_value()
    tables = [TableId("public", table) for table in rows]
    with psycopg.connect(dsn, autocommit=True) as connection:
        try:
            with (
                _traffic(postgres, dsn),
                _flushed(config, connection),
                Pipeline.open(config) as pipeline,
                Watch(config, dsn) as watch,
            ):
                before, began = _count(connection), time.perf_counter()
                snapshot(pipeline, spark, tables, lambda p: stderr.print(f"  {p.sentence}"))
                wall = time.perf_counter() - began
                traffic = (_count(connection) - before) / wall
            found = _copied(config, list(rows))
            if found != rows:
                raise RuntimeError(f"the lake has other rows than the source: {found}, not {rows}")
        finally:
            _forget_rounds(connection)
            shutil.rmtree(home() / config.name, ignore_errors=True)
    return wall, watch, traffic


def _forget_rounds(connection: Connection) -> None:
    """Drop what rounds left in this database; a slot would keep WAL for ever."""
    slots = (
        "from pg_replication_slots where database = current_database()"
        " and slot_name ~ '^cdc_bench_'"
    )
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while connection.execute(f"select {slots} and active".encode()).fetchall():
        if time.monotonic() > deadline:
            raise RuntimeError("somebody still streams from a slot of this benchmark")
        time.sleep(0.1)
    connection.execute(f"select pg_drop_replication_slot(slot_name) {slots}".encode())
    for statement, names in (
        (
            sql.SQL("drop publication {}"),
            "select pubname from pg_publication where pubname ~ '^cdc_bench_'",
        ),
        (
            sql.SQL("drop schema {} cascade"),
            "select nspname from pg_namespace where nspname ~ '^bench_'",
        ),
    ):
        for (name,) in connection.execute(names.encode()).fetchall():
            connection.execute(statement.format(sql.Identifier(name)))


# -- both, by turns


@contextmanager
def _warm_spark(postgres: EmbeddedPostgres, tpch: Tpch, parallel: Parallel) -> Iterator[None]:
    """While it lasts, there is a Spark server that has copied something already."""
    small = {table: tpch.rows[table] for table in ("region", "nation")}
    config = _config("bench_warm", tpch.dsn, list(small), parallel)
    with Spark(config) as spark:
        stderr.print("starting Spark and warming it up")
        _copy(postgres, config, spark, small)
        yield


def measure(
    postgres: EmbeddedPostgres, tpch: Tpch, rounds: int, parallel: Parallel, by: Calibration
) -> dict[str, object]:
    rows = tpch.total_rows
    load = os.getloadavg()[0]
    stderr.print(f"scale {tpch.scale:g}: {rows:,} rows")
    copy_out(postgres, tpch.dsn, parallel.readers)  # the tables are in memory from now on
    taken = list[Round]()
    for number in range(1, rounds + 1):
        limit, limit_cpu = copy_out(postgres, tpch.dsn, parallel.readers)
        stderr.print(f"round {number}: COPY {limit:.2f} s, {rows / limit:,.0f} rows/s")
        config = _config(f"bench_{number}", tpch.dsn, list(TABLES), parallel)
        # Not as a context: the server stays for the next round.
        wall, watch, traffic = _copy(postgres, config, Spark(config), tpch.rows)
        client = watch.client.cpu_seconds - watch.own_seconds
        stderr.print(
            f"round {number}: snapshot {wall:.2f} s, {rows / wall:,.0f} rows/s,"
            f" {limit / wall:.2f} of COPY's, {client / rows * 1e6:.1f} µs of CPU a row"
        )
        short = _config(f"bench_{number}_short", tpch.dsn, list(TABLES), parallel, "incremental")
        in_parts, _, _ = _copy(postgres, short, Spark(short), tpch.rows)
        stderr.print(f"round {number}: incremental {in_parts:.2f} s, {wall / in_parts:.2f} of it")
        taken.append(
            Round(
                limit_seconds=round(limit, 3),
                limit_cpu_us_row=round(limit_cpu / rows * 1e6, 3),
                snapshot_seconds=round(wall, 3),
                incremental_seconds=round(in_parts, 3),
                ratio=round(limit / wall, 3),
                cpu_us_row=round(client / rows * 1e6, 2),
                flusher_cpu_seconds=round(watch.flusher.cpu_seconds, 2),
                peak_rss_mb=round(watch.client.peak_rss_bytes / 1e6, 1),
                max_retained_wal_mb=round(watch.retained_bytes / 1e6, 1),
                traffic_rows_s=round(traffic, 1),
            )
        )
    limit = statistics.median(r.limit_seconds for r in taken)
    wall = statistics.median(r.snapshot_seconds for r in taken)
    cpu = statistics.median(r.cpu_us_row for r in taken)
    limit_cpu = statistics.median(r.limit_cpu_us_row for r in taken)
    return {
        "scale": tpch.scale,
        "rows": rows,
        "limit_seconds": round(limit, 3),
        "snapshot_seconds": round(wall, 3),
        "limit_rows_s": round(rows / limit),
        "snapshot_rows_s": round(rows / wall),
        "ratio": round(statistics.median(r.ratio for r in taken), 3),
        "incremental_against_pinned": round(
            statistics.median(r.snapshot_seconds / r.incremental_seconds for r in taken), 3
        ),
        "cpu_us_row": round(cpu, 2),
        "limit_cpu_us_row": round(limit_cpu, 2),
        "cpu_against_limit": round(cpu / limit_cpu, 3),
        "calibration": by.shown(cpu_us_row=cpu),
        "peak_rss_mb": max(r.peak_rss_mb for r in taken),
        "max_retained_wal_mb": max(r.max_retained_wal_mb for r in taken),
        "rounds": [asdict(r) for r in taken],
        "parallel": asdict(parallel),
        "cpus": os.cpu_count(),
        "load": round(load, 2),
    }


def _growth(
    large: dict[str, object], small: dict[str, object], start: dict[str, object]
) -> dict[str, object]:
    """A row's costs at two scales, of the rows beyond those of ``start``."""

    def rows(of: dict[str, object]) -> float:
        return float(str(of["rows"]))

    def cpu_seconds(of: dict[str, object]) -> float:
        return float(str(of["cpu_us_row"])) * rows(of) / 1e6

    def cost(of: dict[str, object], key: Callable[[dict[str, object]], float]) -> float:
        return 1e6 * (key(of) - key(start)) / (rows(of) - rows(start))

    def growth(key: Callable[[dict[str, object]], float]) -> float:
        return round(cost(large, key) / cost(small, key), 3)

    cpu = growth(cpu_seconds)
    return {
        "scale": small["scale"],
        "snapshot_rows_s": small["snapshot_rows_s"],
        "cpu_us_row": small["cpu_us_row"],
        "start_seconds": start["snapshot_seconds"],
        "start_cpu_seconds": round(cpu_seconds(start), 2),
        "cpu_us_row_after_start": [round(cost(of, cpu_seconds), 2) for of in (large, small)],
        "cpu_growth": cpu,
        "seconds_growth": growth(lambda of: float(str(of["snapshot_seconds"]))),
        "allowed": GROWTH_ALLOWED,
        "within": 1 / GROWTH_ALLOWED <= cpu <= GROWTH_ALLOWED,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="1 has 8.7 million rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--compare-scales",
        action="store_true",
        help=f"measure the scales {SMALL_SCALE:g} and {START_SCALE:g}, too",
    )
    parser.add_argument("--tables", type=int, default=2, help="snapshot.max_parallel_tables")
    parser.add_argument("--chunks", type=int, default=2, help="snapshot.max_parallel_chunks")
    parser.add_argument("--readers", type=int, default=2, help="parallel COPYs")
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args()
    parallel = Parallel(options.tables, options.chunks, options.readers)
    # The small one last: what a server that has just started costs isn't spread over few rows.
    scales = [options.scale, *([SMALL_SCALE, START_SCALE] if options.compare_scales else ())]
    calibration = calibrate(stderr.print)
    with workplace(options.cache.absolute(), stderr.print) as postgres:
        dsn = postgres.dsn()
        assert dsn is not None
        databases = [prepare(dsn, scale, stderr.print) for scale in scales]
        for database in databases:
            with psycopg.connect(database.dsn, autocommit=True) as connection:
                _forget_rounds(connection)  # of a run that was killed
        with _warm_spark(postgres, databases[0], parallel):
            result, *others = [
                measure(postgres, database, options.rounds, parallel, calibration)
                for database in databases
            ]
    within = True
    if others:
        result["compared"] = growth = _growth(result, *others)
        within = bool(growth["within"])
    print(json.dumps(result))  # noqa: T201
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
