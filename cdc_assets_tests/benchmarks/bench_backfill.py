"""``python -m cdc_assets_tests.benchmarks.bench_backfill``: a backfill of a live table.

A table of a million rows is copied, then changed at a steady rate while a flusher stages and a
follower merges. Phases of equal length alternate: without a backfill, and with one after the other
of the whole table. The freshness of what a reader sees is measured in each.

Prints progress on stderr and one JSON line on stdout: the rows that backfills apply a second beside
the copy's (which nothing ran beside), and the p99 of freshness with and without them: medians of
the rounds, and the ratio of each pair's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console

from cdc_assets.backfill.request import request
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.materializer.workers.follower import Listener
from cdc_assets.operations.backfilling import backfill
from cdc_assets.operations.copying import snapshot
from cdc_assets.operations.merging import follow
from cdc_assets.operations.running import Spark, flushing
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.calibration import calibrate
from cdc_assets_tests.benchmarks.pipeline_meters import TABLE, Reader, looking
from cdc_assets_tests.benchmarks.workplace import forget, fresh_database, workplace
from cdc_assets_tests.support.threads import beside

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

_DATABASE = "bench_backfill"
# Of a transaction.
_CHANGES = 50
_SCRIPT = f"""
\\set first random(1, :rows)
update events set a = a + 1, v = md5(a::text) || 'abcdefgh', at = clock_timestamp()
 where id >= :first and id < :first + {_CHANGES};
"""


def prepare(server_dsn: str, rows: int) -> SourceConfig:
    """A database with the table, made anew, and its source."""
    dsn = fresh_database(server_dsn, _DATABASE)
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(
            "create table events (id bigint primary key, a bigint, v text, n numeric(18, 2),"
            " at timestamptz, j jsonb)"
        )
        source.execute(
            "insert into events select g, g, md5(g::text) || 'abcdefgh',"
            " (g * 7.25)::numeric(18, 2), now(), jsonb_build_object('a', g)"
            f" from generate_series(1, {rows}) g".encode()
        )
        source.execute("vacuum analyze events")
    settings = {"name": "bench", "postgres": {"dsn": dsn}, "tables": [str(TABLE)]}
    return parse_config(settings, "bench")


@contextmanager
def changing(postgres: EmbeddedPostgres, dsn: str, rows: int, rate: int) -> Iterator[None]:
    """``rate`` changes a second meanwhile."""
    script = home() / "changes.sql"
    script.write_text(_SCRIPT)
    command = [
        str(postgres.program("pgbench")), "--no-vacuum", "--client", "2", "--time", "86400",
        "--file", str(script), "--rate", f"{rate / _CHANGES:g}", "--define", f"rows={rows}",
    ]  # fmt: skip
    with subprocess.Popen(
        command,
        env=connection_environment(dsn),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as pgbench:
        try:
            yield
            assert pgbench.poll() is None, "pgbench ended by itself"
        finally:
            pgbench.terminate()


def p99(reader: Reader, began: float, ended: float) -> float:
    """Of the freshness of what committed then, once all of that is seen."""
    deadline = time.time() + 300.0
    while reader.steps[-1][1] < ended and time.time() < deadline:
        time.sleep(0.5)
    ages = sorted(age for _, age in reader.freshness(began, ended))
    return ages[min(len(ages) - 1, int(0.99 * len(ages)))]


def measure(
    config: SourceConfig, postgres: EmbeddedPostgres, dsn: str, options: argparse.Namespace
) -> dict[str, object]:
    pairs, rates = list[tuple[float, float]](), list[float]()
    with Spark(config) as spark, Pipeline.open(config) as pipeline:
        with spark.session():  # the server runs before the copy's time begins
            began = time.perf_counter()
            snapshot(pipeline, spark, [TABLE], lambda p: stderr.print(f"  {p.sentence}"))
            copied = options.rows / (time.perf_counter() - began)
        stderr.print(f"copy: {copied:,.0f} rows/s")
        reader, listener = Reader(config), Listener(lambda _: None)
        with (
            flushing(config),
            beside(lambda stop: follow(config, [TABLE], stop, listener, spark.session)),
            looking(reader),
            changing(postgres, dsn, options.rows, options.rate),
            spark.session() as session,
        ):
            time.sleep(options.seconds / 2)  # the first merges compile what later ones use
            for number in range(options.rounds):
                at = time.time()
                time.sleep(options.seconds)
                alone, at = p99(reader, at, time.time()), time.time()
                while time.time() < at + options.seconds:
                    asked = request(pipeline, TABLE).number
                    done = backfill(pipeline, session, asked, lambda _: None)
                    assert done.state == "done" and done.rows_a_second is not None, done
                    rates.append(done.rows_a_second)
                    stderr.print(f"  {done.sentence}")
                beside_it = p99(reader, at, time.time())
                pairs.append((alone, beside_it))
                stderr.print(
                    f"round {number + 1}: freshness p99 {alone:.2f} s alone,"
                    f" {beside_it:.2f} s beside backfills"
                )
    return {
        "copied_rows_s": round(copied),
        "backfilled_rows_s": round(statistics.median(rates)),
        "of_the_copy": round(statistics.median(rates) / copied, 3),
        "p99_alone": round(statistics.median(alone for alone, _ in pairs), 2),
        "p99_beside": round(statistics.median(theirs for _, theirs in pairs), 2),
        "ratio": round(statistics.median(theirs / alone for alone, theirs in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=5_000, help="changes a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase, at least")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    calibration = calibrate(stderr.print)
    with workplace(options.cache.absolute(), stderr.print) as postgres:
        server_dsn = postgres.dsn()
        assert server_dsn is not None
        config = prepare(server_dsn, options.rows)
        try:
            dsn = make_conninfo(server_dsn, dbname=_DATABASE)
            found = measure(config, postgres, dsn, options)
        finally:
            with psycopg.connect(server_dsn, autocommit=True) as server:
                forget(server, _DATABASE)
    print(  # noqa: T201
        json.dumps(
            {
                **found,
                "rows": options.rows,
                "rate": options.rate,
                "rounds": options.rounds,
                "calibration": calibration.shown(),
                "cpus": os.cpu_count(),
                "load": round(load, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
