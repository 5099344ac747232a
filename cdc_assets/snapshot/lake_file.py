"""The Parquet file that a task of a copy writes its claim's rows to.

How a column is written follows its first values: what repeats, in a dictionary. A local file is
compressed for speed, one that is sent for size.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.parquet as pq

from cdc_assets.snapshot.convert import SAMPLE, LakeField, convert, repeats

# Arrow bytes that become one row group: what a task keeps in memory, times two.
ROW_GROUP_BYTES = 64 * 2**20

# Snappy takes half of zstd's CPU, for files half as large again.
_LOCAL: dict[str, Any] = {"compression": "snappy"}
_REMOTE: dict[str, Any] = {"compression": "zstd", "compression_level": 1}


class LakeFile:
    """A Parquet file that is created with its first row; deleted if the block raises.

    ``like``: an earlier file of these fields, whose first values count for this one, too.
    """

    def __init__(
        self,
        location: str,
        io: Mapping[str, str],
        epoch: int,
        fields: Sequence[LakeField],
        *,
        like: LakeFile | None = None,
    ) -> None:
        self._location, self._io = location, io
        self._fields = list(fields)
        self._schema = pa.schema([field.arrow for field in fields])
        self._name = f"{location}/{epoch:04d}-{uuid.uuid4()}.parquet"
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._few: list[str] | None = None if like is None else like._few
        self.path: str | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        self._waiting.append(convert(batch, self._fields, self._schema))
        self._waiting_bytes += batch.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def _write_group(self) -> None:
        group = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting, self._waiting_bytes = [], 0
        if self._writer is None:
            self._writer = self._open(group)
        self._writer.write_table(group, row_group_size=max(1, group.num_rows))

    def _open(self, first: pa.Table) -> pq.ParquetWriter:
        """A writer for values like those of ``first``."""
        if self._few is None:
            leaves = zip(_leaves(self._schema), first[:SAMPLE].columns, strict=True)
            self._few = [leaf for leaf, values in leaves if repeats(values.combine_chunks())]
        self.path = self._name
        self._stream = self._create()
        return pq.ParquetWriter(
            self._stream,
            self._schema,
            use_dictionary=self._few,
            store_decimal_as_integer=True,  # as the specification has it
            **_REMOTE if _local(self._name) is None else _LOCAL,
        )

    def _create(self) -> Any:
        if (local := _local(self._name)) is not None:
            local.parent.mkdir(parents=True, exist_ok=True)
            return pa.OSFile(str(local), "wb")
        return self._file_io().new_output(self._name).create(overwrite=True)

    def delete(self) -> None:
        if self.path is None:
            return
        if (local := _local(self.path)) is not None:
            local.unlink(missing_ok=True)
        else:
            self._file_io().delete(self.path)

    def _file_io(self) -> Any:
        from pyiceberg.io import load_file_io  # most of a second of CPU, which local files save

        return load_file_io(dict(self._io), self._location)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        complete = False
        try:
            if kind is None and self._waiting:
                self._write_group()
            complete = kind is None
        finally:
            if self._writer is not None:
                self._writer.close()
                self._stream.close()
                if not complete:
                    self.delete()


def _local(uri: str) -> Path | None:
    """The path of a ``file:`` URI, taken literally, as Iceberg does."""
    parsed = urlparse(uri)
    return Path(parsed.path) if parsed.scheme == "file" else None


def _leaves(schema: pa.Schema) -> list[str]:
    """The columns as Parquet calls them."""
    return [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in schema
    ]
