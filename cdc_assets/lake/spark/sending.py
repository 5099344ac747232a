"""Rows that go along with statements, in a form that costs Spark little.

Each rule by which Spark plans a statement goes through the rows in it, and casts of them are
evaluated one by one while it is planned. So the rows are packed: some thousands of them are one row
of the plan, and are taken apart by the tasks, in compiled code; by several only where it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

# A task's share is a number of these …
_PACKED_BYTES = 2**20
# … and at least so much: each task that appends writes a file of its own, and every later merge
# opens all files of the table.
_TASK_BYTES = 16 * 2**20
# Of rows that a statement has several times.
_REPEATED_BYTES = 8 * 2**20
_CACHED_FROM = "spark.sql.session.localRelationCacheThreshold"


def sent(session: SparkSession, table: pa.Table) -> DataFrame:
    """The rows of ``table`` as a DataFrame with its columns."""
    rows = table.to_struct_array()
    rows = rows.combine_chunks() if isinstance(rows, pa.ChunkedArray) else rows
    pieces = max(1, min(len(rows), -(-table.nbytes // _PACKED_BYTES)))
    ends = np.linspace(0, len(rows), pieces + 1).astype(np.int32)
    packed = pa.table({"packed": pa.ListArray.from_arrays(pa.array(ends), rows)})
    tasks = max(1, table.nbytes // _TASK_BYTES)
    return session.createDataFrame(packed).coalesce(tasks).select(F.inline("packed"))


def repeated(
    session: SparkSession, rows: Sequence[tuple[Any, ...]], schema: StructType
) -> DataFrame:
    """``rows`` as a DataFrame that statements name several times, each within one plan.

    Many of them are sent once, for all of these, since a statement with as many copies might be
    larger than a server takes; but the server keeps them until the session ends.
    """
    before = session.conf.get(_CACHED_FROM)
    session.conf.set(_CACHED_FROM, str(_REPEATED_BYTES))
    try:
        return session.createDataFrame(rows, schema)
    finally:
        session.conf.set(_CACHED_FROM, str(before))
