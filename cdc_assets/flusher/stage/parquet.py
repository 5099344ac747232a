"""Staged rows as Parquet: a file of one table, or one that small tables share.

A file costs a fraction of a millisecond and an upload, however little is in it, and a flush of a
thousand tables would write a thousand files. So tables with little to write share files. The log
records which rows are a table's (``first_row`` of an entry), the file records their columns.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cdc_assets.flusher.decode.rows import invalid_text
from cdc_assets.log.staged.files import STAGED_SCHEMA, relation_key
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation

logger = logging.getLogger(__name__)

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


class Waiting(Protocol):
    """Rows of one table under one relation that wait to be written."""

    @property
    def table(self) -> TableId: ...

    @property
    def relation(self) -> Relation: ...

    @property
    def byte_size(self) -> int: ...


def encode(pending: Waiting, tables: Iterable[pa.Table]) -> tuple[pa.Buffer, Counter[str]]:
    """Encode one table's file in memory; returns it, and its rows counted by ``_op``.

    Row groups are the decoder's batches, so no reader meets a huge one.
    """
    sink = pa.BufferOutputStream()
    operations = Counter[str]()
    with pq.ParquetWriter(sink, STAGED_SCHEMA, **_PARQUET) as writer:
        for table in tables:
            operations.update(_operations(pending, table))
            writer.write_table(table.replace_schema_metadata(), row_group_size=table.num_rows)
        writer.add_key_value_metadata({relation_key(None): _describe(pending.relation)})
    return sink.getvalue(), operations


def encode_shared(
    pieces: Sequence[tuple[Waiting, Sequence[pa.Table]]],
) -> tuple[pa.Buffer, list[tuple[int, Counter[str]]]]:
    """Encode the pieces, one after the other, as one file in memory.

    Also returns for each piece its first row in the file, and its rows counted by ``_op``.
    """
    found: list[tuple[int, Counter[str]]] = []
    relations: dict[bytes, bytes] = {}
    row = 0
    for pending, tables in pieces:
        relations[relation_key(row)] = _describe(pending.relation)
        found.append((row, Counter[str]()))
        for table in tables:
            found[-1][1].update(_operations(pending, table))
            row += table.num_rows
    rows = pa.concat_tables([table for _, tables in pieces for table in tables])
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, STAGED_SCHEMA, **_PARQUET) as writer:
        writer.write_table(rows.replace_schema_metadata(), row_group_size=row)
        writer.add_key_value_metadata(relations)
    return sink.getvalue(), found


def _operations(pending: Waiting, table: pa.Table) -> Counter[str]:
    """The rows counted by ``_op``; logs how many had text that was repaired."""
    if invalid := invalid_text(table):
        logger.warning(
            "%s: %d rows held bytes that are no UTF-8 text; each became U+FFFD",
            pending.table,
            invalid,
        )
    found = Counter[str]()
    for chunk in table["_op"].chunks:  # a flush of many tables has as many tables of few rows
        counts = np.bincount(chunk.indices.to_numpy()).tolist()
        found.update(dict(zip(chunk.dictionary.to_pylist(), counts, strict=False)))
    return +found


def _describe(relation: Relation) -> bytes:
    columns = [[c.name, c.type_oid, c.modifier, c.is_key] for c in relation.columns]
    told = {"oid": relation.oid, "identity": relation.replica_identity, "columns": columns}
    return json.dumps(told, ensure_ascii=False).encode()
