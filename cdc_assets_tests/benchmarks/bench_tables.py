"""``python -m cdc_assets_tests.benchmarks.bench_tables``: a source of hundreds of small tables.

``dagster dev`` with default settings replicates ``--tables`` tables; ``--busy`` of them are changed
in the last phase, by pgbench, at ``--rate`` changes a second in all. This measures what the
definitions cost, how long the first start takes until the stream flows and until all tables are
copied, reported and checked. What the runs over all tables cost that the schedules and the sensor
of checks ask for is measured apart, each once; the schedules are set to hours at which nobody
measures. By then each table has told its first heartbeat, which come by fifty a minute. Then, in a
quiet phase and in a busy one: the processor time of every part as a share of one core, what
Dagster's storage grows by (as if for a day, without skipped ticks, which stay for hours), how long
the sensors' ticks take, how many runs there are, and how old the changes of some of the busy tables
are when a reader sees them.

Prints progress on stderr and one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
from rich.console import Console

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.history import SKIPPED_TICKS
from cdc_assets.dagster.names import all_tables, job_name, run_tags
from cdc_assets.dagster.part import PART_TAG
from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.calibration import calibrate
from cdc_assets_tests.benchmarks.pipeline_meters import (
    Processors,
    Reader,
    dagster_bytes,
    last_ticks,
    looking,
)
from cdc_assets_tests.benchmarks.rounds import launched
from cdc_assets_tests.benchmarks.workplace import fresh_database, served, workplace
from cdc_assets_tests.e2e.dev_server import DevServer, dev_server
from cdc_assets_tests.support.run_process import built_in_a_run

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

DATABASE = "bench_tables"
_ROWS = 100
_DAY_SECONDS = 86_400
# Until all tables are copied.
_PATIENCE_SECONDS = 1800.0
# Busy tables whose freshness is read; whoever sees that one has changed loads its metadata.
_WATCHED = 3
_WATCH_SECONDS = 0.1
# Between two looks at how far the first start is.
_START_SECONDS, _COPY_SECONDS, _SETTLE_SECONDS = 0.3, 2.0, 10.0
# Changes of one transaction, of one table: as many inserts, updates and deletes.
_CHANGES = 9

_SCRIPT = """
\\set table random(0, {last})
\\set at random(1, 1000000000)
begin;
insert into t:table (a, v) select g, md5(g::text) from generate_series(1, 3) g;
update t:table set a = a + 1 where id in (select id from t:table order by id desc limit 3);
delete from t:table where id in (select id from t:table order by id limit 3);
commit;
"""

# In a process of its own, as the code server builds them.
_DEFINITIONS = """
import json, sys, time
from cdc_assets.config.source import parse_config
from cdc_assets.dagster.build import build_defs
config = parse_config(json.loads(sys.stdin.read()), "bench")
began = time.process_time()
definitions = build_defs(config)
built = time.process_time()
definitions.get_repository_def().get_all_jobs()
print(json.dumps([built - began, time.process_time() - began]))
"""

# Once a day or more often, of all tables, though none changed.
_ROUNDS = ("maintain", "sample", "check")
_RUNS = "query ($after: Float!) { runsOrError(filter: {createdAfter: $after}, limit: 1000)"
_RUNS += " { ... on Runs { count } } }"


class Options(argparse.Namespace):
    """The command's options."""

    tables: int
    busy: int
    rate: int
    seconds: float
    cache: Path


@dataclass(frozen=True, slots=True)
class Phase:
    """``cores``: what each part took of one core. Bytes of Dagster's storage, and runs, a day.

    ``cpu_seconds`` and ``storage_bytes``: of the whole phase. ``skipped_ticks_bytes``: of the time
    for which skipped ticks are kept; they aren't in the others. ``warm_p99``: the freshness in the
    second half, when all tables have been merged often.
    """

    seconds: float
    cores: dict[str, float]
    all_cores: float
    resident_mb: dict[str, int]
    storage_bytes_a_day: int
    skipped_ticks_bytes: int
    runs_a_day: int
    merges: int
    slowest_ticks_seconds: dict[str, float]
    cpu_seconds: float
    storage_bytes: int
    freshness_p50: float | None = None
    freshness_p99: float | None = None
    warm_p99: float | None = None


def _source(server_dsn: str, tables: int) -> str:
    dsn = fresh_database(server_dsn, DATABASE)
    with psycopg.connect(dsn, autocommit=True) as source:
        for number in range(tables):
            source.execute(
                f"create table t{number} (id bigint generated always as identity primary key,"
                " a bigint, v text, at timestamptz default now());"
                f" insert into t{number} (a, v) select g, md5(g::text)"
                f" from generate_series(1, {_ROWS}) g".encode()
            )
        source.execute("vacuum analyze")
    return dsn


def _definitions_cost(config: SourceConfig, busy: int) -> dict[str, float]:
    """Seconds of CPU: in the code server, and in a run of the busy tables or of all of them."""
    done = subprocess.run(
        [sys.executable, "-c", _DEFINITIONS],
        input=config.dump(),
        capture_output=True,
        text=True,
        check=True,
    )
    build, whole = json.loads(done.stdout)
    of_all = len(config.tables)
    runs = {"a_run": _a_run(config, busy), "a_run_of_all": _a_run(config, of_all)}
    found = {"build_defs": build, **runs, "all_jobs": whole}
    return {name: round(seconds, 2) for name, seconds in found.items()}


def _a_run(config: SourceConfig, tables: int) -> float:
    """Of a run that merges so many tables, in its own process."""
    job = job_name(config.name, "materialize")
    tags = {**run_tags(config, "materialize"), PART_TAG: "true"}
    with (
        tempfile.TemporaryDirectory() as folder,
        dg.DagsterInstance.local_temp(folder) as instance,
    ):
        asked = frozenset(names.lake for names in all_tables(config)[:tables])
        run = instance.add_run(dg.DagsterRun(job_name=job, tags=tags, asset_selection=asked))
        seconds: float = built_in_a_run(instance, run, [json.loads(config.dump())])["seconds"]
        return seconds


def _first_start(config: SourceConfig, server: DevServer, began: float) -> dict[str, float]:
    """Seconds from ``began`` on until Dagster serves, the flusher streams, all are copied."""
    found, tables, last = dict[str, float](), len(config.tables), -1

    def until(what: str, is_there: Callable[[], Any], every: float) -> None:
        server.until(what, is_there, _PATIENCE_SECONDS, every)
        found[what] = round(time.time() - began, 1)

    def streams() -> bool:
        try:
            with Pipeline.open(config) as pipeline:
                told, _ = pipeline.store.flusher_report() or ({}, None)
        except psycopg.Error:
            return False
        return told.get("state") == "streaming"

    def copied() -> bool:
        nonlocal last
        with Pipeline.open(config) as pipeline:
            done = sum(row.state == "streaming" for row in pipeline.store.tables())
        if done // 50 != last // 50:
            stderr.print(f"  {done} of {tables} tables are copied, {time.time() - began:.0f} s")
        last = done
        return done == tables

    until("served", lambda: server.ask("{ version }"), _START_SECONDS)
    until("streaming", streams, _START_SECONDS)
    until("copied", copied, _COPY_SECONDS)
    stderr.print(f"first start: {found}")
    until("settled", lambda: _is_settled(server), _SETTLE_SECONDS)
    return found


def _merges(server: DevServer) -> int:
    """How many turns of tables the follower has logged; none where runs merge."""
    logs = server.home.glob("*/follower.log")
    return sum(log.read_text().count(" changes merged as ") for log in logs)


def _slowest_ticks(server: DevServer, since: float) -> dict[str, float]:
    found = dict[str, float]()
    for sensor, ticks in last_ticks(server).items():
        took = [
            tick["endTimestamp"] - tick["timestamp"]
            for tick in ticks
            if tick["endTimestamp"] and tick["timestamp"] >= since
        ]
        if took:
            found[sensor] = round(max(took), 2)
    return found


def _is_settled(server: DevServer) -> bool:
    """Whether every table was reported and checked: what is left is the quiet."""
    ticks = last_ticks(server)
    said = [ticks[sensor][0]["skipReason"] or "" for sensor in ("checks_many", "materializer_many")]
    stderr.print(f"  {said}")
    return said[0].startswith("Nothing has changed")


def _ages(readers: Sequence[Reader], since: float, until: float) -> list[float]:
    return sorted(
        age
        for reader in readers
        if reader.steps
        for _, age in reader.freshness(since, min(until, reader.steps[-1][1]))
    )


def _p99(ages: Sequence[float]) -> float | None:
    return round(ages[int(0.99 * (len(ages) - 1))], 2) if ages else None


def _phase(
    server: DevServer,
    seconds: float,
    begin: Callable[[], Callable[[], bool]] | None = None,
    readers: Sequence[Reader] = (),
    name: str = "quiet",
) -> Phase:
    """``begin``: begins something and returns whether it is over; None for a quiet phase."""
    processors = Processors()
    processors.look()
    folder = server.home / "dagster"
    ticks = folder / "schedules"
    storage, ticked = dagster_bytes(folder), dagster_bytes(ticks)
    merges, began = _merges(server), time.time()
    is_over = begin() if begin is not None else None
    while time.time() - began < seconds or not (is_over is None or is_over()):
        time.sleep(1.0)
        processors.look()
    took = time.time() - began
    cores = {part: round(s / took, 3) for part, s in processors.seconds().items()}
    ours = {part: share for part, share in cores.items() if part not in ("pgbench", "postgres")}
    daily = _DAY_SECONDS / took
    runs = server.ask(_RUNS, after=began)["runsOrError"]["count"]
    ages, warm = (_ages(readers, since, began + took) for since in (began, began + took / 2))
    ticked = dagster_bytes(ticks) - ticked
    stored = dagster_bytes(folder) - storage - ticked
    phase = Phase(
        round(took, 1),
        cores,
        round(sum(ours.values()), 3),
        processors.resident_mb(),
        round(stored * daily),
        round(ticked / took * SKIPPED_TICKS.total_seconds()),
        round(runs * daily),
        _merges(server) - merges,
        _slowest_ticks(server, began),
        round(sum(ours.values()) * took, 1),
        stored,
        round(statistics.median(ages), 2) if ages else None,
        _p99(ages),
        _p99(warm),
    )
    stderr.print(f"{name}: {asdict(phase)}")
    return phase


def _begin(postgres: EmbeddedPostgres, dsn: str, options: Options) -> Callable[[], bool]:
    script = home() / "changes.sql"
    script.write_text(_SCRIPT.format(last=options.busy - 1))
    command = [
        str(postgres.program("pgbench")), "--no-vacuum", "--client", "2", "--max-tries", "10",
        "--file", str(script), "--time", str(round(options.seconds)),
        "--rate", f"{options.rate / _CHANGES:g}",
    ]  # fmt: skip
    load = subprocess.Popen(command, env=connection_environment(dsn), stdout=subprocess.DEVNULL)
    return lambda: load.poll() is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=500)
    parser.add_argument("--busy", type=int, default=20)
    parser.add_argument("--rate", type=int, default=1_000, help="changes a second of all of them")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each phase")
    parser.add_argument("--materializer", choices=("follow", "run"), default="follow")
    parser.add_argument("--parallel", type=int, help="lake.max_parallel_tables, if not the default")
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args(namespace=Options())
    calibration = calibrate(stderr.print)
    with workplace(options.cache.absolute(), stderr.print) as postgres:
        server_dsn = postgres.dsn()
        assert server_dsn is not None
        stderr.print(f"making {options.tables} tables")
        dsn = _source(server_dsn, options.tables)
        tables = [{"name": f"public.t{number}"} for number in range(options.tables)]
        settings = {
            "name": "many",
            "postgres": {"dsn": dsn},
            "tables": tables,
            "materializer": options.materializer,
            **{section: {"every": "12h"} for section in ("maintenance", "verify")},
            "lake": {} if options.parallel is None else {"max_parallel_tables": options.parallel},
        }
        config = parse_config(settings, "bench")
        definitions = _definitions_cost(config, options.busy)
        stderr.print(f"definitions: {definitions}")
        folder, began = home() / "dev", time.time()
        with dev_server(folder, "-f", str(served(config))) as server, ExitStack() as watching:
            os.environ["CDC_ASSETS_HOME"] = str(server.home)
            config = parse_config(json.loads(config.dump()), "bench")
            start = _first_start(config, server, began)
            readers = [
                Reader(config, TableId("public", f"t{number}"))
                for number in range(min(_WATCHED, options.busy))
            ]
            rounds = {
                work: _phase(server, 0.0, partial(launched, server, config.name, work), name=work)
                for work in _ROUNDS
            }
            settled = partial(_is_settled, server)
            server.until("the end of the rounds", settled, _PATIENCE_SECONDS, _SETTLE_SECONDS)
            quiet = _phase(server, options.seconds)
            for reader in readers:
                watching.enter_context(looking(reader, _WATCH_SECONDS))
            begin = partial(_begin, postgres, dsn, options)
            busy = _phase(server, options.seconds, begin, readers, "busy")
        shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = {
        "tables": options.tables,
        "busy_tables": options.busy,
        "changes_s": options.rate,
        "definitions_cpu_seconds": definitions,
        "first_start_seconds": start,
        "quiet": asdict(quiet),
        "rounds": {
            work: {"cpu_seconds": phase.cpu_seconds, "storage_bytes": phase.storage_bytes}
            for work, phase in rounds.items()
        },
        "busy": asdict(busy),
        "calibration": calibration.shown(**definitions),
        "cpus": os.cpu_count(),
    }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
