"""``python -m cdc_assets_tests.benchmarks.bench_cluster``: what of copies and merges scales.

A Spark cluster of machines that share nothing (``support.cluster``) is started with each number of
``--workers``, of ``--cores`` of a processor each. Round by round, in a database and a lake of its
own, a table of ``--rows`` is copied; then each number of ``--changes``, spread over all keys, is
made and flushed, and merged. The first round warms the servers up, and isn't counted.

Prints progress on stderr and one JSON line on stdout: of each number of workers and each work the
medians of the rounds. ``cpu_seconds``, by the groups of processes that ``support.cpu`` counts:
those of all workers, of the Connect server, of the platform (with the flusher), of Postgres (which
is source, coordination and catalog) and of the object store. ``requests``: what the store was asked
for. ``transactions``: those that wrote to Postgres. ``files``: data files of the table afterwards.
``load``: of the machine, when the work began. Work that scales costs the workers as much however
many they are, and takes less time; what the others take of it, they take one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console

from cdc_assets.postgres.names import TableId
from cdc_assets_tests.benchmarks.bench_materialize import SPREAD, Bench
from cdc_assets_tests.benchmarks.calibration import calibrate
from cdc_assets_tests.benchmarks.items import prepare
from cdc_assets_tests.support.cluster import (
    NODES,
    PLATFORM,
    Cluster,
    Running,
    platform_process,
    running_cluster,
)
from cdc_assets_tests.support.cpu import CpuGroup, cpu_group
from cdc_assets_tests.support.lake import Lake, lake
from cdc_assets_tests.support.machines import why_none
from cdc_assets_tests.support.s3 import GATEWAY, object_store

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

TABLE = TableId("public", "items")
# The heap that our own server has; half a million changes are too many for the 1 GB of tests.
_SERVER = "spark.driver.memory 3g\n"
# Of a merge that isn't measured: a table's first one upgrades it, too.
_FIRST_CHANGES = 1_000


class Options(argparse.Namespace):
    """The command's options."""

    workers: Sequence[int]
    cores: float
    rows: int
    changes: Sequence[int]
    rounds: int
    gateway: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One work with so many workers. ``rows``: copied, or changes merged."""

    workers: int
    work: str
    rows: int
    seconds: float
    cpu_seconds: dict[str, float]
    requests: dict[str, int]
    transactions: int
    files: int
    load: float


# --- in the process of the store ---

_kept = ExitStack()
_asked = Counter[str]()


def _serve(gateway: str) -> dict[str, object]:
    """Its settings; it is there until :func:`_leave`."""
    store = _kept.enter_context(object_store(gateway, PLATFORM))
    store.watch = _count
    key = {"access_key_id": store.own.id, "secret_access_key": store.own.secret}
    return {**store.settings, **key}


def _count(handler: Any) -> None:
    what, query = handler.command, handler.path.partition("?")[2]
    if what == "GET" and "prefix=" in query:
        what = "LIST"
    elif what == "POST" and query.startswith("delete"):
        what = "DELETE"
    _asked[what] += 1


def _requests() -> Counter[str]:
    return _asked


# --- in the process of the platform ---

_lakes: list[Lake] = []


def _begin(cluster: Cluster, rows: int, workers: int, s3: Mapping[str, object]) -> None:
    """A source with a table of its own, pinned."""
    which = f"_{len(_lakes)}"
    dsn = prepare(cluster.dsn, rows, stderr.print, which)
    settings: dict[str, Any] = {
        "name": f"bench{which}",
        "spark": {"remote": cluster.remote, "cores": max(2, workers)},
        "s3": s3,
        "staging": {"uri": "s3://bucket/staging", "flush_interval": "10s"},
        "lake": {"catalog": {"warehouse": "s3://bucket/warehouse"}},
    }
    _lakes.append(_kept.enter_context(lake(dsn, cluster.remote, "select 1", "items", **settings)))
    _lakes[-1].pin()


def _copy(_: Cluster) -> None:
    _lakes[-1].copy()


def _change(_: Cluster, rows: int, changes: int, seed: float) -> None:
    _bench(rows).change(changes, SPREAD, seed)


def _merge(_: Cluster, rows: int) -> None:
    _bench(rows).ours()


def _transactions(cluster: Cluster) -> int:
    """How many have written so far."""
    with psycopg.connect(cluster.dsn) as postgres:
        found = postgres.execute("select txid_snapshot_xmax(txid_current_snapshot())").fetchone()
    assert found is not None
    return int(found[0])


def _files(_: Cluster) -> int:
    return _lakes[-1].lake_table(TABLE).state().data_files


def _bench(rows: int) -> Bench:
    opened = _lakes[-1]
    return Bench(rows, opened.source, opened.pipeline, opened.session, TABLE)


# --- in either ---


def _pid(*_: Cluster) -> int:
    return os.getpid()


def _leave(*_: Cluster) -> None:
    _kept.pop_all().close()


# --- here ---


@dataclass(frozen=True, slots=True)
class _Place:
    """A running cluster, and what is looked at while it works."""

    workers: int
    running: Running
    groups: Mapping[str, Sequence[CpuGroup]]
    requests: Callable[[], Counter[str]]
    s3: Mapping[str, object]

    def round(self, options: Options, seed: float) -> Iterable[Measured]:
        run, rows = self.running.run, options.rows
        run(_begin, rows, self.workers, self.s3)
        try:
            yield self._measured("copy", rows, _copy)
            run(_change, rows, _FIRST_CHANGES, seed)
            run(_merge, rows)
            for number, changes in enumerate(options.changes, start=1):
                given = (rows, changes, seed + number / 100)
                yield self._measured(f"flush of {changes:,}", changes, _change, *given)
                yield self._measured(f"merge of {changes:,}", changes, _merge, rows)
        finally:
            run(_leave)

    def _measured(self, work: str, rows: int, do: Callable[..., None], *given: float) -> Measured:
        load, wrote = os.getloadavg()[0], self.running.run(_transactions)
        asked, cpu, began = self.requests(), self._cpu_seconds(), time.perf_counter()
        self.running.run(do, *given)
        seconds, later = time.perf_counter() - began, self._cpu_seconds()
        found = Measured(
            self.workers,
            work,
            rows,
            round(seconds, 2),
            {part: round(later[part] - cpu[part], 2) for part in cpu},
            dict(self.requests() - asked),
            self.running.run(_transactions) - wrote,
            self.running.run(_files),
            round(load, 1),
        )
        stderr.print(f"  {asdict(found)}")
        return found

    def _cpu_seconds(self) -> dict[str, float]:
        return {part: sum(g.seconds for g in groups) for part, groups in self.groups.items()}


def _with(options: Options, workers: int) -> Iterable[Measured]:
    """Every round's measures, on a cluster of so many workers."""
    names = [name for name in NODES if name not in ("master", "connect")][:workers]
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bench-cluster-")))

        def group(part: str) -> CpuGroup:
            return cleanup.enter_context(cpu_group(f"{folder.name}-{part}"))

        groups = {
            "workers": [group(name) for name in names],
            **{part: [group(part)] for part in ("server", "platform", "postgres", "store")},
        }
        stderr.print(f"starting a cluster of {workers} workers")
        running = cleanup.enter_context(running_cluster(folder, names, {}, _SERVER))
        store = cleanup.enter_context(platform_process(running.cluster))
        cleanup.callback(lambda: store.run(_leave))
        groups["store"][0].add([store.run(_pid)])
        groups["platform"][0].add([running.run(_pid)])
        machines = running.cluster.machines
        its = {"connect": groups["server"][0], "database": groups["postgres"][0]}
        its |= dict(zip(names, groups["workers"], strict=True))
        for name, counted in its.items():
            counted.add(process.pid for process in machines[name].processes())
        for limited in groups["workers"]:
            limited.limit(options.cores)
        place = _Place(
            workers,
            running,
            groups,
            lambda: store.run(_requests),
            store.run(_serve, options.gateway),
        )
        for number in range(options.rounds + 1):
            found = list(place.round(options, number / 10))
            if number:
                yield from found


def _median(measured: Sequence[Measured]) -> Measured:
    """Of the rounds of one work."""

    def middle(part: str) -> dict[str, float]:
        tables = [asdict(one)[part] for one in measured]
        keys = dict.fromkeys(key for table in tables for key in table)
        return {key: round(statistics.median(t.get(key, 0) for t in tables), 2) for key in keys}

    first = measured[0]
    return Measured(
        first.workers,
        first.work,
        first.rows,
        statistics.median(one.seconds for one in measured),
        middle("cpu_seconds"),
        {verb: round(count) for verb, count in middle("requests").items()},
        round(statistics.median(one.transactions for one in measured)),
        round(statistics.median(one.files for one in measured)),
        statistics.median(one.load for one in measured),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="4 at most")
    parser.add_argument("--cores", type=float, default=0.5, help="of each worker")
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--changes", type=int, nargs="+", default=[100_000, 500_000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gateway", default=GATEWAY, help="a versitygw; without, moto")
    options = parser.parse_args(namespace=Options())
    if (why := why_none()) is not None:
        raise SystemExit(f"no machines of their own: {why}")
    calibration = calibrate(stderr.print)
    medians = list[Measured]()
    for workers in options.workers:
        found = list(_with(options, workers))
        works = dict.fromkeys(one.work for one in found)
        medians += [_median([one for one in found if one.work == work]) for work in works]
    print(  # noqa: T201
        json.dumps(
            {
                "cores": options.cores,
                "measured": [asdict(one) for one in medians],
                "calibration": calibration.shown(),
                "rounds": options.rounds,
                "cpus": os.cpu_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
