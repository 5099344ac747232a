"""The rows of a batch, here or as a DataFrame: Spark tasks read the staged files with pyarrow.

Each row comes with its log offset. ``log.batch`` reads the facts that decide how it is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.log.batch import Window, selected
from cdc_assets.log.staged.files import StagedRows
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry

EVENT_SCHEMA = "off bigint, op string, commit_lsn bigint, unchanged string, data string"
# For the modes that show when a row was changed; ``ts`` is in microseconds since 1970.
WHOLE_SCHEMA = f"{EVENT_SCHEMA}, lsn bigint, ts bigint, xid bigint"

# Files that are read at once: of a store, each is mostly a wait.
_READERS = 4


class Events(Protocol):
    """Changes of rows that a merge applies in one commit; see :class:`Batch`."""

    @property
    def entries(self) -> Sequence[LogEntry]: ...

    def rows(self, most_bytes: int) -> pa.Table | None: ...

    def frame(self, session: SparkSession, tasks: int, *, whole: bool = False) -> DataFrame: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of ``entries`` that are in ``window``."""

    entries: Sequence[LogEntry]
    window: Window
    storage: Storage

    def rows(self, most_bytes: int) -> pa.Table | None:
        """Their columns ``off``, ``op``, ``unchanged`` and ``data``, by offset.

        None if ``data`` is more than ``most_bytes``; no more than some files over it are read then.
        """
        chosen, size = list[pa.Table](), 0
        with ThreadPoolExecutor(_READERS) as pool:
            for first in range(0, len(self.entries), _READERS):
                for table in pool.map(self._chosen, self.entries[first : first + _READERS]):
                    chosen.append(table)
                    size += table["data"].nbytes
                if size > most_bytes:
                    return None
        return pa.concat_tables(chosen)

    def _chosen(self, entry: LogEntry) -> pa.Table:
        columns = ["_op", "_commit_lsn", "_unchanged_cols", "_data"]
        read = _selected(entry.rows, entry.start_offset, self.window, self.storage, columns)
        return read.drop_columns("commit_lsn")

    def transactions(self) -> frozenset[str]:
        """The ids of the transactions in its files."""
        read = (entry.rows.read(self.storage, ["_xid"])["_xid"] for entry in self.entries)
        return frozenset(str(xid) for xids in read for xid in xids.unique().to_pylist())

    def frame(self, session: SparkSession, tasks: int, *, whole: bool = False) -> DataFrame:
        """Their events, see :func:`events`."""
        return events(session, self.entries, self.window, self.storage, tasks, whole=whole)


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
                found = _selected(rows, start, window, storage, columns)
                place = found.schema.get_field_index("data")
                found = found.set_column(place, "data", found["data"].cast(pa.string()))
                yield from found.to_batches(max_chunksize=20_000)

    return read


# The columns of an event: where it is in a staged file, and its type where that is another.
_EVENT = {
    "op": ("_op", pa.string()),
    "commit_lsn": ("_commit_lsn", None),
    "unchanged": ("_unchanged_cols", None),
    "data": ("_data", None),
    "lsn": ("_lsn", None),
    "ts": ("_ts", pa.int64()),
    "xid": ("_xid", None),
}


def _selected(
    rows: StagedRows, start: int, window: Window, storage: Storage, columns: Sequence[str]
) -> pa.Table:
    """The rows in the window: ``off``, and what ``columns`` of the file are called in an event."""
    table = rows.read(storage, columns)
    offsets, mask = selected(table, start, window)
    # Else nothing has to be copied; but a part of a shared file would keep all tables' rows.
    if rows.first_row is not None or not pc.all(mask).as_py():
        table, offsets = table.filter(mask), offsets.filter(mask)
    found = {"off": offsets}
    for name, (column, kind) in _EVENT.items():
        if column in columns:
            found[name] = table[column] if kind is None else table[column].cast(kind)
    return pa.table(found)
