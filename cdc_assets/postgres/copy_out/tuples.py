"""Binary tuples of COPY, read by columns instead of row by row.

A row is one CopyData message: kind ``d``, a length that counts itself, the number of fields, and of
each field its length (-1 for NULL) and its bytes. This module only computes positions; not a byte
is copied. What is read behind a row's end, up to :data:`SLACK_BYTES`, has no meaning, but is there.

Source: https://www.postgresql.org/docs/current/sql-copy.html, "Binary Format".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg

from cdc_assets.postgres.pgoutput import Bytes, Ints, at_every_byte, be32
from cdc_assets.postgres.session.messages import COPY_DATA

SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
# Signature, flags and the length of what extends it; it is before the first row.
HEADER: Final = struct.Struct(">11sII")
TRAILER: Final = b"\xff\xff"
# Bytes that become one batch, unless a row is longer: they fit the CPU's caches.
BATCH_BYTES: Final = 2**20
# Kind, length and the number of fields; the length of a field.
_HEAD_BYTES, _LENGTH_BYTES = 7, 4
# Bytes searched at a time: the masks of a piece fit the CPU's caches.
_PIECE_BYTES: Final = 2**16
# A buffer has so many bytes behind the last row: where the fixed fields of 1,664 columns, the most
# that a query can have, would be if none were NULL.
SLACK_BYTES: Final = 2**15

# What types of one size are, as they are sent.
FIXED: Final[dict[str, np.dtype[Any]]] = {
    "bool": np.dtype(">i1"),
    "int2": np.dtype(">i2"),
    "int4": np.dtype(">i4"),
    "int8": np.dtype(">i8"),
    "float4": np.dtype(">f4"),
    "float8": np.dtype(">f8"),
    "date": np.dtype(">i4"),
    "timestamp": np.dtype(">i8"),
}


def gathered(buffer: Bytes, at: Ints, layout: np.dtype[Any]) -> npt.NDArray[Any]:
    """The records of ``layout`` that begin at ``at``: copied as bytes, several times as fast."""
    return at_every_byte(buffer, np.dtype(f"V{layout.itemsize}"))[at].view(layout)


def broken(what: str) -> psycopg.Error:
    """The error for an answer that violates the protocol: nothing read from it can be trusted."""
    return psycopg.errors.ProtocolViolation(f"the server's answer to COPY is broken: {what}")


def mismatch(what: str) -> psycopg.Error:
    """The error for values of another type than was asked for: the table has been altered."""
    return psycopg.errors.DatatypeMismatch(what)


def rows_at(buffer: Bytes, begin: int, end: int, fields: int) -> tuple[Ints, Ints]:
    """Where the fields of each whole row begin and end, of rows that lie back to back.

    ``begin``: where the first message begins; ``end``: how far the buffer is filled. Stops at what
    isn't a row's message, and at one of 16 MB or more.
    """
    if end <= begin or buffer[begin] != COPY_DATA:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at = _candidates(buffer, begin, end, fields)
    if len(at) == 0 or at[0] != begin:
        return at[:0], at[:0]
    stop = at + 1 + be32(buffer)[at + 1].astype(np.int64)
    if not bool((stop[:-1] == at[1:]).all()):
        at, stop = _walked(at, stop)
    if stop[-1] > end:
        at, stop = at[:-1], stop[:-1]
    return at + _HEAD_BYTES, stop


def _candidates(buffer: Bytes, begin: int, end: int, fields: int) -> Ints:
    """Where bytes look like the beginning of a row's message."""
    found = [np.empty(0, np.int64)]
    last = end - _HEAD_BYTES + 1
    for low in range(begin, last, _PIECE_BYTES):
        high = min(low + _PIECE_BYTES, last)
        mask = buffer[low:high] == COPY_DATA
        mask &= buffer[low + 1 : high + 1] == 0  # of the length: no text has a zero byte
        found.append(np.flatnonzero(mask) + low)
    at = np.concatenate(found)
    head = be32(buffer)[at + 3]  # the length's lower half, and the number of fields
    begun: Ints = at[(head & 0xFFFF) == fields]
    return begun


def _walked(at: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Those of the candidates that are messages: each begins where the one before ends."""
    ends = dict(zip(at.tolist(), stop.tolist(), strict=True))
    begins, place = list[int](), int(at[0])
    while place in ends:
        begins.append(place)
        place = max(ends[place], place + _HEAD_BYTES)
    chain = np.array(begins, np.int64)
    return chain, stop[np.searchsorted(at, chain)]


@dataclass(frozen=True, slots=True)
class Fields:
    """One column of many rows: ``at`` and ``size`` of each value, -1 for NULL, in ``buffer``.

    ``fixed``: the values themselves, as they are sent, if all are there and have one size.
    """

    buffer: Bytes
    at: Ints
    size: npt.NDArray[np.int32] | None
    fixed: npt.NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.at)

    @property
    def null(self) -> npt.NDArray[np.bool_] | None:
        """Which are NULL; None if none is."""
        if self.size is None:
            return None
        found = self.size < 0
        return found if bool(found.any()) else None


def columns_of(buffer: Bytes, begin: Ints, end: Ints, kinds: Sequence[str]) -> list[Fields]:
    """The columns of the rows that begin and end there, of these types as they are sent.

    Raises psycopg.Error if a row's fields don't fill it.
    """
    found, place = list[Fields](), begin
    try:
        for run in _runs(kinds):
            block = _block(buffer, place, run) if run[0] in FIXED else None
            if block is not None:
                found += block
                place = place + sum(_LENGTH_BYTES + FIXED[kind].itemsize for kind in run)
                continue
            for kind in run:
                fields, place = _one(buffer, place, kind)
                found.append(fields)
    except IndexError:
        raise broken("a field begins where no row is") from None
    if not np.array_equal(place, end):
        raise broken("the fields of a row don't fill it")
    return found


def _runs(kinds: Sequence[str]) -> list[list[str]]:
    """Neighbours of fixed sizes together, any other alone."""
    runs = list[list[str]]()
    for kind in kinds:
        if runs and kind in FIXED and runs[-1][0] in FIXED:
            runs[-1].append(kind)
        else:
            runs.append([kind])
    return runs


def _block(buffer: Bytes, place: Ints, run: Sequence[str]) -> list[Fields] | None:
    """Neighbours of fixed sizes, gathered together; None if one is NULL somewhere."""
    layout = np.dtype(
        [
            field
            for number, kind in enumerate(run)
            for field in ((f"size{number}", ">i4"), (f"value{number}", FIXED[kind]))
        ]
    )
    rows = gathered(buffer, place, layout)
    found = list[Fields]()
    for number, kind in enumerate(run):
        if not bool((rows[f"size{number}"] == FIXED[kind].itemsize).all()):
            return None
        found.append(Fields(buffer, place, None, rows[f"value{number}"]))
    return found


def _one(buffer: Bytes, place: Ints, kind: str) -> tuple[Fields, Ints]:
    """A column by its fields' lengths, and where the next column's fields begin."""
    size = be32(buffer)[place].astype(np.int32)
    if bool((size < -1).any()):
        raise broken("a field has less than no bytes")
    if kind in FIXED and bool((wrong := (size >= 0) & (size != FIXED[kind].itemsize)).any()):
        raise mismatch(f"a field of type {kind} has {size[wrong][0]} bytes")
    at = place + _LENGTH_BYTES
    return Fields(buffer, at, size), at + np.maximum(size, 0)
