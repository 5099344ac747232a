"""``python -m cdc_assets_tests.benchmarks.bench_pipeline``: everything at once, on one machine.

A source under mixed changes (60 % inserts, 30 % updates, 10 % deletes, by pgbench) is replicated by
``dagster dev`` with default settings (but ``--target``): source, flusher, Spark and Dagster share
the processors. At each rate, then as fast as it goes, this measures how old a change is when a
reader of the Iceberg table sees it, what is applied a second, and the processor time of every part.
Then it looks for the highest rate that is sustained: the lag in the last third of a phase isn't
longer than in its second; ``--search 0`` leaves both out. At the end the table is scanned, before
and after its maintenance, and a freshly written copy of it.

Prints progress on stderr and one JSON line on stdout. Freshness is sampled evenly over the time in
which changes were committed. The clock starts once a first change has come through: what starting
up takes isn't measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.maintenance.run import Maintained
from cdc_assets.operations.running import Spark
from cdc_assets.operations.whole import maintain
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.calibration import calibrate
from cdc_assets_tests.benchmarks.pipeline_meters import TABLE, Processors, Reader, looking
from cdc_assets_tests.benchmarks.workplace import fresh_database, served, workplace
from cdc_assets_tests.e2e.dev_server import DevServer, dev_server

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

DATABASE = "bench_pipeline"

_START_ROWS = 1_000_000

_PATIENCE_SECONDS = 300.0

_SCANS = 3

# How far the next rate is from one that was, or wasn't, sustained.
_STEP = 0.15

# Of the changes that are made in a phase; what was made in its last seconds is still under way.
_KEEPS_UP = 0.9

# Of a hundred changes of a transaction; one of ten has a tenth of each.
_MIX = {"insert": 60, "update": 30, "delete": 10}

_SCRIPT = """
\\set at random(1, 1000000000)
begin;
insert into events (a, v, n, at, j)
  select g, md5(g::text) || 'abcdefgh', (g * 7.25)::numeric(18, 2), clock_timestamp(),
    jsonb_build_object('a', g, 'b', left(md5((g + 1)::text), 20))
  from generate_series(:at, :at + {insert} - 1) g;
select (last_value * (:at / 1000000000.0))::bigint as changed,
  (last_value * (1 - :at / 1000000000.0))::bigint as gone from events_id_seq \\gset
update events set a = a + 1, v = md5(a::text) || 'abcdefgh'
  where id >= :changed and id < :changed + {update};
delete from events where id >= :gone and id < :gone + {delete};
commit;
"""


class Options(argparse.Namespace):
    """The command's options."""

    rates: Sequence[int]
    search: int
    seconds: float
    target: float | None
    materializer: str
    cache: Path


@dataclass(frozen=True, slots=True)
class Phase:
    """One rate. Seconds, changes, bytes; percentiles of the freshness of what was seen in time."""

    asked_changes_s: int | None
    seconds: float
    made_changes_s: int
    applied_changes_s: int
    freshness_p50: float
    freshness_p95: float
    freshness_p99: float
    sustained: bool
    staged_bytes_a_change: float
    written_bytes_a_change: float
    cpu_seconds_a_million: dict[str, float]


def _source(postgres: EmbeddedPostgres, server_dsn: str) -> str:
    dsn = fresh_database(server_dsn, DATABASE)
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute(
            "create table events (id bigint generated always as identity primary key, a bigint,"
            " v text, n numeric(18, 2), at timestamptz, j jsonb)"
        )
        source.execute(
            "insert into events (a, v, n, at, j) select g, md5(g::text) || 'abcdefgh',"
            " (g * 7.25)::numeric(18, 2), now(), jsonb_build_object('a', g)"
            f" from generate_series(1, {_START_ROWS}) g".encode()
        )
        source.execute("vacuum analyze events")
    return dsn


def _config(dsn: str, options: Options) -> SourceConfig:
    table: dict[str, object] = {"name": str(TABLE)}
    settings: dict[str, object] = {
        "name": "bench",
        "postgres": {"dsn": dsn},
        "tables": [table],
        "materializer": options.materializer,
    }
    if options.target is not None:
        table["freshness"] = {"target": f"{options.target:g}s"}
    return parse_config(settings, "bench")


def _made(source: psycopg.Connection[Any]) -> int:
    """Changes that committed so far, as the log will have them."""
    row = source.execute(
        "select n_tup_ins + n_tup_upd + n_tup_del from pg_stat_user_tables"
        " where relid = 'events'::regclass"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _staged(source: psycopg.Connection[Any]) -> int:
    row = source.execute("select coalesce(sum(byte_size), 0) from _pg2iceberg.log_index").fetchone()
    assert row is not None
    return int(row[0])


def _phase(
    postgres: EmbeddedPostgres,
    dsn: str,
    reader: Reader,
    rate: int | None,
    seconds: float,
) -> Phase:
    size = 10 if rate is not None and rate <= 10_000 else 100
    script = home() / "changes.sql"
    script.write_text(_SCRIPT.format(**{k: v * size // 100 for k, v in _MIX.items()}))
    command = [
        str(postgres.program("pgbench")), "--no-vacuum", "--client", "2", "--max-tries", "10",
        "--file", str(script),
        "--time", str(round(seconds)), *(("--rate", f"{rate / size:g}") if rate else ()),
    ]  # fmt: skip
    processors = Processors()
    with (
        psycopg.connect(dsn, autocommit=True) as source,
        tempfile.TemporaryFile("w+") as errors,
    ):
        made, staged = _made(source), _staged(source)
        written, applied = reader.written_bytes, reader.offset
        began = time.time()
        pgbench = subprocess.Popen(
            command,
            env=connection_environment(dsn),
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        while pgbench.poll() is None:
            processors.look()
            time.sleep(1.0)
        ended, last_applied = time.time(), reader.offset
        if pgbench.returncode:
            errors.seek(0)
            raise RuntimeError(f"pgbench ended with {pgbench.returncode}: {errors.read()}")
        time.sleep(1.5)  # the statistics of the last transactions
        changes = max(1, _made(source) - made)
        # Until all of it is visible: what waits at the end is the oldest, and counts.
        deadline = time.time() + _PATIENCE_SECONDS
        while time.time() < deadline and (not reader.steps or reader.steps[-1][1] < ended - 1.0):
            processors.look()
            time.sleep(0.5)
        staged_bytes, written_bytes = _staged(source) - staged, reader.written_bytes - written
    ages = reader.freshness(began, min(ended, reader.steps[-1][1]))
    values = sorted(age for _, age in ages)
    third = (ended - began) / 3
    second = [age for at, age in ages if began + third <= at < began + 2 * third]
    last = [age for at, age in ages if at >= began + 2 * third]

    def percentile(share: float) -> float:
        return round(values[min(len(values) - 1, int(share * len(values)))], 2)

    phase = Phase(
        rate,
        round(ended - began, 1),
        round(changes / (ended - began)),
        round((last_applied - applied) / (ended - began)),
        percentile(0.5),
        percentile(0.95),
        percentile(0.99),
        statistics.median(last) <= 1.25 * statistics.median(second) + 1.0
        and last_applied - applied >= _KEEPS_UP * changes,
        round(staged_bytes / changes, 1),
        round(written_bytes / changes, 1),
        {part: round(s / changes * 1e6, 1) for part, s in processors.seconds().items()},
    )
    stderr.print(f"{rate or 'as fast as it goes'}: {asdict(phase)}")
    return phase


def _scans(config: SourceConfig) -> dict[str, object]:
    """Seconds to read every column of the table and of a copy written in one go, in turns.

    As the merges left the table, and once maintenance has been at it.
    """
    name = f"{CATALOG}.{ticked(config.namespace)}.{ticked(config.lake_name(TABLE))}"
    copy = f"{CATALOG}.{ticked(config.namespace)}.fresh"

    with Pipeline.open(config) as pipeline, Spark(config) as spark, spark.session() as session:

        def scan(table: str) -> float:
            began = time.perf_counter()
            session.sql(f"select sum(hash(*)) from {table}").collect()
            return time.perf_counter() - began

        def compared() -> dict[str, object]:
            session.sql(f"create or replace table {copy} using iceberg as select * from {name}")
            taken = [(scan(name), scan(copy)) for _ in range(_SCANS + 1)][1:]
            files = session.sql(f"select count(*) from {name}.files").collect()[0][0]
            session.sql(f"drop table {copy} purge")
            return {
                "files": int(files),
                "seconds": round(statistics.median(a for a, _ in taken), 3),
                "fresh_seconds": round(statistics.median(b for _, b in taken), 3),
                "ratio": round(statistics.median(a / b for a, b in taken), 3),
            }

        before, maintained = compared(), list[Maintained]()
        maintain(pipeline, spark, [TABLE], maintained.append)
        after = compared()
    seconds = {"maintenance_seconds": round(maintained[0].seconds, 1)}
    found = {"before": before, "after": after, **seconds}
    stderr.print(f"scans: {found}")
    return found


def _search(
    postgres: EmbeddedPostgres, dsn: str, reader: Reader, fastest: Phase, options: Options
) -> list[Phase]:
    """Phases around what came through as fast as it goes: up from a rate that was sustained."""
    found: list[Phase] = []
    rate: float = fastest.made_changes_s if fastest.sustained else fastest.applied_changes_s
    for _ in range(options.search):
        found.append(_phase(postgres, dsn, reader, round(rate), options.seconds))
        rate *= 1 + _STEP if found[-1].sustained else 1 - _STEP
    return found


def _copied(config: SourceConfig, server: DevServer) -> None:
    def done() -> bool:
        with Pipeline.open(config) as pipeline:
            row = pipeline.store.table(TABLE)
            return row is not None and row.state == "streaming"

    server.until("the copy", lambda: _quiet(done), _PATIENCE_SECONDS)


def _quiet(look: Any) -> bool:
    """False while the databases aren't ready to be asked."""
    try:
        return bool(look())
    except psycopg.Error:
        return False


def _came_through(dsn: str, reader: Reader, server: DevServer) -> None:
    """One change, and wait until the table shows it: whatever has to start has started."""
    began = time.time()
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute("update events set a = a + 1 where id = 1")
    server.until(
        "the first change",
        lambda: bool(reader.steps) and reader.steps[-1][1] >= began,
        _PATIENCE_SECONDS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--search", type=int, default=2, help="phases that look for a limit")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each phase")
    parser.add_argument("--target", type=float, help="seconds; freshness.target's default is 5")
    parser.add_argument("--materializer", choices=("follow", "run"), default="follow")
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args(namespace=Options())
    load = os.getloadavg()[0]
    calibration = calibrate(stderr.print)
    with workplace(options.cache.absolute(), stderr.print) as postgres:
        server_dsn = postgres.dsn()
        assert server_dsn is not None
        dsn = _source(postgres, server_dsn)
        config = _config(dsn, options)
        definitions = served(config)
        folder = home() / "dev"
        with dev_server(folder, "-f", str(definitions)) as server:
            os.environ["CDC_ASSETS_HOME"] = str(server.home)
            config = parse_config(json.loads(config.dump()), "bench")
            stderr.print("dagster dev has been started; waiting for the copy")
            _copied(config, server)
            reader = Reader(config)
            with looking(reader):
                _came_through(dsn, reader, server)
                phases = [
                    _phase(postgres, dsn, reader, rate, options.seconds)
                    for rate in [*options.rates, *([None] if options.search else [])]
                ]
                phases += _search(postgres, dsn, reader, phases[-1], options)
            scans = _scans(config)
        shutil.rmtree(folder, ignore_errors=True)
    sustained = [phase.made_changes_s for phase in phases if phase.sustained]
    print(  # noqa: T201
        json.dumps(
            {
                "freshness_target": config.tables[0].freshness.target.total_seconds(),
                "sustained_changes_s": max(sustained, default=None),
                "phases": [asdict(phase) for phase in phases],
                "calibration": [
                    calibration.shown(**phase.cpu_seconds_a_million) for phase in phases
                ],
                "scans": scans,
                "cpus": os.cpu_count(),
                "load": round(load, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
