"""Live traffic on the demo's tables: pgbench, and the shop's operations, counted and paced.

Either until a number of changes is made, or for ever: ``python -m cdc_assets.demo.workload
--directory D`` makes the tables of the embedded Postgres in ``D`` first, outlives the server's
restarts, and ends with its stdin. Which tables and which operations there are does not belong here.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from cdc_assets.demo import shop
from cdc_assets.demo.schema import create_demo_schema, run_pgbench
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import EnvironmentProblem
from cdc_assets.process import children as process
from cdc_assets.process import lifeline

__all__ = ["LiveTraffic", "TrafficCount", "create_demo_schema", "supervise_workload"]

_log = logging.getLogger(__name__)

# Enough to be seen, and for 20,000 changes in a minute; two cores hardly notice.
RATE_PER_SECOND = 400.0
# A pgbench transaction updates an account, a teller and a branch, and inserts history.
PGBENCH_CHANGES = 4
# pgbench runs in slices this long: if this process is killed, its pgbench ends soon, too.
_SLICE_SECONDS = 3
_RETRY_SECONDS = 1.0
# Every five minutes history is cut to its last hour, or it would grow for ever.
_TRIM_EVERY_SLICES = 100
_PROCESSED = re.compile(r"number of transactions actually processed: (\d+)")


@dataclass(slots=True)
class TrafficCount:
    """What was committed; changes that a cascade made are not counted."""

    pgbench_changes: int = 0
    shop_changes: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    @property
    def changes(self) -> int:
        return self.pgbench_changes + self.shop_changes


class _Halves:
    """Pgbench and the shop end together: when asked to, or when either ends or fails."""

    def __init__(self, stopping: threading.Event) -> None:
        self.stopping = stopping
        self._ended = False

    @property
    def over(self) -> bool:
        return self._ended or self.stopping.is_set()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._ended = True


class LiveTraffic:
    """Traffic on one database; the same seed on the same rows makes the same shop changes."""

    def __init__(self, dsn: str, seed: int = 1) -> None:
        self._dsn = dsn
        self._seed = seed
        self._slices = 0
        self.count = TrafficCount()

    def run(self, changes: int = 20_000) -> TrafficCount:
        """Make at least that many changes, half of them by pgbench, as fast as it goes."""
        transactions = max(1, changes // 2 // PGBENCH_CHANGES)
        target = self.count.changes + changes
        with ThreadPoolExecutor(1) as pool:
            bench = pool.submit(self._bench, ["-t", str(transactions)])
            wanted = changes - transactions * PGBENCH_CHANGES
            self._shop(self.count.shop_changes + wanted, None, _Halves(threading.Event()))
            bench.result()
        assert self.count.changes >= target
        return self.count

    def run_until(self, stopping: threading.Event, rate_per_second: float) -> TrafficCount:
        """Keep changing at about that pace until told to stop; raises when the server goes."""
        share = rate_per_second / 2
        halves = _Halves(stopping)
        with ThreadPoolExecutor(1) as pool:
            bench = pool.submit(self._bench_until, halves, share / PGBENCH_CHANGES)
            with halves:
                self._shop(None, share, halves)
            bench.result()
        return self.count

    def _bench_until(self, halves: _Halves, transactions_per_second: float) -> None:
        with halves:
            while not halves.over:
                pace = ["-T", str(_SLICE_SECONDS), "-R", f"{transactions_per_second:.3f}"]
                self._bench(pace)
                if self._slices % _TRIM_EVERY_SLICES == 0:
                    self._trim_history()

    def _trim_history(self) -> None:
        with psycopg.connect(self._dsn, application_name="cdc_assets demo traffic") as connection:
            connection.execute(
                "delete from pgbench_history where mtime < localtimestamp - interval '1 hour'"
            )

    def _bench(self, arguments: list[str]) -> None:
        # -n: without it pgbench empties its history first
        self._slices += 1
        seed = f"--random-seed={self._seed * 1_000_003 + self._slices}"
        printed = run_pgbench(self._dsn, ["-n", "-c", "1", seed, *arguments])
        found = _PROCESSED.search(printed)
        self.count.pgbench_changes += int(found[1]) * PGBENCH_CHANGES if found else 0

    def _shop(self, until: int | None, rate_per_second: float | None, halves: _Halves) -> None:
        operations, weights = list(shop.OPERATIONS), list(shop.OPERATIONS.values())
        with psycopg.connect(
            self._dsn, autocommit=True, application_name="cdc_assets demo traffic"
        ) as connection:
            # The same seed after a restart would make the same keys again.
            row = connection.execute("select max(id) from shop.orders").fetchone()
            rng = random.Random(f"{self._seed} {row}")  # noqa: S311 - no secret
            due = time.monotonic()
            while not halves.over and (until is None or self.count.shop_changes < until):
                operation = rng.choices(operations, weights)[0]
                made = 0
                with connection.transaction():
                    made = operation(connection, rng)
                self.count.shop_changes += made
                self.count.operations[operation.__name__] += 1
                if rate_per_second is not None:
                    # After a pause of the machine go on at the pace, don't catch up.
                    due = max(due, time.monotonic() - 1.0) + max(made, 1) / rate_per_second
                    halves.stopping.wait(max(0.0, due - time.monotonic()))


def supervise_workload(server: EmbeddedPostgres) -> process.Status:
    """Keep a child of this process making traffic on that server; for ticks, never waits."""
    folder = server.directory
    spec = process.ChildSpec(__name__, ("--directory", str(folder)), folder / "workload.log")
    return process.supervise(f"workload:{folder}", spec)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the tables, then traffic until stdin ends or a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m cdc_assets.demo.workload", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="of the embedded Postgres")
    parser.add_argument("--rate", type=float, default=RATE_PER_SECOND, help="changes a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=int, default=1, help="pgbench's: 100,000 accounts each")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stopping = lifeline.die_with_parent()
    server = EmbeddedPostgres(options.directory)
    while not stopping.is_set():
        dsn = server.dsn()
        if dsn is None:
            stopping.wait(_RETRY_SECONDS)
            continue
        try:
            create_demo_schema(dsn, pgbench_scale=options.scale)
            LiveTraffic(dsn, options.seed).run_until(stopping, options.rate)
        except (psycopg.Error, EnvironmentProblem) as error:
            # The server restarts, or somebody else changed the tables: report it and go on.
            _log.warning("traffic interrupted: %s", error)
            stopping.wait(_RETRY_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
