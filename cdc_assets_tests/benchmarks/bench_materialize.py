"""``python -m cdc_assets_tests.benchmarks.bench_materialize``: merging the log, beside one MERGE.

A table of each size is copied into the lake. Then, round by round, changes of each batch size are
made at the source and flushed, and the same staged files are merged twice from the same snapshot:
by the materializer, and by one plain ``MERGE … WHEN MATCHED … WHEN NOT MATCHED`` of the folded
batch, on a branch that is thrown away. Which of them goes first alternates. Changes are *spread*
over all keys, or *recent*: among the last tenth of them, while the table's files hold ranges of
keys as they were copied, and *recent again* when the spread ones have left files of all keys.

Prints progress on stderr and one JSON line on stdout. ``against_merge`` is the materializer's time
over the plain MERGE's (the median of the rounds'); ``growth`` its time for the same batch on the
largest table over that on the smallest, both straight after the flush, as in use: behind a plain
MERGE, which takes longer on a larger table, whatever a machine does meanwhile would count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from cdc_assets.config.source import parse_config
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.lake.values import as_lake, named
from cdc_assets.log.batch import BATCH_ROWS, Window, facts, outlines
from cdc_assets.log.staged.storage import Storage
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.events import events
from cdc_assets.materializer.fold import fold
from cdc_assets.operations.copying import snapshot
from cdc_assets.operations.running import Spark
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.process.home import home
from cdc_assets_tests.benchmarks.calibration import calibrate, platform_cpu_seconds
from cdc_assets_tests.benchmarks.items import ROW, prepare
from cdc_assets_tests.benchmarks.workplace import forget, workplace

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

Connection = psycopg.Connection[tuple[Any, ...]]

SPREAD, RECENT, RECENT_AGAIN = "spread", "recent", "recent again"
# Of a batch: rows that are updated, inserted; the others are deleted.
_UPDATED, _INSERTED = 0.6, 0.3
# Recent changes fall into this part of the keys; those to be picked are drawn with some to spare.
_RECENT, _SPARE = 0.1, 1.5
# Merges before those that are measured: a server's first ones take three times as long.
_WARMING = 4
# Of the bytes of a merge; of its rows there is one (BATCH_ROWS).
_NO_LIMIT = 2**40


@dataclass(frozen=True, slots=True)
class Measured:
    """One batch on one table: medians over the rounds, in seconds.

    ``first_seconds``: of those rounds in which the materializer went first. CPU is that of Spark,
    its Python workers and this process.
    """

    rows: int
    changes: int
    where: str
    seconds: float
    first_seconds: float
    merge_seconds: float
    changes_s: int
    against_merge: float
    cpu_us_change: float
    merge_cpu_us_change: float


@dataclass(frozen=True, slots=True)
class Taken:
    """What one merge took."""

    seconds: float
    cpu_seconds: float
    changes: int

    @classmethod
    def since(cls, began: float, cpu_seconds: float, changes: int) -> Self:
        seconds = time.perf_counter() - began
        return cls(seconds, platform_cpu_seconds() - cpu_seconds, changes)

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s ({self.changes:,}, {self.cpu_us_change:.1f} µs of CPU each)"

    @property
    def cpu_us_change(self) -> float:
        return 1e6 * self.cpu_seconds / max(1, self.changes)


@dataclass(frozen=True, slots=True)
class Bench:
    """One table in its database, copied into the lake, with a session to merge it."""

    rows: int
    source: Connection
    pipeline: Pipeline
    session: SparkSession
    table: TableId

    def change(self, changes: int, where: str, seed: float) -> None:
        """Commit a batch of changes, and flush it."""
        self.source.execute("select setseed(%s)", (seed,))
        found = self.source.execute(f"select min(id), max(id) from {self.table}".encode())
        low, high = found.fetchone() or (0, 0)
        first = low if where == SPREAD else high - round((high - low) * _RECENT)
        inserted, updated = round(changes * _INSERTED), round(changes * _UPDATED)
        picked = changes - inserted
        self.source.execute(
            "create temp table picked as select id, row_number() over () as n from ("
            " select distinct %s + floor(random() * %s)::bigint as id from generate_series(1, %s)"
            " limit %s) p",
            (first, high - first, round(picked * _SPARE), picked),
        )
        self.source.execute(
            f"update {self.table} t set a = a + 1, v = md5(t.id::text || %s) || 'abcdefgh'"
            " from picked p where p.id = t.id and p.n <= %s".encode(),
            (str(seed), updated),
        )
        self.source.execute(
            f"delete from {self.table} t using picked p where p.id = t.id and p.n > %s".encode(),
            (updated,),
        )
        self.source.execute(
            f"insert into {self.table} select g, {ROW}"
            " from generate_series(%s::bigint + 1, %s::bigint + %s) g".encode(),
            (high, high, inserted),
        )
        self.source.execute("drop table picked")
        run(self.pipeline.config, until=current_lsn(self.source))

    def ours(self) -> Taken:
        cpu, began = platform_cpu_seconds(), time.perf_counter()
        done = drain(self.pipeline, self.session, self.table, batch_bytes=_NO_LIMIT)
        # A merge has BATCH_ROWS at most, so a large batch takes several, as it does in use.
        assert done is not None and not done.pending_entries
        assert done.merges == 1 or done.changes > BATCH_ROWS
        return Taken.since(began, cpu, done.changes)

    @contextmanager
    def plain(self) -> Iterator[_Plain]:
        """A branch of the table as it is now, for the plain MERGE."""
        row = self.pipeline.store.table(self.table)
        assert row is not None and row.snapshot_lsn is not None
        lake = LakeTable(self.pipeline.config, self.pipeline.config.table(self.table), row)
        lake.upgrade(self.session, lake.loaded())
        cursor = lake.state().cursor
        offset = cursor.offset if cursor is not None else 0
        self.session.sql(f"alter table {lake.sql_name} create branch plain")
        try:
            yield _Plain(self, lake, Window(offset, row.snapshot_lsn))
        finally:
            self.session.sql(f"alter table {lake.sql_name} drop branch plain")


@dataclass(frozen=True, slots=True)
class _Plain:
    """One MERGE of everything that is pending, as one would write it by hand."""

    bench: Bench
    lake: LakeTable
    window: Window

    def merge(self) -> Taken:
        session, lake, pipeline = self.bench.session, self.lake, self.bench.pipeline
        cpu, began = platform_cpu_seconds(), time.perf_counter()
        storage = Storage.of(pipeline.config.s3)
        entries = pipeline.store.entries(self.bench.table, self.window.offset)
        keys, names = [c.name for c in lake.key], [c.name for c in lake.columns]
        found = facts(outlines(entries, storage), self.window, keys)
        frame = events(session, entries, self.window, storage, pipeline.config.spark.cores)
        folded = fold(session, frame, found, keys, names)
        rows = as_lake(folded.withColumn("cdc_op", F.col("op")), lake.columns, "row", "cdc_op")
        rows = rows.select(*named(lake.columns), "cdc_op")
        rows.createOrReplaceTempView("cdc_batch")
        listed = ", ".join(ticked(name) for name in names)
        updates = ", ".join(f"t.{ticked(name)} = s.{ticked(name)}" for name in names)
        session.sql(
            f"merge into {lake.branch('plain')} t using cdc_batch s on t.id = s.id"
            " when matched and s.cdc_op = 'D' then delete"
            f" when matched then update set {updates}"
            f" when not matched and s.cdc_op = 'U' then insert ({listed})"
            f" values ({', '.join(f's.{ticked(n)}' for n in names)})"
        )
        return Taken.since(began, cpu, found.rows)


class _Peak:
    """The largest resident set of the Spark server's JVM while it lasts."""

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(0.5):
            for child in psutil.Process().children(recursive=True):
                try:
                    if child.name() == "java":
                        self.bytes = max(self.bytes, child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def measure(
    server_dsn: str, rows: int, batches: Sequence[tuple[int, str]], rounds: int
) -> list[Measured]:
    dsn = prepare(server_dsn, rows, stderr.print)
    config = parse_config(
        {
            "name": f"bench_{rows}",
            "postgres": {"dsn": dsn},
            "tables": [{"name": "public.items"}],
            "staging": {"flush_interval": "10s"},
        },
        "bench",
    )
    table = TableId("public", "items")
    measured = []
    try:
        # Not as a context: the server stays for the other sizes.
        spark = Spark(config)
        with (
            Pipeline.open(config) as pipeline,
            psycopg.connect(dsn, autocommit=True) as source,
        ):
            stderr.print(f"copying {rows:,} rows")
            snapshot(pipeline, spark, [table], lambda p: stderr.print(f"  {p.sentence}"))
            with spark.session() as session:
                bench = Bench(rows, source, pipeline, session, table)
                for number in range(_WARMING):  # the first one upgrades the table, too
                    bench.change(batches[0][0], RECENT, 0.5 + number / 100)
                    bench.ours()
                for changes, where in batches:
                    measured.append(_batch(bench, changes, where, rounds))
    finally:
        with psycopg.connect(server_dsn, autocommit=True) as server:
            forget(server, f"bench_items_{rows}")
    return measured


def _batch(bench: Bench, changes: int, where: str, rounds: int) -> Measured:
    ours, theirs = list[Taken](), list[Taken]()
    for number in range(1, rounds + 1):
        bench.change(changes, where, number / 100)
        with bench.plain() as plain:
            if number % 2 == 0:
                theirs.append(plain.merge())
            ours.append(bench.ours())
            if number % 2:
                theirs.append(plain.merge())
        stderr.print(
            f"{bench.rows:,} rows, {where} changes: {ours[-1]}, one MERGE {theirs[-1]},"
            f" {ours[-1].seconds / theirs[-1].seconds:.2f}"
        )
    applied, seconds = ours[-1].changes, statistics.median(t.seconds for t in ours)
    ratios = [mine.seconds / merge.seconds for mine, merge in zip(ours, theirs, strict=True)]
    return Measured(
        bench.rows,
        applied,
        where,
        round(seconds, 3),
        round(statistics.median(t.seconds for t in ours[::2]), 3),
        round(statistics.median(t.seconds for t in theirs), 3),
        round(applied / seconds),
        round(statistics.median(ratios), 3),
        round(statistics.median(t.cpu_us_change for t in ours), 2),
        round(statistics.median(t.cpu_us_change for t in theirs), 2),
    )


def _growth(measured: Sequence[Measured], where: str, changes: int) -> float | None:
    """The same batch on the largest table over that on the smallest."""
    same = sorted(
        (m for m in measured if m.where == where and 0.9 * changes < m.changes <= changes),
        key=lambda m: m.rows,
    )
    return round(same[-1].first_seconds / same[0].first_seconds, 3) if len(same) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument(
        "--changes", type=int, nargs="+", default=[10_000, 50_000, 250_000, 1_000_000]
    )
    parser.add_argument("--compared", type=int, default=50_000, help="of the growth")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=home() / "bench", metavar="DIR")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    batches = [
        (options.compared, RECENT),
        *((changes, SPREAD) for changes in options.changes),
        (options.compared, RECENT_AGAIN),
    ]
    measured: list[Measured] = []
    calibration = calibrate(stderr.print)
    with workplace(options.cache.absolute(), stderr.print) as postgres, _Peak() as peak:
        dsn = postgres.dsn()
        assert dsn is not None
        for rows in options.rows:
            fit = [(changes, where) for changes, where in batches if changes <= rows]
            measured += measure(dsn, rows, fit, options.rounds)
    print(  # noqa: T201
        json.dumps(
            {
                "batches": [asdict(m) for m in measured],
                **{
                    f"growth_{where.replace(' ', '_')}": _growth(measured, where, options.compared)
                    for where in (SPREAD, RECENT, RECENT_AGAIN)
                },
                "calibration": calibration.shown(
                    **{f"{m.rows}_{m.changes}_{m.where}": m.cpu_us_change for m in measured}
                ),
                "peak_jvm_rss_mb": round(peak.bytes / 1e6),
                "rounds": options.rounds,
                "cpus": os.cpu_count(),
                "load": round(load, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
