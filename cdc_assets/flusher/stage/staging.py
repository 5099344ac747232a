"""Staged files: waiting changes written as Parquet where every consumer can read them.

A file that is reported here exists, whole and durable: the acknowledgement to the source follows
(invariant 1), and what is acknowledged is never sent again. So a local file and its folder are
synced; an object store shows an object only when its upload is complete. Names are random, so a
restart can't meet a name again (a counter would overwrite live files). A file that was written,
perhaps half, but never registered is an orphan: anything below ``<uri>/<source>/`` that isn't in
``log_index``. Maintenance removes orphans.

Received changes are never given up because they can't be stored: storing is tried again until it
works, and every failure is reported (``on_trouble``), so that a person sees the cause. A place that
waiting won't mend is refused only before anything was received (:func:`check_place`).

Elsewhere: when to write (``decoder_process.loop``), registration (``registrar``).
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter

import pyarrow as pa
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    sleep_using_event,
    stop_when_event_set,
)
from tenacity.wait import wait_random_exponential

from cdc_assets.errors import first_line
from cdc_assets.flusher.decode.waiting import Pending, decoded
from cdc_assets.flusher.stage.parquet import Waiting, encode, encode_shared
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.staged.storage import SHARED_FOLDER, Storage, folder_name, store
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation

logger = logging.getLogger(__name__)

# Between tries to store a file: random up to this, so that many writers don't come back at once.
LONGEST_WAIT_SECONDS = 15.0
# Files stored at a time: storing waits for disks and networks, not for the processor.
PARALLEL_WRITES = 8
# A table with less than this to write shares a file with others …
SMALL_BYTES = 256 * 2**10
# … until the file has this: large enough to be worth a file, small enough to read for one table.
SHARED_FILE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class WrittenRows(StagedRows):
    """Rows that were just staged, counted by ``_op``."""

    operations: Mapping[str, int] = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Rows of one table under one relation, in the staged schema."""

    table: TableId
    relation: Relation
    rows: Sequence[pa.Table]

    @property
    def byte_size(self) -> int:
        return sum(table.nbytes for table in self.rows)


class _Files:
    """The files of one ``write``; ``submit`` stores each in a folder, under the path it returns."""

    def __init__(
        self,
        pendings: Sequence[Waiting],
        submit: Callable[[str, pa.Buffer], tuple[str, Future[None]]],
    ) -> None:
        self._pendings = pendings
        self._submit = submit
        self._written: dict[int, WrittenRows] = {}
        self._storing: list[Future[None]] = []

    def add(self, number: int, tables: Iterable[pa.Table]) -> None:
        """Write the rows of the pending with this number to a file of their own."""
        table = self._pendings[number].table
        data, operations = encode(self._pendings[number], tables)
        path = self._store(folder_name(table), data)
        digest = hashlib.sha256(data).digest()
        self._written[number] = WrittenRows(
            table, path, operations.total(), data.size, None, digest, operations=operations
        )

    def add_shared(self, pieces: Mapping[int, Sequence[pa.Table]]) -> None:
        """Write the rows of these pendings to one file."""
        data, found = encode_shared([(self._pendings[n], tables) for n, tables in pieces.items()])
        path = self._store(SHARED_FOLDER, data)
        digest = hashlib.sha256(data).digest()
        row_bytes = data.size / sum(operations.total() for _, operations in found)
        for number, (first_row, operations) in zip(pieces, found, strict=True):
            self._written[number] = WrittenRows(
                self._pendings[number].table,
                path,
                operations.total(),
                math.ceil(row_bytes * operations.total()),
                first_row,
                digest,
                operations=operations,
            )

    def _store(self, folder: str, data: pa.Buffer) -> str:
        path, storing = self._submit(folder, data)
        self._storing.append(storing)
        return path

    def stored(self) -> list[WrittenRows]:
        """The rows of each pending, in order, once all files are durable."""
        for storing in self._storing:
            storing.result()
        return [self._written[number] for number in sorted(self._written)]


class Staging:
    """Writes staged files of one source below ``uri`` (``file:///…`` or ``s3://bucket/prefix``).

    ``on_trouble`` is called, by one thread at a time, with each failure to store a file, before the
    wait for the next try; an exception of it ends the tries.
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

    def write(self, pendings: Iterable[Pending]) -> list[WrittenRows]:
        """Write the rows of each, a table's in their order; all are durable when this returns.

        It waits however long that takes. Raises ReplicationProblem if a message can't be decoded.
        """
        # A fixed order, so that the same tables share files: a file lives until all of its tables
        # are past it.
        pendings = sorted(pendings, key=lambda pending: pending.relation.oid)
        return self._write(pendings, decoded(pendings))

    def write_rows(self, rows: Iterable[ReadyRows]) -> list[WrittenRows]:
        """Write rows that are staged as they are; all are durable when this returns."""
        ready = sorted(rows, key=lambda one: one.relation.oid)
        return self._write(ready, ((n, rows) for n, one in enumerate(ready) for rows in one.rows))

    def _write(
        self, pendings: Sequence[Waiting], numbered: Iterable[tuple[int, pa.Table]]
    ) -> list[WrittenRows]:
        files = _Files(pendings, self._submit)
        small = {i for i, pending in enumerate(pendings) if pending.byte_size < SMALL_BYTES}
        shared: dict[int, list[pa.Table]] = {}
        shared_bytes = 0
        for number, rows in groupby(numbered, key=itemgetter(0)):
            tables = (table for _, table in rows)
            if number not in small or len(small) == 1:
                files.add(number, tables)
                continue
            shared[number] = list(tables)
            shared_bytes += pendings[number].byte_size
            if shared_bytes >= SHARED_FILE_BYTES:
                files.add_shared(shared)
                shared, shared_bytes = {}, 0
        if shared:
            files.add_shared(shared)
        return files.stored()

    def _submit(self, folder: str, data: pa.Buffer) -> tuple[str, Future[None]]:
        """Start to store a file under a new name; returns name and future."""
        today = datetime.now(UTC).date().isoformat()
        path = f"{self._base}/{folder}/{today}/{uuid.uuid4().hex}.parquet"
        return path, self._writers.submit(self._store, path, data)

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
