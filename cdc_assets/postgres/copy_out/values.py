"""The values of COPY's fields as Arrow arrays.

Dates and times are counted from 1970 and wrap around: infinity, and days and microseconds that are
too far from it, become others of the same width (``snapshot.convert`` knows which). A decimal's
``NaN`` and infinities have no form in Arrow: such a column comes as text.

Source: the ``_send`` functions of Postgres's types, https://doxygen.postgresql.org/numeric_8c.html
and https://doxygen.postgresql.org/arrayfuncs_8c.html.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.postgres.copy_out.ranges import ranges
from cdc_assets.postgres.copy_out.tuples import (
    FIXED,
    Fields,
    broken,
    columns_of,
    gathered,
    mismatch,
)
from cdc_assets.postgres.pgoutput import (
    POSTGRES_EPOCH_MICROSECONDS,
    Bytes,
    Ints,
    Mask,
    at_every_byte,
    be32,
)

_POSTGRES_EPOCH_DAYS: Final = 10_957

# What a decimal that fits 64 bits has: digits, and groups of four of them (one more where the
# point lies within a group).
MAX_DIGITS: Final = 18
_MAX_GROUPS: Final = 6
_GROUP: Final = np.dtype(">i2")
# Number of groups, weight of the first (of 10,000), sign, digits behind the point; the groups.
_NUMERIC: Final = np.dtype(
    [("groups", ">i2"), ("weight", ">i2"), ("sign", ">u2"), ("scale", ">u2")]
    + [(f"group{number}", _GROUP) for number in range(_MAX_GROUPS)]
)
_NUMERIC_HEAD_BYTES = 8
_NEGATIVE = 0x4000
_SPECIAL_FROM = 0x8000
_SPECIAL: Final = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_POWERS: Final = 10 ** np.arange(MAX_DIGITS + 1, dtype=np.int64)

# Dimensions, whether there are NULLs, the elements' type; then elements and first index of each.
_ARRAY: Final = np.dtype([("dimensions", ">i4"), ("nulls", ">i4"), ("type", ">i4"), ("n", ">i4")])
_ARRAY_BYTES = 20
# Fewer arrays than these that have one more element are walked one by one.
_FEW = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """How a column is sent, and what is to become of it.

    ``sent``: a type of fixed size (``tuples.FIXED``), ``text``, ``bytea``, ``numeric`` (of at most
    18 digits), or one of these with ``[]`` behind it, for lists. ``arrow``: the type it will have
    in the end, which says how many digits a decimal has; anything else arrives as it is sent.
    """

    sent: str
    arrow: pa.DataType


SQL_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "bool": ("boolean",),
    "int2": ("smallint",),
    "int4": ("integer",),
    "int8": ("bigint",),
    "float4": ("real",),
    "float8": ("double precision",),
    "date": ("date",),
    "timestamp": ("timestamp without time zone", "timestamp with time zone"),
    "numeric": ("numeric",),
    "bytea": ("bytea",),
    "text": ("text", "character varying", "character"),
}
"""The types, as Postgres calls them, whose values are sent so."""

TEXT: Final = Kind("text", pa.string())
INT8: Final = Kind("int8", pa.int64())


def batch_of(buffer: Bytes, begin: Ints, end: Ints, kinds: Sequence[Kind]) -> pa.RecordBatch:
    """The rows whose fields begin and end there; the batch's columns are called by their numbers.

    Copies what it takes from ``buffer``. Raises psycopg.Error.
    """
    columns = columns_of(buffer, begin, end, [kind.sent for kind in kinds])
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
    assert fields.size is not None
    sent = pa.binary() if kind.sent == "bytea" else pa.string()
    end = fields.at + np.maximum(fields.size, 0)
    return ranges(fields.buffer, fields.at, end, sent, fields.null)


def _buffer(values: npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.ascontiguousarray(values))


def _validity(null: Mask | None) -> pa.Buffer | None:
    if null is None:
        return None
    return pa.py_buffer(np.packbits(~null, bitorder="little"))


def _fixed(fields: Fields, sent: str) -> pa.Array:
    values, null = fields.fixed, fields.null
    if values is None:
        values = at_every_byte(fields.buffer, FIXED[sent])[fields.at]
    if sent == "bool":
        return pa.array(values != 0, mask=null)
    native = values.astype(values.dtype.newbyteorder("="))
    if sent == "date":
        native += np.int32(_POSTGRES_EPOCH_DAYS)
    elif sent == "timestamp":
        native += np.int64(POSTGRES_EPOCH_MICROSECONDS)
    kind = {"date": pa.date32(), "timestamp": pa.timestamp("us")}.get(sent)
    kind = kind or pa.from_numpy_dtype(native.dtype)
    return pa.Array.from_buffers(kind, len(native), [_validity(null), _buffer(native)])


def _decimals(fields: Fields, kind: pa.Decimal128Type) -> pa.Array:
    assert fields.size is not None
    raw = gathered(fields.buffer, fields.at, _NUMERIC)
    null = fields.null
    groups = raw["groups"].astype(np.int64)
    if null is not None:
        groups[null] = 0
    there = slice(None) if null is None else ~null
    if not np.array_equal(fields.size[there], (_NUMERIC_HEAD_BYTES + 2 * groups)[there]):
        raise mismatch("a numeric's groups don't fill it")
    scale = kind.scale
    most = int(groups.max(initial=0))
    power = raw["weight"].astype(np.int64) * 4 + scale
    used = groups > 0
    if most > _MAX_GROUPS or bool((raw["scale"][there] > scale).any()):
        raise mismatch(f"a numeric has more digits than {kind}")
    if bool(((power > MAX_DIGITS) | (power < -MAX_DIGITS))[used].any()):
        raise mismatch(f"a numeric has more digits than {kind}")
    units = np.zeros(len(fields), np.int64)
    for number in range(most):
        value = np.where(groups > number, raw[f"group{number}"].astype(np.int64), 0)
        units += _shifted(value, power - 4 * number)
    if bool(((units < 0) | (units >= _POWERS[kind.precision])).any()):
        raise mismatch(f"a numeric has more digits than {kind}")
    sign = raw["sign"]
    units = np.where(sign == _NEGATIVE, -units, units)
    found = _decimal_array(units, kind, null)
    special = sign >= _SPECIAL_FROM
    if null is not None:
        special &= ~null
    return _with_specials(found, sign, special) if bool(special.any()) else found


def _shifted(value: Ints, power: Ints) -> Ints:
    """``value`` times ten to ``power``, without what is behind the point then."""
    if int(power.min(initial=0)) >= 0:
        return value * _POWERS[np.minimum(power, MAX_DIGITS)]
    up = _POWERS[np.clip(power, 0, MAX_DIGITS)]
    down = _POWERS[np.clip(-power, 0, MAX_DIGITS)]
    return value * up // down


def _decimal_array(units: Ints, kind: pa.Decimal128Type, null: Mask | None) -> pa.Array:
    words = np.empty((len(units), 2), np.int64)
    words[:, 0], words[:, 1] = units, units >> 63
    return pa.Array.from_buffers(kind, len(units), [_validity(null), _buffer(words)])


def _with_specials(found: pa.Array, sign: npt.NDArray[Any], special: Mask) -> pa.Array:
    """As text, with the names of what is no number."""
    texts = found.cast(pa.string())
    for code, name in _SPECIAL.items():
        texts = pc.if_else(pa.array(special & (sign == code)), name, texts)
    return texts


def _lists(fields: Fields, kind: Kind) -> pa.Array:
    """Arrays of one dimension, or empty; the query has to see to it."""
    assert fields.size is not None
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
    elements = _elements(fields, filled, count, element.sent)
    offsets = np.zeros(len(fields) + 1, np.int32)
    np.cumsum(count, out=offsets[1:])
    mask = pa.array(null) if null is not None else None
    return pa.ListArray.from_arrays(pa.array(offsets), array_of(elements, element), mask=mask)


def _elements(fields: Fields, filled: Mask, count: Ints, sent: str) -> Fields:
    """The elements of all arrays, behind one another. Raises psycopg.Error if one is torn."""
    assert fields.size is not None
    first = np.cumsum(count) - count  # the number of each array's first element
    total = int(count.sum())
    at, size = np.empty(total, np.int64), np.empty(total, np.int32)
    lengths = be32(fields.buffer)
    if sent in FIXED and (found := _even(fields, count, FIXED[sent].itemsize)) is not None:
        return found
    rows = np.flatnonzero(filled & (count > 0))
    place, stop = fields.at[rows] + _ARRAY_BYTES, (fields.at + fields.size)[rows]
    number = 0
    try:
        while len(rows) > _FEW:
            length = lengths[place].astype(np.int32)
            at[first[rows] + number] = place + 4
            size[first[rows] + number] = length
            place = place + 4 + np.maximum(length, 0)
            if bool((length < -1).any()) or bool((place > stop).any()):
                raise broken("an array's elements don't fit it")
            number += 1
            goes_on = count[rows] > number
            if not np.array_equal(place[~goes_on], stop[~goes_on]):
                raise broken("an array's elements don't fill it")
            rows, place, stop = rows[goes_on], place[goes_on], stop[goes_on]
        for row, begin, end in zip(rows.tolist(), place.tolist(), stop.tolist(), strict=True):
            rest = slice(int(first[row]) + number, int(first[row] + count[row]))
            at[rest], size[rest] = _walked(fields.buffer, rest.stop - rest.start, begin, end)
    except IndexError:
        raise broken("an array's elements don't fit it") from None
    if sent in FIXED and bool(((size >= 0) & (size != FIXED[sent].itemsize)).any()):
        raise broken(f"an element of type {sent} has another size")
    return Fields(fields.buffer, at, size)


def _even(fields: Fields, count: Ints, itemsize: int) -> Fields | None:
    """The elements of all arrays if none is NULL, and each has ``itemsize`` bytes."""
    step = 4 + itemsize
    assert fields.size is not None
    some = count > 0
    if not np.array_equal(fields.size[some], (_ARRAY_BYTES + step * count)[some]):
        return None
    number = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    place = np.repeat(fields.at + _ARRAY_BYTES, count) + step * number
    size = be32(fields.buffer)[place].astype(np.int32)
    return Fields(fields.buffer, place + 4, size) if bool((size == itemsize).all()) else None


def _walked(buffer: Bytes, count: int, place: int, stop: int) -> tuple[list[int], list[int]]:
    """Where ``count`` elements of one array are, from ``place`` up to ``stop``, and their sizes."""
    data, at, size = buffer.data, list[int](), list[int]()
    for _ in range(count):
        length = int.from_bytes(data[place : place + 4], signed=True)
        at.append(place + 4)
        size.append(length)
        place += 4 + max(length, 0)
        if length < -1 or place > stop:
            raise broken("an array's elements don't fit it")
    if place != stop:
        raise broken("an array's elements don't fill it")
    return at, size
