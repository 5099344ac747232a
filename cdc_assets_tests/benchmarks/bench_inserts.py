"""``python -m cdc_assets_tests.benchmarks.bench_inserts``: a backlog of inserts until it is seen.

A million rows are inserted into a table that the lake follows, in transactions of 1,000, while
nobody streams. Then the clock starts: a flusher stages what waits in the slot, and the log is
merged beside it, as in use, until the lake has every row. The Spark server is warm. Before that,
``pg_recvlogical`` reads a copy of the slot into a file: ``against_pg_recvlogical`` is its time over
ours (medians). Prints progress on stderr and one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import psycopg
from rich.console import Console

from cdc_assets.config.source import parse_config
from cdc_assets.flusher.flusher import run
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import snapshot
from cdc_assets.operations.running import Spark, flushing
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.calibration import calibrate, platform_cpu_seconds
from cdc_assets_tests.benchmarks.items import ROW, prepare
from cdc_assets_tests.benchmarks.recvlogical import recvlogical
from cdc_assets_tests.benchmarks.workplace import forget, workplace

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

_TABLE = TableId("public", "items")
_START_ROWS = 100_000
_TRANSACTION_ROWS = 1_000
# Merges before those that are measured: a server's first ones take three times as long.
_WARMING = 4

_INSERT = f"""
    do $$ begin
        for number in 0 .. {{rows}} / {_TRANSACTION_ROWS} - 1 loop
            insert into items select g, {ROW} from generate_series(
                {{first}} + number * {_TRANSACTION_ROWS},
                {{first}} + (number + 1) * {_TRANSACTION_ROWS} - 1) g;
            commit;
        end loop;
    end $$
"""


def _insert(source: psycopg.Connection[tuple[object, ...]], rows: int) -> None:
    found = source.execute("select max(id) + 1 from items").fetchone()
    assert found is not None
    source.execute(_INSERT.format(first=found[0], rows=rows).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args()
    calibration = calibrate(stderr.print)
    ours, theirs, cpus = list[float](), list[float](), list[float]()
    with workplace(options.cache.absolute(), stderr.print) as postgres:
        server_dsn = postgres.dsn()
        assert server_dsn is not None
        dsn = prepare(server_dsn, _START_ROWS, stderr.print)
        settings = {"postgres": {"dsn": dsn}, "tables": [{"name": str(_TABLE)}]}
        config = parse_config({"name": "bench_inserts", **settings}, "bench")
        with (
            Spark(config) as spark,
            Pipeline.open(config) as pipeline,
            psycopg.connect(dsn, autocommit=True) as source,
        ):
            snapshot(pipeline, spark, [_TABLE], lambda p: stderr.print(f"  {p.sentence}"))
            with spark.session() as session:
                for _ in range(_WARMING):
                    _insert(source, 20_000)
                    run(config, until=current_lsn(source))
                    drain(pipeline, session, _TABLE)
                for number in range(options.rounds):
                    _insert(source, options.rows)
                    until = current_lsn(source)
                    source.execute(
                        "select pg_copy_logical_replication_slot(%s, %s)", (config.slot, "theirs")
                    )
                    program = str(postgres.program("pg_recvlogical"))
                    read, _ = recvlogical(
                        program, dsn, "theirs", until, home() / "received", config.publication
                    )
                    source.execute("select pg_drop_replication_slot('theirs')")
                    theirs.append(read)
                    cpu, began, applied = platform_cpu_seconds(), time.perf_counter(), 0
                    with flushing(config):
                        while applied < options.rows:
                            done = drain(pipeline, session, _TABLE)
                            applied += done.changes if done is not None else 0
                            if done is None or not done.changes:
                                time.sleep(0.1)
                        ours.append(time.perf_counter() - began)
                        cpus.append(platform_cpu_seconds() - cpu)
                    stderr.print(
                        f"round {number + 1}: {options.rows / ours[-1]:,.0f} inserts/s,"
                        f" {1e6 * cpus[-1] / options.rows:.1f} µs of CPU each;"
                        f" pg_recvlogical {options.rows / theirs[-1]:,.0f}/s"
                    )
        with psycopg.connect(server_dsn, autocommit=True) as server:
            forget(server, f"bench_items_{_START_ROWS}")
    seconds, cpu = statistics.median(ours), 1e6 * statistics.median(cpus) / options.rows
    print(  # noqa: T201
        json.dumps(
            {
                "rows": options.rows,
                "seconds": [round(s, 2) for s in ours],
                "inserts_s": round(options.rows / seconds),
                "against_pg_recvlogical": round(statistics.median(theirs) / seconds, 3),
                "cpu_us_row": round(cpu, 2),
                "calibration": calibration.shown(cpu_us_row=cpu),
                "rounds": options.rounds,
                "cpus": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
