"""Staged files: waiting changes written as Parquet where every consumer can read them.

A file that is reported here exists, whole and durable: the acknowledgement to the source follows
(invariant 1), and what is acknowledged is never sent again. So a local file is written under
another name, synced, renamed, and its folder synced; an object store shows an object only when its
upload is complete. Names are random: a restart can't meet a name again (a counter would overwrite
live files). A file that was written but never registered is an orphan, which maintenance removes.

What does not belong: when to write (``decoder_process``), registration (``receiver``).
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from tenacity import Retrying, before_sleep_log, retry_if_exception_type, stop_after_delay
from tenacity.wait import wait_random_exponential

from cdc_assets.flusher.decoder import Pending
from cdc_assets.flusher.staged_rows import invalid_text
from cdc_assets.log.files import RELATION_METADATA, STAGED_SCHEMA, Storage
from cdc_assets.postgres.names import TableId, safe_folder
from cdc_assets.postgres.pgoutput import Relation

logger = logging.getLogger(__name__)

# An object store that fails for longer ends the flusher; its supervisor starts it again.
UPLOAD_PATIENCE_SECONDS = 60
# Files stored at a time: storing waits for disks and networks, not for the processor.
PARALLEL_WRITES = 8
# These rise by little or stand still from row to row, which this encoding makes nearly free.
_ENCODINGS = dict.fromkeys(("_lsn", "_commit_lsn", "_ts", "_xid"), "DELTA_BINARY_PACKED")


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A durable staged file that isn't registered yet; ``path`` is a URI."""

    table: TableId
    path: str
    row_count: int
    byte_size: int


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


def encode(pending: Pending) -> tuple[pa.Buffer, int]:
    """Decode and write Parquet into memory: its bytes, and how many rows it has.

    Row groups are the decoder's batches, so no reader meets a huge one. Raises ReplicationProblem.
    """
    sink = pa.BufferOutputStream()
    rows = invalid = 0
    with pq.ParquetWriter(
        sink,
        STAGED_SCHEMA,
        compression="zstd",
        compression_level=1,
        use_dictionary=["_op"],
        column_encoding=_ENCODINGS,
        write_statistics=False,
        store_schema=False,  # plain strings for every reader, not Arrow's dictionary type
    ) as writer:
        for table in pending.tables():
            rows += table.num_rows
            invalid += invalid_text(table)
            writer.write_table(table.cast(STAGED_SCHEMA), row_group_size=table.num_rows)
        writer.add_key_value_metadata({RELATION_METADATA: _describe(pending.relation)})
    if invalid:
        logger.warning(
            "%s: %d rows held bytes that are no UTF-8 text; each became U+FFFD",
            pending.spec.table,
            invalid,
        )
    return sink.getvalue(), rows


class Staging:
    """Writes staged files of one source below ``uri`` (``file:///…`` or ``s3://bucket/prefix``)."""

    def __init__(self, uri: str, source: str, storage: Storage) -> None:
        self._base = f"{uri.rstrip('/')}/{source}"
        self._storage = storage
        self._filesystem, _ = storage.locate(uri)
        self._writers = ThreadPoolExecutor(PARALLEL_WRITES, "staging")

    def write(self, pendings: Iterable[Pending]) -> list[WrittenFile]:
        """One file for each, in their order; all are durable when this returns.

        Raises OSError when storing fails for UPLOAD_PATIENCE_SECONDS, ReplicationProblem when a
        message can't be decoded.
        """
        today = datetime.now(UTC).date().isoformat()
        written, stored = [], []
        for pending in pendings:
            data, rows = encode(pending)
            table = pending.spec.table
            path = f"{self._base}/{folder_name(table)}/{today}/{uuid.uuid4().hex}.parquet"
            stored.append(self._writers.submit(self._store, path, data))
            written.append(WrittenFile(table, path, rows, data.size))
        for future in stored:
            future.result()
        return written

    def close(self) -> None:
        self._writers.shutdown(cancel_futures=True)

    def _store(self, uri: str, data: pa.Buffer) -> None:
        _, path = self._storage.locate(uri)
        if isinstance(self._filesystem, fs.LocalFileSystem):
            _store_durably(Path(path), data)
            return
        for attempt in Retrying(
            retry=retry_if_exception_type(OSError),
            wait=wait_random_exponential(multiplier=0.2, max=10),
            stop=stop_after_delay(UPLOAD_PATIENCE_SECONDS),
            before_sleep=before_sleep_log(logger, logging.WARNING),
            reraise=True,
        ):
            with attempt, self._filesystem.open_output_stream(path) as stream:
                stream.write(data)


def _store_durably(path: Path, data: pa.Buffer) -> None:
    """Write a local file so that after a power cut it is there whole, or not at all."""
    _make_durably(path.parent)
    hidden = path.with_name(f".{path.name}.tmp")
    with hidden.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(path)
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
