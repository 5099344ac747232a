"""The staged file: its schema, and how its rows are read.

Every staged file of every table has this one schema, for ever (design: the staged file). A row says
what happened to one row of the source; the values are Postgres's text forms.

``_commit_lsn`` is the LSN of the transaction's commit record. A transaction is visible in a
snapshot pinned at c exactly if its commit record begins below c, so a row is in the snapshot iff
``_commit_lsn < c``: the cut between copy and log is exact per row, wherever a file begins or ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cdc_assets.errors import StagedFileChanged
from cdc_assets.log.staged.storage import Storage
from cdc_assets.postgres.names import TableId

STAGED_SCHEMA = pa.schema(
    [
        pa.field("_op", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("_lsn", pa.int64(), nullable=False),
        pa.field("_commit_lsn", pa.int64(), nullable=False),
        pa.field("_ts", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("_xid", pa.int64(), nullable=False),
        pa.field("_unchanged_cols", pa.string()),
        pa.field("_data", pa.large_string(), nullable=False),
    ]
)


# Metadata key of a staged file for its rows' columns and their types.
_RELATION_METADATA = "cdc_assets.relation"

# The member of `_data` that carries the old key of a key change: no Postgres identifier is empty.
OLD_KEY = ""


@dataclass(frozen=True, slots=True)
class StagedRows:
    """A table's rows in a durable staged file: a whole file, or a part of a shared one.

    ``path``: a URI. ``byte_size``: of the file, or the rows' share of a shared one. ``first_row``:
    the number of the first row in a shared file, else None. ``sha256``: the digest of the file's
    bytes, None in entries that a version without digests registered.
    """

    table: TableId
    path: str
    row_count: int
    byte_size: int
    first_row: int | None = None
    sha256: bytes | None = None

    def read(self, storage: Storage, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows, in order. Raises FileNotFoundError if the file is gone, StagedFileChanged."""
        return self.opened(storage).read(columns)

    def opened(self, storage: Storage) -> OpenedRows:
        """The opened file, for several reads of the same bytes. Raises like :meth:`read`."""
        return OpenedRows(self, pq.ParquetFile(self._bytes(storage), pre_buffer=True))

    def _bytes(self, storage: Storage) -> pa.NativeFile:
        """The file to parse; with a digest, the very bytes in memory that were verified."""
        filesystem, path = storage.locate(self.path)
        opened = filesystem.open_input_file(path)
        if self.sha256 is None:
            return opened
        with opened:
            data = opened.read_buffer()
        if hashlib.sha256(data).digest() != self.sha256:
            raise StagedFileChanged(self.path)
        return pa.BufferReader(data)


@dataclass(frozen=True, slots=True)
class OpenedRows:
    """The rows of an entry in a file already read and verified; later changes don't matter."""

    rows: StagedRows
    file: pq.ParquetFile

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows, in order."""
        table = self.file.read(columns)
        if self.rows.first_row is None:
            return table
        return table.slice(self.rows.first_row, self.rows.row_count)

    def relation(self) -> Any:
        """The relation of the rows' table in the file's metadata, as parsed JSON."""
        return json.loads(self.file.metadata.metadata[relation_key(self.rows.first_row)])


def relation_key(first_row: int | None) -> bytes:
    """The metadata key of the relation; in a shared file, of the rows from ``first_row`` on."""
    return (_RELATION_METADATA + ("" if first_row is None else f".{first_row}")).encode()
