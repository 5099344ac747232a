"""How fast a Postgres gives its rows away: parallel binary COPY of all TPC-H tables into nothing.

The tables are cut by pages into units that the readers take from one queue, so that all of them
are busy to the end.
"""

from __future__ import annotations

import queue
import resource
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg

from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.postgres.ctid import plan_chunks
from cdc_assets_tests.benchmarks.calibration import END_SECONDS, server_cpu_seconds
from cdc_assets_tests.benchmarks.tpch import TABLES, Connection

# A unit is at most this part of the largest table.
_UNITS = 16


def _units(connection: Connection) -> list[str]:
    """COPY statements that together read every row once, the largest tables first."""
    pages: dict[str, int] = dict(
        connection.execute(
            "select relname, pg_relation_size(oid) / current_setting('block_size')::int"
            " from pg_class where relnamespace = 'public'::regnamespace and relname = any(%s)",
            (list(TABLES),),
        ).fetchall()
    )
    step = max(1, max(pages.values()) // _UNITS)
    return [
        f"copy (select * from {table} where {part.predicate}) to stdout (format binary)"
        for table in sorted(pages, key=pages.__getitem__, reverse=True)
        for part in plan_chunks(pages[table], step)
    ]


def _read(postgres: EmbeddedPostgres, dsn: str, units: queue.SimpleQueue[str]) -> None:
    """Take units and give each to one and the same psql until none is left."""
    psql = subprocess.Popen(
        [str(postgres.program("psql")), "-X", "-q", "-v", "ON_ERROR_STOP=1"],
        env=connection_environment(dsn),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with psql:
        assert psql.stdin is not None and psql.stderr is not None
        while True:
            try:
                unit = units.get_nowait()
            except queue.Empty:
                break
            psql.stdin.write(f"{unit};\n\\warn read\n")
            psql.stdin.flush()
            if (said := psql.stderr.readline()) != "read\n":
                raise RuntimeError(f"psql: {said.strip()}")
        psql.stdin.close()


def copy_out(postgres: EmbeddedPostgres, dsn: str, readers: int) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of psql and its backends, for reading all into nothing."""
    units: queue.SimpleQueue[str] = queue.SimpleQueue()
    with psycopg.connect(dsn) as connection:
        for unit in _units(connection):
            units.put(unit)
    before, server = resource.getrusage(resource.RUSAGE_CHILDREN), server_cpu_seconds()
    began = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        done = [pool.submit(_read, postgres, dsn, units) for _ in range(readers)]
    wall = time.perf_counter() - began
    for reader in done:
        reader.result()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    psql = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    time.sleep(END_SECONDS)
    return wall, psql + server_cpu_seconds() - server
