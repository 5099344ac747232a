"""``python -m cdc_assets_tests.benchmarks.year``: a year of a source, a day at a time, compressed.

Real changes, flushes, merges and maintenance; what is kept for days or hours is kept for as many of
these days. Each day the tables are changed by about the same number of rows, of which there are
always about as many; the flusher is started anew; everything is merged, in ``--rounds`` merges of
the busiest table; and the maintenance job of Dagster runs, which removes Dagster's history, too.
Now and then the columns of a table change, a table is copied anew, one comes or goes, and the Spark
server is restarted. At the end every table is compared with its source.

What may grow is measured each day, or every ``--heap`` days where that is dear. ``growth`` is the
most in the last quarter over the most in the second: 1 is what it should be. Prints progress on
stderr and one JSON line on stdout; ``--svg`` draws the curves into a file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import psycopg
from pyspark.sql import SparkSession
from rich.console import Console

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.assets.maintenance import prune_source
from cdc_assets.dagster.assets.reports import Reports
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import all_tables, run_tags
from cdc_assets.flusher.flusher import run
from cdc_assets.log.staged.storage import Storage
from cdc_assets.maintenance.files import stored
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import resync, snapshot
from cdc_assets.operations.running import Spark
from cdc_assets.operations.whole import maintain, verify_tables
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.pipeline_meters import dagster_bytes
from cdc_assets_tests.benchmarks.workplace import forget, fresh_database, workplace
from cdc_assets_tests.support.jvm import histogram

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

DATABASE = "bench_year"
ORDERS, DOCUMENTS, EVENTS, SELDOM, VISITOR = (
    TableId("public", name) for name in ("orders", "documents", "events", "seldom", "visitor")
)
_SETUP = """
create table orders (id bigint generated always as identity primary key, n int, v text);
create table documents (id int primary key, n int, body text);
create table events (id bigint generated always as identity primary key, at date, v text);
create table seldom (id int primary key, n int);
insert into orders (n, v) select i, md5(i::text) from generate_series(1, 5000) i;
insert into documents select i, 0, repeat(md5(i::text), 200) from generate_series(1, 200) i;
alter table documents alter body set storage external;
insert into events (at, v) select date '2026-01-01' - i / 100, md5(i::text)
  from generate_series(1, 3000) i;
insert into seldom select i, i from generate_series(1, 100) i;
"""
# A part of the day's changes of ORDERS; the day's of all others.
_ROUND = """
update orders set n = n + 1, v = md5(random()::text)
 where id in (select id from orders order by random() limit 200);
insert into orders (n, v) select i, md5(random()::text) from generate_series(1, 50) i;
delete from orders where id in (select id from orders order by id limit 50);
"""
_DAY = """
update documents set n = n + 1 where id % 20 = {day} % 20;
update documents set body = repeat(md5(random()::text), 200) where id = {day} % 200 + 1;
insert into events (at, v) select date '2026-01-01' + {day}, md5(random()::text)
  from generate_series(1, 100) i;
delete from events where at < date '2026-01-01' + {day} - 30;
"""

# What is kept for hours, or for some days, in use; Dagster's history is kept for so many days.
_KEPT_DAYS = 7
_MAINTENANCE = {
    "keep_snapshots": {"count": 5, "age": "0s"},
    "staged_grace": "0s",
    "keep_history": "7d",
}

_QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}


class Year:
    """The source and everything that keeps its lake; ``day`` is the one that it lives through."""

    def __init__(self, dsn: str, instance: dg.DagsterInstance, options: argparse.Namespace) -> None:
        self.day = 0
        self._dsn, self._instance, self._options = dsn, instance, options
        self._source = psycopg.connect(dsn, autocommit=True)
        self._has_visitor = False
        self._began = list[float]()
        self._open()
        with Pipeline.open(self._config) as pipeline:
            snapshot(pipeline, self._spark, self._tables, lambda _: None)

    def _open(self) -> None:
        """With the tables of now."""
        self._tables = [ORDERS, DOCUMENTS, EVENTS, SELDOM, *([VISITOR] * self._has_visitor)]
        tables: list[dict[str, Any]] = [{"name": str(table)} for table in self._tables]
        tables[2]["partition_by"] = ["month(at)"]
        settings = {
            "name": "year",
            "postgres": {"dsn": self._dsn},
            "tables": tables,
            "maintenance": _MAINTENANCE,
        }
        self._config = parse_config(settings, "year")
        self._spark = Spark(self._config)
        self._names = all_tables(self._config)
        self._job = build_defs(self._config).resolve_job_def("maintain_year_tables")

    def live(self) -> None:
        """One day."""
        self._began.append(time.time())
        with ExitStack() as cleanup:
            pipeline = cleanup.enter_context(Pipeline.open(self._config))
            session = cleanup.enter_context(self._spark.session())
            log = self._instance.report_runless_asset_event
            reports = Reports(self._config, pipeline.store, self._names, log)
            for number in range(self._options.rounds):
                self._source.execute(_ROUND.encode())
                if number == 0:
                    self._change()
                self._merge(pipeline, session, reports, all_of_them=number == 0)
        done = self._job.execute_in_process(
            instance=self._instance, tags=run_tags(self._config, "maintain"), run_config=_QUIET
        )
        assert done.success
        if self.day % _KEPT_DAYS == 0:  # the job looks for orphans once a real day
            with Pipeline.open(self._config) as pipeline:
                maintain(pipeline, self._spark, self._tables, lambda _: None)
        self._forget_history()
        self.day += 1

    def _change(self) -> None:
        day, source = self.day, self._source
        source.execute(_DAY.format(day=day).encode())
        if day % 10 == 0:
            source.execute("update seldom set n = n + 1 where id = 1")
        if day % 21 == 20:
            added, dropped = f"add c{day} int default {day}", f"drop if exists c{max(0, day - 21)}"
            source.execute(f"alter table orders {added}, {dropped}".encode())
        if self._has_visitor:
            source.execute("update visitor set n = n + 1")

    def _merge(
        self, pipeline: Pipeline, session: SparkSession, reports: Reports, *, all_of_them: bool
    ) -> None:
        run(self._config, until=current_lsn(self._source))
        for table in self._tables if all_of_them else [ORDERS]:
            drained = drain(pipeline, session, table)
            assert drained is not None
            reports.add(drained)
        reports.tell_due(at_once=True)

    def between(self) -> None:
        """What happens now and then, in the night."""
        if self.day % 60 == 45:
            self._say("documents is copied anew")
            with Pipeline.open(self._config) as pipeline:
                resync(pipeline, self._spark, [DOCUMENTS], lambda _: None)
        if self.day % 30 in (10, 25):
            self._come_or_go()
        if self.day % 90 == 80:
            self._say("the Spark server is restarted")
            self._spark.__exit__(None, None, None)

    def _come_or_go(self) -> None:
        self._has_visitor = not self._has_visitor
        self._say(f"visitor {'comes' if self._has_visitor else 'goes'}")
        if not self._has_visitor:
            self._open()
            self._source.execute("drop table visitor")
            return
        self._source.execute(
            "create table visitor as select i as id, 0 as n from generate_series(1, 500) i"
        )
        self._source.execute("alter table visitor add primary key (id)")
        self._open()
        with Pipeline.open(self._config) as pipeline:
            resync(pipeline, self._spark, [VISITOR], lambda _: None)

    def _forget_history(self) -> None:
        """As the job does, as if so many days had gone by."""
        first = self._began[max(0, len(self._began) - _KEPT_DAYS)]
        keep = self._config.maintenance.keep_history
        assert keep is not None
        prune_source(self._instance, self._config, datetime.fromtimestamp(first, UTC) + keep)

    def _say(self, what: str) -> None:
        stderr.print(f"  day {self.day}: {what}")

    def measure(self) -> dict[str, float]:
        """What there is at the end of a day."""
        storage = Storage()
        lake = stored(storage, self._config.warehouse)
        staged = stored(storage, self._config.staging_uri)
        found: dict[str, float] = {
            "lake files": lake.files,
            "lake MB": lake.bytes / 1e6,
            "metadata MB": lake.metadata_bytes / 1e6,
            "staged files": staged.files,
            "Dagster's storage MB": dagster_bytes(Path(self._instance.root_directory)) / 1e6,
            "this process MB": psutil.Process().memory_info().rss / 1e6,
        }
        tables: dict[str, float] = dict(self._source.execute(_COORDINATION).fetchall())
        rows = {name: self._rows(name) for name in tables}
        [(retained,)] = self._source.execute(_RETAINED).fetchall()
        found |= {
            "coordination rows": sum(rows.values()),
            "coordination MB": sum(tables.values()) / 1e6,
            "catalog rows": sum(n for name, n in rows.items() if "iceberg_" in name),
            "WAL kept MB": retained / 1e6,
            "connections": self._rows("pg_stat_activity where datname = current_database()"),
        }
        if self.day % self._options.heap == 0:
            found |= _heap()
        return found

    def _rows(self, table: str) -> int:
        [(found,)] = self._source.execute(f"select count(*) from {table}".encode())
        return int(found)

    def verify(self) -> Mapping[str, str]:
        with Pipeline.open(self._config) as pipeline:
            done = verify_tables(pipeline, self._tables, self._say)
            return {str(one.table): one.outcome for one in done}

    def close(self) -> None:
        self._spark.__exit__(None, None, None)
        self._source.close()


_COORDINATION = """
select format('%I.%I', n.nspname, c.relname), pg_total_relation_size(c.oid)::float8
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = '_pg2iceberg' and c.relkind = 'r'
"""
_RETAINED = """
select coalesce(max(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)), 0)::float8
  from pg_replication_slots where database = current_database()
"""


# By the ends of their classes' names.
_KEPT = {
    "cached frames": ".CachedRDDBuilder",
    "readers' allocators": ".ChildAllocator",
    "sessions": ".SessionState",
}


def _heap() -> dict[str, float]:
    """Of the Spark server, what is reachable: its heap, and what it keeps of work that is over."""
    for child in psutil.Process().children(recursive=True):
        if child.name() == "java":
            objects = histogram(child.pid)
            found = {"JVM heap MB": sum(size for _, size in objects.values()) / 1e6}
            for what, ending in _KEPT.items():
                found[what] = sum(n for name, (n, _) in objects.items() if name.endswith(ending))
            return found
    return {}


def growth(curves: Mapping[str, Sequence[tuple[int, float]]], days: int) -> dict[str, float]:
    """Of each curve, the most in the last quarter over the most in the second one."""
    found = {}
    for name, curve in curves.items():
        second = [value for day, value in curve if days / 4 < day <= days / 2]
        last = [value for day, value in curve if day > days * 3 / 4]
        if second and last:
            found[name] = round(max(last) / max(second), 2) if max(second) else max(last)
    return found


# --- the curves ---

_WIDTH, _HEIGHT, _COLUMNS, _MARGIN = 300, 90, 3, 34


def drawn(curves: Mapping[str, Sequence[tuple[int, float]]], days: int) -> str:
    """All curves, each from 0 to its most, as SVG."""
    rows = -(-len(curves) // _COLUMNS)
    size = _COLUMNS * (_WIDTH + _MARGIN), rows * (_HEIGHT + _MARGIN)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}">',
        "<style>text { font: 11px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, curve) in enumerate(curves.items()):
        most = max(value for _, value in curve) or 1
        points = " ".join(
            f"{day / days * _WIDTH:.1f},{_HEIGHT * (1 - value / most):.1f}" for day, value in curve
        )
        x = number % _COLUMNS * (_WIDTH + _MARGIN) + _MARGIN / 2
        y = number // _COLUMNS * (_HEIGHT + _MARGIN) + _MARGIN * 0.7
        parts.append(
            f'<g transform="translate({x:.0f} {y:.0f})">'
            f'<text y="-6">{name} (most: {most:,.4g})</text>'
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#ccc"/>'
            f'<polyline points="{points}" fill="none" stroke="#1f6feb"/></g>'
        )
    return "\n".join([*parts, "</svg>", ""])


def live(year: Year, options: argparse.Namespace) -> dict[str, list[tuple[int, float]]]:
    curves = dict[str, list[tuple[int, float]]]()
    began = time.monotonic()
    while year.day < options.days:
        year.live()
        for name, value in year.measure().items():
            curves.setdefault(name, []).append((year.day, round(value, 3)))
        if year.day % 5 == 0:
            shown = {name: curve[-1][1] for name, curve in curves.items()}
            stderr.print(f"day {year.day} ({time.monotonic() - began:.0f} s): {shown}")
            _draw(curves, options)
        year.between()
    return curves


def _draw(curves: Mapping[str, Sequence[tuple[int, float]]], options: argparse.Namespace) -> None:
    if options.svg is not None:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(drawn(curves, options.days))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--rounds", type=int, default=3, help="merges a day of the busiest table")
    parser.add_argument("--heap", type=int, default=5, help="days between two looks at the heap")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args()
    with workplace(options.cache.absolute(), stderr.print) as postgres:
        server_dsn = postgres.dsn()
        assert server_dsn is not None
        dsn = fresh_database(server_dsn, DATABASE)
        with psycopg.connect(dsn, autocommit=True) as source:
            source.execute(_SETUP.encode())
        folder = home() / "dagster"
        folder.mkdir()
        (folder / "dagster.yaml").write_text(
            "instance_class:\n  module: cdc_assets.dagster.instance\n  class: Instance\n"
        )
        with dg.DagsterInstance.from_config(str(folder)) as instance:
            year = Year(dsn, instance, options)
            try:
                curves = live(year, options)
                outcomes = year.verify()
            finally:
                year.close()
        with psycopg.connect(server_dsn, autocommit=True) as server:
            forget(server, DATABASE)
    _draw(curves, options)
    found = {
        "days": options.days,
        "growth": growth(curves, options.days),
        "last": {name: curve[-1][1] for name, curve in curves.items()},
        "verified": outcomes,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(found))  # noqa: T201
    if set(outcomes.values()) != {"equal"}:
        sys.exit("a table isn't equal to its source")


if __name__ == "__main__":
    main()
