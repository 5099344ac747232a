"""The command: seeds one after the other until there are enough, or the time is over.

Of each failing seed the plan, made smaller, is written to a file that ``--replay`` plays again. At
the end stands what happened how often: an oracle that tests nothing is noticed there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.process.home import home
from cdc_assets_tests.oracle.generate import FOCUSES, make
from cdc_assets_tests.oracle.plan import Plan
from cdc_assets_tests.oracle.servers import Servers, serving
from cdc_assets_tests.oracle.shrink import shrink
from cdc_assets_tests.oracle.world import World
from cdc_assets_tests.support.jvm import QUICK_JVM

# As for tests: whole databases come and go.
_FAST = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_replication_slots": "40",
    "max_wal_senders": "40",
}


class Soak:
    """Plays plans on servers that run; says how it goes on stderr."""

    def __init__(self, servers: Servers, into: Path, shrink_seconds: float, verbose: bool) -> None:
        self._servers, self._into = servers, into
        self._shrink_seconds, self._verbose = shrink_seconds, verbose
        self.counts: Counter[str] = Counter()
        self.played = self.failed = 0

    def play(self, plan: Plan, name: str, left: str) -> None:
        """One plan; what it fails with is made small and written down."""
        began = time.monotonic()
        world = self._world(plan)
        problems = self._played(world)
        self.counts += world.counts
        self.played += 1
        self.failed += bool(problems)
        _say(
            f"{name}: {'FAILED' if problems else 'ok'}, {time.monotonic() - began:.0f} s;"
            f" {self.played - self.failed} ok, {self.failed} failed; {left}"
        )
        if problems:
            for problem in problems:
                _say(f"    {problem[:1000]}")
            self._write(plan, name, "whole")
            self._write(self._shrunk(plan, problems), name, "small")

    def _played(self, world: World) -> list[str]:
        try:
            return world.play()
        except Exception as error:  # noqa: BLE001 - nothing a person should ever meet: a finding
            return [f"{type(error).__name__}: {error}", traceback.format_exc()[-1500:]]

    def _shrunk(self, plan: Plan, problems: Sequence[str]) -> Plan:
        wanted = {_kind(problem) for problem in problems}
        until = time.monotonic() + self._shrink_seconds

        def fails(smaller: Plan) -> bool:
            found = {_kind(problem) for problem in self._played(self._world(smaller, quiet=True))}
            _say(f"    {_size(smaller)}: {'still fails' if found & wanted else 'passes'}")
            return bool(found & wanted)

        return shrink(plan, fails, lambda: time.monotonic() > until)

    def _world(self, plan: Plan, *, quiet: bool = False) -> World:
        began = time.monotonic()

        def say(text: str) -> None:
            if self._verbose and not quiet:
                _say(f"    {time.monotonic() - began:5.1f} {text}")

        return World(self._servers, plan, say)

    def _write(self, plan: Plan, name: str, which: str) -> None:
        self._into.mkdir(parents=True, exist_ok=True)
        path = self._into / f"{name.replace(' ', '-')}.{which}.json"
        path.write_text(plan.dump())
        _say(f"    {_size(plan)} in {path}")


def main(arguments: list[str] | None = None) -> int:
    """0 if every seed was ok, 1 if one failed."""
    options = _options(arguments)
    logging.basicConfig(level=logging.CRITICAL)
    os.environ |= QUICK_JVM | {"CDC_ASSETS_HOME": str(options.home)}
    until = time.monotonic() + 60 * options.minutes
    with ExitStack() as stack:
        spark = SparkServer(SparkServerSettings(), home())
        spark.start()
        stack.callback(spark.stop)
        postgres = EmbeddedPostgres(options.home / "postgres", 18, None, _FAST)
        stack.callback(postgres.remove)
        servers = stack.enter_context(serving(postgres.start(), spark.wait(), options.home))
        soak = Soak(servers, options.home / "failed", options.shrink, options.verbose)
        for number, (name, plan) in enumerate(_plans(options)):
            left = until - time.monotonic()
            if left < 0:
                break
            soak.play(plan, name, f"{options.seeds - number - 1} seeds or {left:.0f} s left")
    for what, count in sorted(soak.counts.items()):
        sys.stdout.write(f"{count:8} {what}\n")
    passed = soak.played - soak.failed
    sys.stdout.write(f"{soak.played} seeds: {passed} ok, {soak.failed} failed\n")
    return 1 if soak.failed else 0


def _plans(options: argparse.Namespace) -> Iterator[tuple[str, Plan]]:
    if options.replay:
        for _ in range(options.seeds):
            yield f"{options.replay.stem}", Plan.read(options.replay)
        return
    for number in range(options.seeds):
        seed = options.first + number // len(options.focus)
        focus = options.focus[number % len(options.focus)]
        yield f"seed {seed} {focus}".strip(), make(seed, focus)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="oracle", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first one")
    parser.add_argument("--minutes", type=float, default=60.0, help="none begins after so long")
    parser.add_argument(
        "--focus",
        type=lambda text: text.split(","),
        default=[""],
        help=f"what happens often: {', '.join(FOCUSES)}; several take turns",
    )
    parser.add_argument("--replay", type=Path, help="a plan that was written down")
    parser.add_argument("--shrink", type=float, default=180.0, help="seconds a failing plan gets")
    parser.add_argument("--home", type=Path, default=Path("/tmp/cdc_assets-oracle"))
    parser.add_argument("-v", "--verbose", action="store_true", help="each action")
    return parser.parse_args(arguments)


def _kind(problem: str) -> str:
    """What sort of problem it is, whichever table has it."""
    return problem.partition(":")[0]


def _size(plan: Plan) -> str:
    return f"{len(plan.tables)} tables, {len(plan.actions)} actions"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
