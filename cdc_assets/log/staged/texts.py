"""The members of staged ``_data`` as columns of text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

# The reader's block sizes are 32 bits; one block holds a whole part.
_PART_BYTES = 2**30


def texts(data: pa.ChunkedArray, names: Sequence[str]) -> pa.Table:
    """The members ``names`` of each JSON object of ``data``; NULL where it is null or not there.

    ``data``: any type of text, without NULL, as the flusher wrote it. Raises ArrowInvalid for what
    is anything else.
    """
    schema = pa.schema([(name, pa.string()) for name in names])
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    tables = [schema.empty_table()]
    for chunk in data.cast(pa.large_string()).chunks:
        count = chunk.offset + len(chunk) + 1  # a buffer may be longer
        ends = np.frombuffer(chunk.buffers()[1], np.int64, count)[chunk.offset :]
        at = 0
        while at < len(chunk):
            until = int(np.searchsorted(ends, ends[at] + _PART_BYTES, "right")) - 1
            until = max(at + 1, until)
            size = int(ends[until] - ends[at])
            text = pa.BufferReader(chunk.buffers()[2].slice(int(ends[at]), size))
            block = pj.ReadOptions(use_threads=False, block_size=size + 1)
            tables.append(pj.read_json(text, read_options=block, parse_options=options))
            at = until
    found = pa.concat_tables(tables)
    if len(found) != len(data):
        raise pa.ArrowInvalid(f"{len(data)} rows of staged data are {len(found)} JSON objects")
    return found.select(list(names))
