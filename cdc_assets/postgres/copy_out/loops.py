"""Compiled loops over the rows of COPY in binary: where values are, decimals and texts.

The lengths in a buffer are the server's word: each is held against the end of what it is part of
before anything is read by it. A head may be read where a value is too short for one: a buffer has
bytes to spare behind its end (``tuples.SLACK_BYTES``). ``buffer`` is the first argument of each
loop; ``at`` and ``size`` are where values begin in it, and how many bytes each has, -1 for NULL.

Source: https://www.postgresql.org/docs/current/sql-copy.html, "Binary Format", and
https://doxygen.postgresql.org/numeric_8c.html.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cdc_assets.compiled import compiled, copy_bytes, part
from cdc_assets.postgres.pgoutput import Bytes, Ints

# As in ``session.messages`` and ``kinds``, but of this file: a loop that was compiled before isn't
# compiled again when another file changes.
COPY_DATA = ord("d")
MAX_DIGITS = 18

Sizes = npt.NDArray[np.int32]

# Kind, length and the number of fields of a row's message; the length of a field.
_HEAD_BYTES, _LENGTH_BYTES = 7, 4
# Number of groups of four digits, weight of the first, sign, digits behind the point; the groups.
_NUMERIC_HEAD_BYTES, _GROUP_BYTES = 8, 2
_POSITIVE, _NEGATIVE = 0, 0x4000
NAN, INFINITY, NEGATIVE_INFINITY = 0xC000, 0xD000, 0xF000
_POWERS = 10 ** np.arange(MAX_DIGITS + 1, dtype=np.int64)

SPECIALS, TOO_LONG, UNEVEN = 1, 2, 3
"""What :func:`decimals` found: NaN or infinities; too many digits; groups that don't fill one."""


@part
def _uint16(buffer: Bytes, at: int) -> int:
    return int(buffer[at]) << 8 | int(buffer[at + 1])


@part
def _int32(buffer: Bytes, at: int) -> int:
    value = _uint16(buffer, at) << 16 | _uint16(buffer, at + 2)
    return (value ^ 2**31) - 2**31  # its highest bit is the sign


@compiled("UniTuple(int64, 2)(uint8[::1], int64, int64, int64)")
def rows_at(buffer: Bytes, at: int, end: int, fields: int) -> tuple[int, int]:
    """How many whole rows of so many fields lie back to back from ``at``, and where they end.

    ``end``: how far the buffer is filled. Stops at what isn't such a row's message.
    """
    rows = 0
    while at + _HEAD_BYTES <= end and buffer[at] == COPY_DATA:
        length = _int32(buffer, at + 1)
        behind = at + 1 + length
        if length < _HEAD_BYTES - 1 or behind > end or _uint16(buffer, at + 5) != fields:
            break
        rows, at = rows + 1, behind
    return rows, at


@compiled("UniTuple(int64, 2)(uint8[::1], int64, int32[::1], int64[:, ::1], int32[:, ::1])")
def fields_at(buffer: Bytes, begin: int, widths: Sizes, at: Ints, size: Sizes) -> tuple[int, int]:
    """Fill ``at`` and ``size``, a line each field, of the rows that :func:`rows_at` found there.

    ``widths``: the size that a field has unless it is NULL; 0: any. Returns the first field of
    another size and that size, or the number of fields if those of a row don't fill it; else -1.
    """
    fields, rows = at.shape
    for row in range(rows):
        stop = begin + 1 + _int32(buffer, begin + 1)
        place = begin + _HEAD_BYTES
        for field in range(fields):
            if place + _LENGTH_BYTES > stop:
                return fields, 0
            length = _int32(buffer, place)
            if length < -1 or (length >= 0 and widths[field] > 0 and length != widths[field]):
                return field, length
            place += _LENGTH_BYTES
            at[field, row], size[field, row] = place, length
            place += max(length, 0)
        if place != stop:
            return fields, 0
        begin = stop
    return -1, 0


@compiled(
    "UniTuple(int64, 2)(uint8[::1], int64[::1], int64[::1], int64[::1], int64, int64[::1],"
    " int32[::1])"
)
def elements_at(
    buffer: Bytes, begin: Ints, end: Ints, count: Ints, width: int, at: Ints, size: Sizes
) -> tuple[int, int]:
    """Fill ``at`` and ``size`` of the elements of arrays, which lie between ``begin`` and ``end``.

    ``width``: the size that an element has unless it is NULL; 0: any. Returns (1, size) for one of
    another size, or (2, 0) if those of an array don't fill it; else (0, 0).
    """
    found = 0
    for array in range(len(begin)):
        place, stop = begin[array], end[array]
        for _ in range(count[array]):
            if place + _LENGTH_BYTES > stop:
                return 2, 0
            length = _int32(buffer, place)
            if length < -1 or (length >= 0 and width > 0 and length != width):
                return 1, length
            place += _LENGTH_BYTES
            at[found], size[found] = place, length
            found += 1
            place += max(length, 0)
        if count[array] > 0 and place != stop:
            return 2, 0
    return 0, 0


@compiled("int64(uint8[::1], int64[::1], int32[::1], int64, int64, int64[:, ::1])")
def decimals(buffer: Bytes, at: Ints, size: Sizes, precision: int, scale: int, words: Ints) -> int:
    """Fill ``words``, two a value, with 128-bit integers: values times ten to ``scale``.

    Returns 0, or one of SPECIALS, whose words are 0, TOO_LONG and UNEVEN. ``precision``: of
    decimal digits, MAX_DIGITS at most.
    """
    found, limit = 0, _POWERS[precision]
    for row in range(len(at)):
        words[row, 0] = words[row, 1] = 0
        if size[row] < 0:
            continue
        head = at[row]
        groups = _uint16(buffer, head)
        if size[row] != _NUMERIC_HEAD_BYTES + _GROUP_BYTES * groups:
            return UNEVEN
        weight = (_uint16(buffer, head + 2) ^ 2**15) - 2**15
        sign = _uint16(buffer, head + 4)
        if sign in (NAN, INFINITY, NEGATIVE_INFINITY):
            found = SPECIALS
            continue
        if sign not in (_POSITIVE, _NEGATIVE) or _uint16(buffer, head + 6) > scale:
            return TOO_LONG
        units, power = 0, 4 * weight + scale
        for group in range(groups):
            digits = _uint16(buffer, head + _NUMERIC_HEAD_BYTES + _GROUP_BYTES * group)
            if power > MAX_DIGITS or digits > 9_999:
                return TOO_LONG
            if power > MAX_DIGITS - 4 and digits > limit // _POWERS[power]:
                return TOO_LONG  # and no product that has more than 64 bits
            if power >= 0:
                units += digits * _POWERS[power]
            else:  # what is behind the last digit of the scale is zero
                behind = _POWERS[min(-power, 4)]
                if digits % behind:
                    return TOO_LONG
                units += digits // behind
            if units >= limit:
                return TOO_LONG
            power -= 4
        if sign == _NEGATIVE:
            units = -units
        words[row, 0], words[row, 1] = units, units >> 63
    return found


@compiled("void(uint8[::1], int64[::1], int32[::1], int32[::1], uint8[::1])")
def texts(buffer: Bytes, at: Ints, size: Sizes, offsets: Sizes, text: Bytes) -> None:
    """Copy the values, one behind the other, to ``text``, which has the room; fill ``offsets``."""
    behind = 0
    for row in range(len(at)):
        offsets[row] = behind
        count = int(size[row])
        if count > 0:
            copy_bytes(text, behind, buffer, at[row], count)
            behind += count
    offsets[len(at)] = behind


@compiled("void(uint8[::1], int64[::1], int32[::1], int64, int64[::1])")
def integers(buffer: Bytes, at: Ints, size: Sizes, width: int, values: Ints) -> None:
    """Fill ``values`` with the signed integers of ``width`` bytes; NULL is 0."""
    for row in range(len(at)):
        value = 0
        if size[row] >= 0:
            place = int(at[row])
            value = (int(buffer[place]) ^ 2**7) - 2**7
            for byte in range(1, width):
                value = value << 8 | int(buffer[place + byte])
        values[row] = value
