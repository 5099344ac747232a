"""Staged files: waiting changes written as Parquet where every consumer can read them.

A file that is reported here exists, whole and durable: the acknowledgement to the source follows
(invariant 1), and what is acknowledged is never sent again. So a local file is synced, and its
folder; an object store shows an object only when its upload is complete. Names are random: a
restart can't meet a name again (a counter would overwrite live files). A file that was written, or
half of it, but never registered is an orphan, which maintenance removes: whatever stands below
``<uri>/<source>/`` and isn't in ``log_index``.

Nothing that was received is given up because it can't be stored: storing is tried again until it
works, and every failure is told (``on_trouble``), so that a person sees what is waited for. Only
before anything was received a place that waiting won't mend is refused (:func:`check_place`).

What does not belong: when to write (``decoder_process``), registration (``receiver``).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
)
from tenacity.wait import wait_random_exponential

from cdc_assets.errors import StagingProblem, first_line
from cdc_assets.flusher.staged_rows import invalid_text
from cdc_assets.flusher.waiting import Pending, decoded
from cdc_assets.log.files import RELATION_METADATA, STAGED_SCHEMA, Storage
from cdc_assets.postgres.names import TableId, safe_folder
from cdc_assets.postgres.pgoutput import Relation

logger = logging.getLogger(__name__)

# Between tries to store a file: random up to this, so that many writers don't come back at once.
LONGEST_WAIT_SECONDS = 15.0
# Files stored at a time: storing waits for disks and networks, not for the processor.
PARALLEL_WRITES = 8
# What waiting doesn't mend: of a file system …
_PERMANENT_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
# … and of an object store, as the AWS SDK calls it in its messages.
_PERMANENT_S3 = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "NO_SUCH_BUCKET",
    "SIGNATURE_DOES_NOT_MATCH",
)
_PARQUET: Mapping[str, Any] = {
    # The other columns are small as they are: compressing them takes a third of a small file's time
    # and saves 2 % of a large one's size.
    "compression": {name: "zstd" if name == "_data" else "none" for name in STAGED_SCHEMA.names},
    "compression_level": {"_data": 1},
    "use_dictionary": ["_op"],
    # These rise by little or stand still from row to row, which this encoding makes nearly free.
    "column_encoding": dict.fromkeys(("_lsn", "_commit_lsn", "_ts", "_xid"), "DELTA_BINARY_PACKED"),
    "write_statistics": False,
    "store_schema": False,  # plain strings for every reader, not Arrow's dictionary type
}


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A durable staged file that isn't registered yet; ``path`` is a URI."""

    table: TableId
    path: str
    byte_size: int
    operations: Mapping[str, int]
    """How many rows there are of each ``_op``."""

    @property
    def row_count(self) -> int:
        return sum(self.operations.values())


def folder_name(table: TableId) -> str:
    """The table's name where only letters, digits, ``_ . -`` are sure to be safe; unique.

    A name that had to be changed gets a hash, so that no two tables share a folder.
    """
    dotted = "." in table.schema + table.name  # a.b of c, or b.c of a?
    return safe_folder(f"{table.schema}.{table.name}", str(table) if dotted else None)


def _describe(relation: Relation) -> bytes:
    columns = [[c.name, c.type_oid, c.type_modifier, c.is_key] for c in relation.columns]
    told = {"oid": relation.oid, "identity": relation.replica_identity, "columns": columns}
    return json.dumps(told, ensure_ascii=False).encode()


def encode(pending: Pending, tables: Iterable[pa.Table]) -> tuple[pa.Buffer, Counter[str]]:
    """Parquet in memory, and how many rows it has of each ``_op``.

    Row groups are the decoder's batches, so no reader meets a huge one.
    """
    sink = pa.BufferOutputStream()
    operations, invalid = Counter[str](), 0
    with pq.ParquetWriter(sink, STAGED_SCHEMA, **_PARQUET) as writer:
        for table in tables:
            for found in pc.value_counts(table["_op"]).to_pylist():
                operations[found["values"]] += found["counts"]
            invalid += invalid_text(table)
            writer.write_table(table.replace_schema_metadata(), row_group_size=table.num_rows)
        writer.add_key_value_metadata({RELATION_METADATA: _describe(pending.relation)})
    if invalid:
        logger.warning(
            "%s: %d rows held bytes that are no UTF-8 text; each became U+FFFD",
            pending.spec.table,
            invalid,
        )
    return sink.getvalue(), operations


class Staging:
    """Writes staged files of one source below ``uri`` (``file:///…`` or ``s3://bucket/prefix``).

    ``on_trouble`` is called, by one thread at a time, with each failure to store a file, before it
    is waited for; what it raises ends the try.
    """

    def __init__(
        self,
        uri: str,
        source: str,
        storage: Storage,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._base = f"{uri.rstrip('/')}/{source}"
        self._storage = storage
        self._on_trouble = on_trouble
        self._trouble = threading.Lock()
        self._closing = threading.Event()
        self._writers = ThreadPoolExecutor(PARALLEL_WRITES, "staging")

    def write(self, pendings: Iterable[Pending]) -> list[WrittenFile]:
        """One file for each, in their order; all are durable when this returns.

        However long that takes. Raises ReplicationProblem when a message can't be decoded.
        """
        today = datetime.now(UTC).date().isoformat()
        pendings = list(pendings)
        written: list[WrittenFile | None] = [None] * len(pendings)
        stored = []
        for number, rows in groupby(decoded(pendings), key=itemgetter(0)):
            pending = pendings[number]
            data, operations = encode(pending, (table for _, table in rows))
            table = pending.spec.table
            path = f"{self._base}/{folder_name(table)}/{today}/{uuid.uuid4().hex}.parquet"
            stored.append(self._writers.submit(self._store, path, data))
            written[number] = WrittenFile(table, path, data.size, operations)
        for future in stored:
            future.result()
        return [file for file in written if file is not None]

    def close(self) -> None:
        """Give up what is being stored."""
        self._closing.set()
        self._writers.shutdown(cancel_futures=True)

    def _store(self, uri: str, data: pa.Buffer) -> None:
        for attempt in Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_random_exponential(multiplier=0.2, max=LONGEST_WAIT_SECONDS),
            stop=stop_when_event_set(self._closing),
            sleep=sleep_using_event(self._closing),
            before_sleep=self._tell,
            reraise=True,
        ):
            with attempt:
                store(self._storage, uri, data)

    def _tell(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        waits = state.next_action.sleep if state.next_action is not None else 0.0
        said = first_line(error) if error is not None else "no reason"
        logger.warning("a file can't be stored: %s; trying again in %.1f s", said, waits)
        with self._trouble:
            self._on_trouble(said)


def check_place(uri: str, source: str, storage: Storage) -> None:
    """Store a small file, to see whether it can be done.

    Raises StagingProblem for what somebody has to correct. A place that is full or down for now is
    only logged: the flusher waits for it, and the slot keeps what it waits with.
    """
    probe = f"{uri.rstrip('/')}/{source}/.writable"
    try:
        store(storage, probe, pa.py_buffer(b"cdc_assets can write here\n"))
    except OSError as error:
        said = first_line(error)
        if error.errno in _PERMANENT_ERRNOS or any(name in said for name in _PERMANENT_S3):
            raise StagingProblem(
                f"the staging place {uri} can't be written: {said}.",
                "Correct staging.uri (and s3:), or what stands in the way: the folder or the bucket"
                " must exist and allow this process to write"
                + ("; its keys come from AWS_… variables." if uri.startswith("s3://") else "."),
            ) from error
        logger.warning("the staging place %s can't be written now: %s", uri, said)


def store(storage: Storage, uri: str, data: pa.Buffer) -> None:
    """Write one file durably; under a name that is taken, the new content wins. Raises OSError."""
    filesystem, path = storage.locate(uri)
    if isinstance(filesystem, fs.LocalFileSystem):
        _store_durably(Path(path), data)
        return
    with filesystem.open_output_stream(path) as stream:
        stream.write(data)


def _store_durably(path: Path, data: pa.Buffer) -> None:
    """Write a local file: once this returns, it is there whole after a power cut, too.

    Until then nobody looks at it: only what is registered is read.
    """
    try:
        file = path.open("wb")
    except FileNotFoundError:
        _make_durably(path.parent)
        file = path.open("wb")
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):  # the half of a file would fill a full disk even more
            path.unlink()
        raise
    _sync(path.parent)


def _make_durably(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_durably(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
