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

from cdc_assets.postgres.copy_out.kinds import FIXED
from cdc_assets.postgres.copy_out.loops import Sizes, elements_at, fields_at
from cdc_assets.postgres.pgoutput import Bytes, Ints, at_every_byte

SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
# Signature, flags and the length of what extends it; it is before the first row.
HEADER: Final = struct.Struct(">11sII")
TRAILER: Final = b"\xff\xff"
# Bytes that become one batch, unless a row is longer: they fit the CPU's caches.
BATCH_BYTES: Final = 2**20
# A buffer has so many bytes behind the last row: more than any value of fixed size has.
SLACK_BYTES: Final = 32


def gathered(buffer: Bytes, at: Ints, layout: np.dtype[Any]) -> npt.NDArray[Any]:
    """The records of ``layout`` that begin at ``at``: copied as bytes, several times as fast."""
    return at_every_byte(buffer, np.dtype(f"V{layout.itemsize}"))[at].view(layout)


def broken(what: str) -> psycopg.Error:
    """The error for an answer that violates the protocol: nothing read from it can be trusted."""
    return psycopg.errors.ProtocolViolation(f"the server's answer to COPY is broken: {what}")


def mismatch(what: str) -> psycopg.Error:
    """The error for values of another type than was asked for: the table has been altered."""
    return psycopg.errors.DatatypeMismatch(what)


@dataclass(frozen=True, slots=True)
class Fields:
    """One column of many rows: ``at`` and ``size`` of each value, -1 for NULL, in ``buffer``."""

    buffer: Bytes
    at: Ints
    size: Sizes

    def __len__(self) -> int:
        return len(self.at)

    @property
    def null(self) -> npt.NDArray[np.bool_] | None:
        """Which are NULL; None if none is."""
        found = self.size < 0
        return found if bool(found.any()) else None


def columns_of(buffer: Bytes, begin: int, rows: int, kinds: Sequence[str]) -> list[Fields]:
    """The columns of the ``rows`` back to back from ``begin``, of these types as they are sent.

    Raises psycopg.Error if a row's fields don't fill it.
    """
    at = np.empty((len(kinds), rows), np.int64)
    size = np.empty((len(kinds), rows), np.int32)
    widths = np.array([_width(kind) for kind in kinds], np.int32)
    wrong, length = fields_at(buffer, begin, widths, at, size)
    if wrong == len(kinds):
        raise broken("the fields of a row don't fill it")
    if wrong >= 0:
        raise _wrong_size("a field", kinds[wrong], length)
    return [Fields(buffer, *places) for places in zip(at, size, strict=True)]


def elements_of(fields: Fields, head_bytes: int, count: Ints, kind: str) -> Fields:
    """The elements of all arrays, behind one another. Raises psycopg.Error if one is torn.

    ``head_bytes``: what an array has before its elements.
    """
    total = int(count.sum())
    at, size = np.empty(total, np.int64), np.empty(total, np.int32)
    begin, end = fields.at + head_bytes, fields.at + fields.size
    wrong, length = elements_at(fields.buffer, begin, end, count, _width(kind), at, size)
    if wrong == 2:
        raise broken("an array's elements don't fill it")
    if wrong == 1:
        raise _wrong_size("an element", kind, length)
    return Fields(fields.buffer, at, size)


def _width(kind: str) -> int:
    return FIXED[kind].itemsize if kind in FIXED else 0


def _wrong_size(what: str, kind: str, length: int) -> psycopg.Error:
    if length < -1:
        return broken(f"{what} has less than no bytes")
    return mismatch(f"{what} of type {kind} has {length} bytes")
