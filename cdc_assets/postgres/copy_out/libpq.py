"""A session that only libpq can read (GSS): an object for each row, into the same reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from cdc_assets.postgres.copy_out.kinds import Kind
from cdc_assets.postgres.copy_out.tuples import (
    BATCH_BYTES,
    HEADER,
    SLACK_BYTES,
    TRAILER,
    broken,
)
from cdc_assets.postgres.copy_out.values import batch_of
from cdc_assets.postgres.session.messages import COPY_DATA, PREFIX


class LibpqSession:
    """A session whose bytes only libpq can read: an object for each row."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def execute(self, statement: str) -> None:
        self._connection.execute(statement.encode())

    def read(self, query: str, kinds: Sequence[Kind]) -> Iterator[pa.RecordBatch]:
        ended = False
        copy_out = f"copy ({query}) to stdout (format binary)"
        try:
            with self._connection.cursor() as cursor, cursor.copy(copy_out.encode()) as copy:
                rows, size, header = list[bytes](), 0, True
                while row := copy.read():
                    row = bytes(row)
                    if header:
                        row, header = row[HEADER.size + HEADER.unpack_from(row)[2] :], False
                    if row and row != TRAILER:
                        if not row.startswith(len(kinds).to_bytes(2)):
                            raise broken(f"a row has another number of fields than {len(kinds)}")
                        rows.append(row)
                        size += len(row)
                    if size >= BATCH_BYTES:
                        yield _joined(rows, kinds)
                        rows, size = [], 0
                if rows:
                    yield _joined(rows, kinds)
            ended = True
        except psycopg.Error as error:
            ended = error.diag.sqlstate is not None  # the server's own, which ends its answer
            raise
        finally:
            if not ended:
                self.close()

    def close(self) -> None:
        self._connection.close()


def _joined(rows: Sequence[bytes], kinds: Sequence[Kind]) -> pa.RecordBatch:
    """The rows as a server's messages, read from one buffer."""
    messages = [part for row in rows for part in (PREFIX.pack(COPY_DATA, 4 + len(row)), row)]
    buffer = np.frombuffer(bytearray().join([*messages, bytes(SLACK_BYTES)]), np.uint8)
    return batch_of(buffer, 0, len(rows), kinds)
