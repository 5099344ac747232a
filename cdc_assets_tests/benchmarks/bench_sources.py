"""``python -m cdc_assets_tests.benchmarks.bench_sources``: many sources in one code location.

``dagster dev`` with default settings replicates ``--sources`` databases of one server, with
``--tables`` small tables each. This measures how long the first start takes until every stream
flows and until all tables are copied, then in a quiet phase the processor time of every part as a
share of one core, and its memory; and it counts the ticks that failed. All slots of a server read
the whole WAL, so each source also has a little of what the others write.

Prints progress on stderr and one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psycopg
from rich.console import Console

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.calibration import calibrate
from cdc_assets_tests.benchmarks.pipeline_meters import Processors, last_ticks
from cdc_assets_tests.benchmarks.workplace import fresh_database, served, workplace
from cdc_assets_tests.e2e.dev_server import DevServer, dev_server

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

_PATIENCE_SECONDS = 1800.0
# After the copies, in which all tables are reported and checked.
_SETTLE_SECONDS = 180.0
_TABLE = """
create table t{0} (id bigint generated always as identity primary key, a bigint, v text);
insert into t{0} (a, v) select g, md5(g::text) from generate_series(1, 100) g;
"""


class Options(argparse.Namespace):
    """The command's options."""

    sources: int
    tables: int
    seconds: float
    cache: Path


def _made(server_dsn: str, options: Options) -> list[SourceConfig]:
    configs = []
    for number in range(options.sources):
        dsn = fresh_database(server_dsn, f"bench_source_{number}")
        with psycopg.connect(dsn) as source:
            for table in range(options.tables):
                source.execute(_TABLE.format(table).encode())
        tables = [{"name": f"public.t{table}"} for table in range(options.tables)]
        settings = {"name": f"s{number}", "postgres": {"dsn": dsn}, "tables": tables}
        configs.append(parse_config(settings, "bench"))
    return configs


def _first_start(
    configs: Sequence[SourceConfig], server: DevServer, began: float
) -> dict[str, float]:
    """Seconds from ``began`` on until every source streams, and until every table is copied."""
    found, last = dict[str, float](), ""

    def copied() -> bool:
        nonlocal last
        streams, states = 0, Counter[str]()
        for config in configs:
            try:
                with Pipeline.open(config) as pipeline:
                    told, _ = pipeline.store.flusher_report() or ({}, None)
                    streams += told.get("state") == "streaming"
                    states.update(row.state for row in pipeline.store.tables())
            except psycopg.Error:
                continue
        if streams == len(configs):
            found.setdefault("streaming", round(time.time() - began, 1))
        done = states["streaming"]
        if (said := f"{streams} sources stream, {done} tables are copied") != last:
            stderr.print(f"  {said}, {time.time() - began:.0f} s")
            last = said
        return done == sum(len(config.tables) for config in configs)

    server.until("the copies", copied, _PATIENCE_SECONDS)
    return {**found, "copied": round(time.time() - began, 1)}


def _failed_ticks(server: DevServer) -> list[str]:
    found = [
        f"{sensor}: {tick['error']['message']}"
        for sensor, ticks in last_ticks(server).items()
        for tick in ticks
        if tick["error"] is not None
    ]
    for said in found:
        stderr.print(f"  {said}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=int, default=20)
    parser.add_argument("--tables", type=int, default=50, help="of each source")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the quiet phase")
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args(namespace=Options())
    calibration = calibrate(stderr.print)
    slots = str(4 * options.sources)  # and temporary ones, for pins
    room = {"max_replication_slots": slots, "max_wal_senders": slots}
    room["max_connections"] = str(100 + 45 * options.sources)
    with workplace(options.cache.absolute(), stderr.print, **room) as postgres:
        server_dsn = postgres.dsn()
        assert server_dsn is not None
        stderr.print(f"making {options.sources} databases of {options.tables} tables")
        configs = _made(server_dsn, options)
        began = time.time()
        with dev_server(home() / "dev", "-f", str(served(*configs))) as server:
            os.environ["CDC_ASSETS_HOME"] = str(server.home)
            configs = [parse_config(json.loads(config.dump()), "bench") for config in configs]
            start = _first_start(configs, server, began)
            stderr.print(f"first start: {start}")
            time.sleep(_SETTLE_SECONDS)
            processors, quiet_since = Processors(), time.time()
            processors.look()
            while (took := time.time() - quiet_since) < options.seconds:
                time.sleep(1.0)
                processors.look()
            cores = {part: round(s / took, 3) for part, s in processors.seconds().items()}
            found = {
                "sources": options.sources,
                "tables": options.tables,
                "first_start_seconds": start,
                "quiet_cores": cores,
                "resident_mb": processors.resident_mb(),
                "failed_ticks": len(_failed_ticks(server)),
                "calibration": calibration.shown(),
                "cpus": os.cpu_count(),
            }
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
