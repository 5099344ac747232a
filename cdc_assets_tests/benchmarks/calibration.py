"""What this machine takes for fixed work, so that the CPU figures of two machines compare.

A benchmark runs it first, and prints its CPU figures beside their ratio to it. Cores that are slow
at everything leave the ratio as it is; a ratio that is worse on them shows work that they are worse
at than at this.
"""

from __future__ import annotations

import json
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_ROUNDS = 3
# After a reader's end: its backends end, and their server waits for them.
END_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Calibration:
    """CPU seconds of one thread for each kind of work; some 0.3 each on a core of 3 GHz."""

    numpy: float
    pyarrow: float
    python: float

    @property
    def seconds(self) -> float:
        return self.numpy + self.pyarrow + self.python

    def shown(self, **microseconds: float) -> dict[str, Any]:
        """For a benchmark's line: itself, and CPU figures in µs as parts of a million of it."""
        return {
            **{f"{kind}_seconds": round(taken, 3) for kind, taken in asdict(self).items()},
            "of_it": {name: round(us / self.seconds, 3) for name, us in microseconds.items()},
        }


def calibrate(say: Callable[[str], None]) -> Calibration:
    """The medians of some rounds."""
    works = (_numpy, _pyarrow, _python)
    found = Calibration(
        *(statistics.median(_timed(work) for _ in range(_ROUNDS)) for work in works)
    )
    say(f"calibration: {', '.join(f'{k} {v:.2f} s' for k, v in asdict(found).items())}")
    return found


def _timed(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _numpy() -> None:
    """Offsets of variable parts in a buffer, and gathering them, as the decoder does."""
    sizes = np.arange(4_000_000, dtype=np.int64) % 37
    ends = np.cumsum(sizes)
    buffer = np.arange(int(ends[-1]), dtype=np.int64).astype(np.uint8)
    for _ in range(2):
        marks = np.flatnonzero(buffer == 100)
        places = np.searchsorted(ends, marks)
        np.repeat(places[: 1 << 20], 4).sort()
        buffer[marks] = 100


def _pyarrow() -> None:
    """Text columns into a Parquet file in memory, and out of it again."""
    numbers = pa.array(np.arange(1_000_000, dtype=np.int64))
    text = pc.binary_join_element_wise(pc.cast(numbers, pa.string()), "0123456789abcdef", "-")
    table = pa.table({"id": numbers, "text": text})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    read = pq.ParquetFile(sink.getvalue()).read(use_threads=False)
    pc.sum(pc.utf8_length(read["text"]))


def _python() -> None:
    """Frames taken apart, and rows as JSON, one by one."""
    frame, found = struct.pack(">cqqq", b"w", 1, 2, 3) + b"x" * 100, 0
    for number in range(30_000):
        found += struct.unpack_from(">cqqq", frame)[1]
        found += len(json.loads(json.dumps({"id": number, "text": frame[30:60].decode()})))


def platform_cpu_seconds() -> float:
    """The CPU seconds so far of this process and its descendants that live, without Postgres."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if process.name() != "postgres":
                times = process.cpu_times()
                total += times.user + times.system
    return total


def server_cpu_seconds() -> float:
    """The CPU seconds so far of the Postgres servers that this process started.

    A backend counts once it has ended: its server has waited for it then.
    """
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            parent = process.parent()
            if process.name() == "postgres" and parent is not None and parent.name() != "postgres":
                times = process.cpu_times()
                total += times.children_user + times.children_system
    return total
