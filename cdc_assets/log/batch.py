"""A batch of the log: its entries, and the facts that decide how it is folded.

A batch is bounded by bytes, so that a backlog of any size is drained in steps of one size. The
facts that decide how it is folded (the relation, truncates, unchanged columns) are read from its
files beforehand, as their outlines; Spark tasks read the rows (``materializer.events``).

A merge reads each file twice, once for its outline and once in a Spark task. Either read fetches
and verifies the whole file, which other tables may share: so one read takes all facts. If the file
changes after that, the task refuses it and the merge fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.log.staged.files import OLD_KEY
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry
from cdc_assets.postgres.lsn import Lsn

# Rows of a merge, where they compress well: with more, a change gets no cheaper, only older.
BATCH_ROWS = 500_000
# Files read at a time: reading one waits for a disk or an object store.
_PARALLEL = 8
# Unambiguous, because a JSON string contains no raw quote.
WITH_OLD_KEY = f',"{OLD_KEY}":"'
NamedKey = frozenset[tuple[str, str | None]]
"""A key as (column, text) pairs: the stream's column order differs from the key's."""


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of the log that count: offsets from ``offset`` on, committed in [above, below).

    ``above``: the table's snapshot LSN; the copy has what committed before it (invariant 4).
    ``below``: None, or where a comparison cuts the log. ``until``: the first offset that doesn't
    count, or None.
    """

    offset: int
    above: Lsn
    below: Lsn | None = None
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that decide how a batch is folded. Offsets count from the table's first change.

    ``end_offset``: the first offset that the batch doesn't hold. ``truncate``: that of the last
    truncate, ``first_truncate`` of the first one, or None. ``unchanged``: the columns that some
    update left out (unchanged TOAST). ``relinked``: both keys of every key change that left columns
    out. ``first_commit``: the LSN of the first commit, None without rows.
    """

    end_offset: int
    rows: int
    truncate: int | None
    first_truncate: int | None
    unchanged: frozenset[str]
    relinked: frozenset[NamedKey]
    first_commit: Lsn | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """The facts that a merge needs of an entry before Spark reads it.

    ``relation``: the relation in the file's metadata, as parsed JSON. ``rows``: their _op,
    _commit_lsn and _unchanged_cols, and, if there are unchanged columns, _data where that has an
    old key.
    """

    entry: LogEntry
    relation: Any
    rows: pa.Table


def outline(entry: LogEntry, storage: Storage) -> Outline:
    """Read an entry once. Raises FileNotFoundError if the file is gone, StagedFileChanged."""
    opened = entry.rows.opened(storage)
    rows = opened.read(["_op", "_commit_lsn", "_unchanged_cols"])
    data = pa.nulls(len(rows), pa.large_string())
    if rows["_unchanged_cols"].null_count < len(rows):
        text = opened.read(["_data"])["_data"]
        data = pc.if_else(pc.match_substring(text, WITH_OLD_KEY), text, None)
    rows = rows.append_column("_data", data)
    if entry.rows.first_row is not None:
        rows = rows.take(np.arange(len(rows)))  # a slice would keep all tables' rows
    return Outline(entry, opened.relation(), rows)


def outlines(entries: Sequence[LogEntry], storage: Storage) -> list[Outline]:
    """The outlines of all entries, in order. Raises like :func:`outline`."""
    with ThreadPoolExecutor(_PARALLEL) as pool:
        return list(pool.map(lambda entry: outline(entry, storage), entries))


def holds(entries: Sequence[LogEntry], offset: int, until: int) -> bool:
    """Whether entries, in order, hold all offsets from ``offset`` to ``until`` (excluded)."""
    for entry in entries:
        if entry.start_offset <= offset:
            offset = max(offset, entry.end_offset)
    return offset >= until


def take(
    entries: Sequence[LogEntry], limit_bytes: int, limit_rows: float = BATCH_ROWS
) -> list[LogEntry]:
    """The leading entries of up to ``limit_bytes`` and ``limit_rows``, one at least."""
    taken: list[LogEntry] = []
    size = rows = 0
    for entry in entries:
        size += entry.rows.byte_size
        rows += entry.rows.row_count
        if taken and (size > limit_bytes or rows > limit_rows):
            break
        taken.append(entry)
    return taken


def selected(
    table: pa.Table, entry_start: int, window: Window
) -> tuple[pa.Array, pa.ChunkedArray | pa.Array]:
    """``(offsets, mask)`` of an entry's rows."""
    offsets = pa.array(np.arange(entry_start, entry_start + table.num_rows, dtype=np.int64))
    commit = table["_commit_lsn"].combine_chunks()
    mask = pc.and_(
        pc.greater_equal(offsets, window.offset), pc.greater_equal(commit, int(window.above))
    )
    if window.below is not None:
        mask = pc.and_(mask, pc.less(commit, int(window.below)))
    if window.until is not None:
        mask = pc.and_(mask, pc.less(offsets, window.until))
    return offsets, mask


def facts(batch: Iterable[Outline], window: Window, key: Sequence[str]) -> Facts:
    """The facts of the batch's rows that count; ``key``: the names of the key's columns."""
    rows, truncate, first, end, commit = 0, None, None, window.offset, None
    unchanged: set[str] = set()
    relinked: set[NamedKey] = set()
    for outlined in batch:
        entry, table = outlined.entry, outlined.rows
        offsets, mask = selected(table, entry.start_offset, window)
        chosen, kept = table.filter(mask), offsets.filter(mask)
        rows += len(kept)
        if commit is None and len(kept):
            commit = Lsn(chosen["_commit_lsn"][0].as_py())
        truncates = kept.filter(pc.equal(chosen["_op"].cast(pa.string()), "T").combine_chunks())
        if len(truncates):
            truncate = truncates[-1].as_py()
            first = truncates[0].as_py() if first is None else first
        if chosen["_unchanged_cols"].null_count < len(chosen):
            for text in pc.unique(chosen["_unchanged_cols"]).to_pylist():
                unchanged.update(json.loads(text) if text else ())
            relinked |= _relinked(chosen["_data"].drop_null(), key)
        if window.below is None:
            end = entry.end_offset
        else:
            # Commit order: the rows below the cut are a prefix of the file, and of all files. One
            # that has none of them says nothing of what is left of those before it.
            below = pc.sum(pc.less(table["_commit_lsn"], int(window.below))).as_py()
            if below:
                end = max(end, entry.start_offset + int(below))
    if window.until is not None:
        end = min(end, window.until)
    return Facts(end, rows, truncate, first, frozenset(unchanged), frozenset(relinked), commit)


def _relinked(data: pa.ChunkedArray, key: Sequence[str]) -> set[NamedKey]:
    """Both keys of rows that carry an old key."""
    found: set[NamedKey] = set()
    for text in data.to_pylist():
        row = json.loads(text)
        found.add(frozenset((name, row[name]) for name in key))
        old = json.loads(row[OLD_KEY])
        found.add(frozenset((name, old[name]) for name in key))
    return found
