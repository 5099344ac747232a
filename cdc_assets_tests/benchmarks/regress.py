"""``python -m cdc_assets_tests.benchmarks.regress``: is anything slower than it was?

Each benchmark runs small, as a process of its own, and what it takes is compared with
``baseline.json``. Only ratios are compared, of two figures of one run: ours over the peer's or the
limit's, or CPU over the calibration's. So a slower machine has the same ones, about: a ratio that
got worse by more than ``--tolerance`` is an error, unless a second run of its benchmark clears it.

Prints progress on stderr and one JSON line on stdout; ends with 1 if something is slower.
``--record`` writes what was found as the new baseline.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)

BASELINE = Path(__file__).with_name("baseline.json")
# Two runs of one commit differ by half of it on a machine that others use, too.
TOLERANCE = 0.3


@dataclass(frozen=True, slots=True)
class Ratio:
    """``path``: of the number in a benchmark's JSON, which is absent where it couldn't be taken."""

    name: str
    path: tuple[str | int, ...]
    more_is_better: bool = False

    def read(self, printed: Any) -> float | None:
        try:
            found = reduce(lambda part, step: part[step], self.path, printed)
        except (KeyError, IndexError, TypeError):
            return None
        return None if found is None else float(found)

    def worse_by(self, found: float, before: float) -> float:
        """0.5: half as much again, in time or in CPU."""
        return before / found - 1 if self.more_is_better else found / before - 1


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this folder, and the ratios in what it prints."""

    module: str
    ratios: Sequence[Ratio]
    arguments: str = ""

    def run(self) -> dict[str, float]:
        stderr.print(f"{self.module} {self.arguments}")
        done = subprocess.run(
            [sys.executable, "-m", f"{__package__}.{self.module}", *self.arguments.split()],
            stdout=subprocess.PIPE,
            check=False,
        )
        if not done.stdout.strip():
            raise SystemExit(f"{self.module} ended with {done.returncode}, and printed nothing")
        printed = json.loads(done.stdout.splitlines()[-1])
        read = {ratio.name: ratio.read(printed) for ratio in self.ratios}
        return {name: round(value, 3) for name, value in read.items() if value is not None}


def _flusher(name: str, *path: str | int) -> list[Ratio]:
    return [
        Ratio(f"{name} against pg_recvlogical", (*path, "ratio"), more_is_better=True),
        Ratio(
            f"{name}'s CPU over pg_recvlogical's", (*path, "cpu_against_pg_recvlogical_and_source")
        ),
    ]


BENCHMARKS = (
    Benchmark(
        "bench_flusher",
        [
            *_flusher("flusher"),
            *_flusher("flusher of 1,000 tables", "by_tables", 0),
            *_flusher("flusher through TLS", "tls"),
        ],
        "--changes 500000 --rounds 3 --tables 1000 --smaller 1 --larger 1",
    ),
    Benchmark(
        "bench_snapshot",
        [
            Ratio("snapshot against COPY", ("ratio",), more_is_better=True),
            Ratio("snapshot's CPU over COPY's", ("cpu_against_limit",)),
        ],
        "--scale 0.3 --rounds 3",
    ),
    Benchmark(
        "bench_materialize",
        [
            Ratio(f"{what} over one MERGE", ("batches", number, "against_merge"))
            for number, what in enumerate(
                ("recent changes", "10,000 spread", "50,000 spread", "recent changes again")
            )
        ],
        "--rows 1000000 --changes 10000 50000 --rounds 3",
    ),
    Benchmark(
        "bench_inserts",
        [Ratio("inserts against pg_recvlogical", ("against_pg_recvlogical",), more_is_better=True)],
        "--rows 500000 --rounds 3",
    ),
    Benchmark("bench_verify", [Ratio("verify's CPU", ("calibration", "of_it", "cpu_seconds"))]),
    Benchmark(
        "bench_pipeline",
        [
            Ratio(f"{part}'s CPU at 1,000 changes/s", ("calibration", 0, "of_it", part))
            for part in ("flusher", "spark", "dagster")
        ],
        "--rates 1000 --search 0 --seconds 90",
    ),
)


def slower(
    ratios: Sequence[Ratio], found: Mapping[str, float], before: Mapping[str, float], limit: float
) -> list[str]:
    """The names of those that got worse by more than ``limit``; a new one can't have."""
    return [
        ratio.name
        for ratio in ratios
        if ratio.name in found
        and ratio.name in before
        and ratio.worse_by(found[ratio.name], before[ratio.name]) > limit
    ]


def _better(ratios: Sequence[Ratio], one: dict[str, float], two: dict[str, float]) -> None:
    """Keep in ``one`` the better of each."""
    for ratio in ratios:
        if ratio.name in one and ratio.name in two:
            pick = max if ratio.more_is_better else min
            one[ratio.name] = pick(one[ratio.name], two[ratio.name])


def _show(found: Mapping[str, float], before: Mapping[str, float], worse: Sequence[str]) -> None:
    table = Table("ratio", "baseline", "now", "")
    for name, value in found.items():
        known = f"{before[name]:.3f}" if name in before else "new"
        table.add_row(name, known, f"{value:.3f}", "SLOWER" if name in worse else "")
    stderr.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="modules, as bench_flusher")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--record", action="store_true", help="as the new baseline")
    options = parser.parse_args()
    before: dict[str, float] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    found, worse = dict[str, float](), list[str]()
    for benchmark in BENCHMARKS:
        if options.only and benchmark.module not in options.only:
            continue
        taken = benchmark.run()
        if not options.record and slower(benchmark.ratios, taken, before, options.tolerance):
            stderr.print(f"{benchmark.module} looks slower: once more")
            _better(benchmark.ratios, taken, benchmark.run())
        found |= taken
        if options.record:  # at once: a benchmark that fails loses no other's
            BASELINE.write_text(json.dumps(before | found, indent=2) + "\n")
        else:
            worse += slower(benchmark.ratios, taken, before, options.tolerance)
    _show(found, before, worse)
    print(json.dumps({"ratios": found, "slower": worse}))  # noqa: T201
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
