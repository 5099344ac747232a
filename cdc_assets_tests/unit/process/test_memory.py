"""A process that works in batches keeps what it freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Batches of 100 MB of NumPy's and of Arrow's, in a thread, as merges are; prints how many pages
# the kernel had to clear for the last four, and whether memory is kept.
_BATCHES = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
import numpy as np, pyarrow as pa, pyarrow.compute as pc
from cdc_assets.process.memory import keep_freed

def batch():
    parts = [np.ones(2**19) for _ in range(12)]
    return [pc.add(pa.array(part), 1.0) for part in parts]

def run(count):
    for _ in range(count):
        del pool.submit(batch).result()[:]

pool = ThreadPoolExecutor(1)
kept = keep_freed(256 * 2**20) if sys.argv[1] == "keep" else False
run(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
run(4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, kept)
"""


def _faults(how: str) -> tuple[int, bool]:
    done = subprocess.run(
        [sys.executable, "-c", _BATCHES, how], capture_output=True, text=True, check=True
    )
    faults, kept = done.stdout.split()
    return int(faults), kept == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_the_kernel_clears_no_pages_for_the_next_batch() -> None:
    (without, _), (faults, kept) = _faults("not"), _faults("keep")
    if not kept:
        pytest.skip("a C library without mallopt")
    assert without > 10_000
    assert faults < without / 10
