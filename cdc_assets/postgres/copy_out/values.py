"""The values of COPY's fields as Arrow arrays.

Dates and times are counted from 1970 and wrap around: infinity, and days and microseconds that are
too far from it, become others of the same width (``snapshot.convert`` knows which). A decimal's
``NaN`` and infinities have no form in Arrow: such a column comes as text.

Source: the ``_send`` functions of Postgres's types, https://doxygen.postgresql.org/numeric_8c.html
and https://doxygen.postgresql.org/arrayfuncs_8c.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.postgres.copy_out.kinds import FIXED, Kind
from cdc_assets.postgres.copy_out.loops import (
    INFINITY,
    NAN,
    NEGATIVE_INFINITY,
    SPECIALS,
    TOO_LONG,
    UNEVEN,
    decimals,
    integers,
    texts,
)
from cdc_assets.postgres.copy_out.tuples import (
    Fields,
    broken,
    columns_of,
    elements_of,
    gathered,
    mismatch,
)
from cdc_assets.postgres.pgoutput import (
    POSTGRES_EPOCH_MICROSECONDS,
    Bytes,
    Mask,
)

_POSTGRES_EPOCH_DAYS: Final = 10_957
_INT32_MOST: Final = 2**31 - 1

# Number of groups, weight of the first, sign.
_NUMERIC: Final = np.dtype([("groups", ">i2"), ("weight", ">i2"), ("sign", ">u2")])
_SPECIAL: Final = {NAN: "NaN", INFINITY: "Infinity", NEGATIVE_INFINITY: "-Infinity"}

# Dimensions, whether there are NULLs, the elements' type; then elements and first index of each.
_ARRAY: Final = np.dtype([("dimensions", ">i4"), ("nulls", ">i4"), ("type", ">i4"), ("n", ">i4")])
_ARRAY_BYTES = 20


def batch_of(buffer: Bytes, begin: int, rows: int, kinds: Sequence[Kind]) -> pa.RecordBatch:
    """The ``rows`` back to back from ``begin``; the batch's columns are called by their numbers.

    Copies what it takes from ``buffer``. Raises psycopg.Error.
    """
    columns = columns_of(buffer, begin, rows, [kind.sent for kind in kinds])
    arrays = [array_of(fields, kind) for fields, kind in zip(columns, kinds, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=list(map(str, range(len(arrays)))))


def array_of(fields: Fields, kind: Kind) -> pa.Array:
    """The column as an array of the type that it is sent as; of text if decimals are like none.

    Raises psycopg.Error.
    """
    if kind.sent.endswith("[]"):
        return _lists(fields, kind)
    if kind.sent in FIXED:
        return _fixed(fields, kind.sent)
    if kind.sent == "numeric":
        return _decimals(fields, kind.arrow)
    return _texts(fields, pa.binary() if kind.sent == "bytea" else pa.string())


def _validity(null: Mask | None) -> pa.Buffer | None:
    if null is None:
        return None
    return pa.py_buffer(np.packbits(~null, bitorder="little"))


def _fixed(fields: Fields, sent: str) -> pa.Array:
    layout, values = FIXED[sent], np.empty(len(fields), np.int64)
    integers(fields.buffer, fields.at, fields.size, layout.itemsize, values)
    if sent == "bool":
        return pa.array(values != 0, mask=fields.null)
    if sent == "date":
        values += _POSTGRES_EPOCH_DAYS
    elif sent == "timestamp":
        values += POSTGRES_EPOCH_MICROSECONDS
    native = values.astype(f"i{layout.itemsize}", copy=False).view(layout)
    kind = {"date": pa.date32(), "timestamp": pa.timestamp("us")}.get(sent)
    kind = kind or pa.from_numpy_dtype(native.dtype)
    return pa.Array.from_buffers(kind, len(native), [_validity(fields.null), pa.py_buffer(native)])


def _texts(fields: Fields, kind: pa.DataType) -> pa.Array:
    if (total := int(np.maximum(fields.size, 0).sum(dtype=np.int64))) > _INT32_MOST:
        raise broken("more text than 2 GB in rows that are read together")
    offsets, text = np.empty(len(fields) + 1, np.int32), np.empty(total, np.uint8)
    texts(fields.buffer, fields.at, fields.size, offsets, text)
    buffers = [_validity(fields.null), pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(kind, len(fields), buffers)


def _decimals(fields: Fields, kind: pa.Decimal128Type) -> pa.Array:
    words = np.empty((len(fields), 2), np.int64)
    found = decimals(fields.buffer, fields.at, fields.size, kind.precision, kind.scale, words)
    if found == UNEVEN:
        raise mismatch("a numeric's groups don't fill it")
    if found == TOO_LONG:
        raise mismatch(f"a numeric has more digits than {kind}")
    array = pa.Array.from_buffers(kind, len(fields), [_validity(fields.null), pa.py_buffer(words)])
    return _with_specials(array, fields) if found == SPECIALS else array


def _with_specials(found: pa.Array, fields: Fields) -> pa.Array:
    """As text, with the names of what is no number."""
    sign = gathered(fields.buffer, fields.at, _NUMERIC)["sign"]
    texts = found.cast(pa.string())
    for code, name in _SPECIAL.items():
        texts = pc.if_else(pa.array((fields.size >= 0) & (sign == code)), name, texts)
    return texts


def _lists(fields: Fields, kind: Kind) -> pa.Array:
    """Arrays of one dimension, or empty; the query has to see to it."""
    null = fields.null
    head = gathered(fields.buffer, fields.at, _ARRAY)
    filled = head["dimensions"] == 1
    if null is not None:
        filled &= ~null
    others = ~filled if null is None else ~filled & ~null
    if bool((head["dimensions"][others] != 0).any()):
        raise broken("an array of more than one dimension")
    count = np.where(filled, head["n"], 0).astype(np.int64)
    if bool((count < 0).any()) or bool((count * 4 > np.maximum(fields.size, 0)).any()):
        raise broken("an array of more elements than it has bytes for")
    element = Kind(kind.sent.removesuffix("[]"), kind.arrow.value_type)
    elements = elements_of(fields, _ARRAY_BYTES, count, element.sent)
    offsets = np.zeros(len(fields) + 1, np.int32)
    np.cumsum(count, out=offsets[1:])
    mask = pa.array(null) if null is not None else None
    return pa.ListArray.from_arrays(pa.array(offsets), array_of(elements, element), mask=mask)
