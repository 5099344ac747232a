"""The decoder process as the flusher sees it, and the messages between them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from cdc_assets.flusher.decode.markers import Marker
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.stage.staging import WrittenRows
from cdc_assets.log.staged.storage import Storage
from cdc_assets.postgres.names import TableId
from cdc_assets.process.traces import log_level

# A batch's memory is given back as a whole, so the peaks of NumPy and of Arrow don't add up: 40 MB
# less. Any smaller threshold makes the kernel clear pages all the time, at twice the CPU.
_ALLOCATION = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(3 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}
# NumPy begins threads for linear algebra, of which there is none: 80 ms of CPU.
_NO_ALGEBRA = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for the decoder's whole life.

    ``begin``: the LSN that the stream begins at; ``until``: one that somebody waits for, who wants
    what is below it without delay; ``markers``: the table of markers.
    """

    source: str
    source_dsn: str = field(repr=False)
    publication: str
    staging_uri: str
    storage: Storage
    flush_bytes: int
    flush_interval_seconds: float
    begin: int
    markers: TableId | None = None
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Specs:
    """From here on tables are staged like this, by oid."""

    by_oid: Mapping[int, DecodeSpec]


@dataclass(frozen=True, slots=True)
class Frames:
    """``lengths``: int32s, native order, of the frames whose joined bytes follow on the pipe.

    ``gap``: how many other bytes are before each.
    """

    lengths: bytes
    gap: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Stage what is complete, report it with ``final``, and end."""


@dataclass(frozen=True, slots=True)
class Consumed:
    """A batch of so many bytes was taken in; so many bytes wait in the decoder's memory."""

    byte_size: int
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """Staged rows in commit order. ``position``: safe to acknowledge once they are registered.

    ``commit_end`` and ``commit_time``: of the last transaction in them. ``markers``: of that one.
    """

    staged: tuple[WrittenRows, ...]
    position: int
    commit_end: int
    commit_time: datetime | None
    seconds: float
    final: bool = False
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True, slots=True)
class Retrying:
    """A staged file couldn't be stored, for ``reason``. Any other reply means that it now is."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The decoder can't go on; ``trace`` is its traceback."""

    summary: str
    trace: str


@dataclass(frozen=True, slots=True)
class Excluded:
    """Attribute numbers of excluded columns, and rules of masked ones by attribute number.

    Columns in ``doubtful``, which weren't staged, may be wanted ones.
    """

    table: TableId
    numbers: frozenset[int]
    doubtful: tuple[str, ...]
    masked: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Refused:
    """Changes of a table aren't staged, for ``reason``; only a new copy makes its log whole again.

    ``commit_lsn``: of the last such change's transaction.
    """

    table: TableId
    commit_lsn: int
    reason: str


def send_frames(
    pipe: Connection, lengths: npt.NDArray[np.int32], blob: bytes | memoryview, gap: int = 0
) -> None:
    """Send :class:`Frames`, and their joined bytes. Raises OSError."""
    pipe.send(Frames(lengths.tobytes(), gap))
    _send_blob(pipe, blob)


def _send_blob(pipe: Connection, blob: bytes | memoryview) -> None:
    left = memoryview(blob)
    while left:
        left = left[os.write(pipe.fileno(), left) :]


def received_blob(pipe: Connection, byte_size: int) -> memoryview:
    """What follows :class:`Frames`, as it was read: ``recv_bytes`` would copy it once more.

    Raises EOFError or OSError.
    """
    left = blob = np.empty(byte_size, np.uint8).data  # nothing is cleared first
    while left:
        if not (got := os.readv(pipe.fileno(), [left])):
            raise EOFError
        left = left[got:]
    return blob


class DecoderProcess:
    """The receiver's end: starts the process, ends it for sure.

    Raises ConfigurationError if ``CDC_ASSETS_LOG_LEVEL`` is no level.
    """

    def __init__(self, settings: Settings) -> None:
        environment = {
            **os.environ,
            **_ALLOCATION,
            **_NO_ALGEBRA,
            "CDC_ASSETS_LOG_LEVEL": log_level(),
        }
        self.pipe, theirs = Pipe()
        # A fresh interpreter, not multiprocessing's spawn: that would import the caller's main
        # module again (a whole Dagster code server), and leave a resource tracker behind.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cdc_assets.flusher.decoder_process.main", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self.pipe.send(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End the process at once; the pipe then reports its end, and stays open until close.

        A file it was storing is an orphan, as after any crash.
        """
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_seconds: float) -> int | None:
        """Its exit code, None if it is still there after ``timeout_seconds``."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self.pipe.close()
