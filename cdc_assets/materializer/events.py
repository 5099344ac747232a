"""The rows of a batch as a DataFrame: Spark tasks read the staged files with pyarrow.

Each row comes with its log offset. ``log.batch`` reads the facts that decide how it is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.log.batch import Window, _selected
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry

EVENT_SCHEMA = "off bigint, op string, commit_lsn bigint, unchanged string, data string"
# For the modes that show when a row was changed; ``ts`` is in microseconds since 1970.
WHOLE_SCHEMA = f"{EVENT_SCHEMA}, lsn bigint, ts bigint, xid bigint"


def events(
    session: SparkSession,
    entries: Sequence[LogEntry],
    window: Window,
    storage: Storage,
    tasks: int,
    *,
    whole: bool = False,
) -> DataFrame:
    """The batch as a DataFrame of EVENT_SCHEMA, read by ``tasks`` Spark tasks at most.

    ``whole``: of WHOLE_SCHEMA.
    """
    files = tuple((entry.rows, entry.start_offset) for entry in entries)
    number = max(1, min(tasks, len(files)))
    shares = tuple(files[i::number] for i in range(number))
    return session.range(0, number, 1, number).mapInArrow(
        _event_reader(shares, window, storage, whole), WHOLE_SCHEMA if whole else EVENT_SCHEMA
    )


def _event_reader(
    shares: tuple[tuple[tuple[StagedRows, int], ...], ...],
    window: Window,
    storage: Storage,
    whole: bool,
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    def read(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in [n for batch in numbers for n in batch.column(0).to_pylist()]:
            for rows, start in shares[number]:
                columns = ["_op", "_commit_lsn", "_unchanged_cols", "_data"]
                if whole:
                    columns += ["_lsn", "_ts", "_xid"]
                table = rows.read(storage, columns)
                offsets, mask = _selected(table, start, window)
                chosen = table.filter(mask)
                found = {
                    "off": offsets.filter(mask),
                    "op": chosen["_op"].cast(pa.string()),
                    "commit_lsn": chosen["_commit_lsn"],
                    "unchanged": chosen["_unchanged_cols"],
                    "data": chosen["_data"].cast(pa.string()),
                }
                if whole:
                    found |= {
                        "lsn": chosen["_lsn"],
                        "ts": chosen["_ts"].cast(pa.int64()),
                        "xid": chosen["_xid"],
                    }
                yield from pa.table(found).to_batches(max_chunksize=20_000)

    return read
