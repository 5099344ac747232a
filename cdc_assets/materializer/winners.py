"""The rows that a batch leaves, found here, without a Spark job.

It applies where a batch is small enough to be sent in a statement and no update left a column out:
then a key's last change has its whole row (invariant 8), and everything before it is passed over.
``materializer.fold`` is for all other batches. Both give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.log.batch import Facts
from cdc_assets.log.staged.texts import texts
from cdc_assets.materializer.events import Batch

# Of staged files, compressed; and of text, which a statement carries along with its keys. A Connect
# server takes statements of up to 128 MB.
_STAGED_BYTES, _TEXT_BYTES = 16 * 10**6, 40 * 10**6


@dataclass(frozen=True, slots=True)
class Winners:
    """A batch's last change of each key.

    ``rows``: those that stay, as a struct ``row`` of texts. ``keys``: all of them, as a struct
    ``key``. ``inserts``: no change but inserts.
    """

    rows: pa.Table
    keys: pa.Table
    inserts: bool

    @property
    def deleted(self) -> int:
        return len(self.keys) - len(self.rows)


def winners(
    batch: Batch, facts: Facts, key: Sequence[str], columns: Sequence[str]
) -> Winners | None:
    """The winners of the batch's rows, None for a batch that Spark has to fold.

    ``key``, ``columns``: names at the source. O(rows) time, and memory for a few times _TEXT_BYTES.
    """
    if facts.unchanged or sum(entry.rows.byte_size for entry in batch.entries) > _STAGED_BYTES:
        return None
    if (events := batch.rows(_TEXT_BYTES)) is None:
        return None
    if facts.truncate is not None:
        events = events.filter(pc.greater(events["off"], facts.truncate))
    named = texts(events["data"], key)
    last = np.sort(_last([named[name].combine_chunks() for name in key], len(named)))
    op = events["op"].take(last)
    stays = pc.not_equal(op, "D")
    rows = texts(events["data"].take(last).filter(stays), columns)
    return Winners(
        _structs(rows, "row"),
        _structs(named.take(last), "key"),
        bool(pc.all(pc.equal(events["op"], "I")).as_py()),
    )


def _last(key: Sequence[pa.StringArray], length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The positions of each key's last change; ``key``: its columns, of ``length`` changes."""
    codes = np.zeros(length, np.int64)
    for column in key:
        found = column.dictionary_encode()
        # Small again before the next column: their product might not fit.
        codes = np.unique(
            codes * len(found.dictionary) + found.indices.to_numpy(), return_inverse=True
        )[1]
    last = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    np.maximum.at(last, codes, np.arange(length))
    return last


def _structs(table: pa.Table, name: str) -> pa.Table:
    columns = [column.combine_chunks() for column in table.columns]
    fields = [pa.field(n, pa.string()) for n in table.column_names]
    return pa.table({name: pa.StructArray.from_arrays(columns, fields=fields)})
