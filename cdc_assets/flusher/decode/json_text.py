"""JSON objects of strings, assembled for many rows at once.

A row's object is a sequence of pieces: constants such as ``","name":"`` and escaped values. All
pieces of all rows are picked by *one* ``take`` from a pool of both. Its result is the text of the
objects, back to back; every k-th offset is where a row begins. No value becomes a Python object.
Elsewhere: where values come from (``rows``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.postgres.pgoutput import Bytes, Ints

# A member of an object is left out, a string, or null.
ABSENT, TEXT, NULL = 0, 1, 2

_ESCAPES = [json.dumps(chr(code))[1:-1].encode() for code in range(32)] + [rb"\"", rb"\\"]
_PRINTED = b'"\\'
_ESCAPE_OF = np.zeros(256, np.int64)
_ESCAPE_OF[:32], _ESCAPE_OF[[*_PRINTED]] = np.arange(32), (32, 33)
# Values are escaped by a pass over all of them for each kind of character, or by one cut at each
# character, whichever costs less CPU. A pass costs some 0.4 ns a byte, 30 a value and 20 a
# character of its kind; cuts cost 0.5, 15 and 130, and 50 µs in all. As bytes of a further pass:
_CUT_BYTES, _CUTS_BYTES, _VALUE_BYTES = 300, 100_000, 75
# A cut takes 100 bytes of memory, too, a pass none: no more cuts than 32 MB are worth.
_MOST_CUTS = 320_000
# Bytes scanned at a time; each of three masks is as large.
_PIECE_BYTES = 2**19
_GROWTH = np.array([len(escape) - 1 for escape in _ESCAPES], np.int64)


def binary_array(offsets: Ints, data: pa.Buffer | Bytes) -> pa.LargeBinaryArray:
    """The array of which element i is ``data[offsets[i]:offsets[i + 1]]``; nothing is copied."""
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), buffer]
    )


def parts_of(array: pa.LargeBinaryArray) -> tuple[Ints, Bytes]:
    """Offsets and bytes of an array without nulls."""
    _, offsets, data = array.buffers()
    if offsets is None or len(array) == 0:
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    found = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    text = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return found, text


def escape(values: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Each value as the inside of a JSON string: quotes, backslashes, control characters."""
    offsets, data = parts_of(values)
    data = data[int(offsets[0]) : int(offsets[-1])]
    kinds, count = _kinds(data)
    passes = (len(kinds) - 1) * (len(data) + _VALUE_BYTES * len(values))
    if count <= _MOST_CUTS and passes > _CUT_BYTES * count + _CUTS_BYTES:
        return _cut(values)
    for kind in kinds:
        escaped = _ESCAPES[_ESCAPE_OF[kind]]
        values = pc.replace_substring(values, pattern=bytes([kind]), replacement=escaped)
    return values


def _kinds(data: Bytes) -> tuple[list[int], int]:
    """The characters to be escaped that are there, and how many in all.

    First the backslash, as escapes have some.
    """
    counts = np.zeros(256, np.int64)
    for low in range(0, len(data), _PIECE_BYTES):
        piece = data[low : low + _PIECE_BYTES]
        counts[:32] += np.bincount(piece[piece < 32], minlength=32)
        for code in _PRINTED:
            counts[code] += np.count_nonzero(piece == code)
    return np.flatnonzero(counts)[::-1].tolist(), int(counts.sum())


def _cut(values: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """:func:`escape`, whatever is to be escaped."""
    offsets, data = parts_of(values)
    begin, end = int(offsets[0]), int(offsets[-1])
    data = data[begin:end]
    found = _special(data)
    # Elements: gap, special, gap, special, … gap; then the escapes. Take the gaps and the escapes.
    cuts = np.empty(2 * len(found) + 2, np.int64)
    cuts[0], cuts[-1] = 0, len(data)
    cuts[1:-1:2], cuts[2:-1:2] = found, found + 1
    pool = pa.concat_arrays([binary_array(cuts, data), pa.array(_ESCAPES, pa.large_binary())])
    code = _ESCAPE_OF[data[found]]
    wanted = np.arange(2 * len(found) + 1)
    wanted[1::2] = code + len(cuts) - 1
    _, escaped = parts_of(pool.take(pa.array(wanted)))
    grown = np.concatenate(([0], np.cumsum(_GROWTH[code])))
    moved = offsets - begin
    return binary_array(moved + grown[np.searchsorted(found, moved)], escaped)


def _special(data: Bytes) -> Ints:
    """Positions of the characters to be escaped; found by pieces that fit the CPU's caches."""
    found = [np.empty(0, np.int64)]
    for low in range(0, len(data), _PIECE_BYTES):
        piece = data[low : low + _PIECE_BYTES]
        special = piece < 32
        special |= piece == ord('"')
        special |= piece == ord("\\")
        found.append(np.flatnonzero(special) + low)
    return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class Member:
    """One member of every object: its name, and its state and value in each row.

    ``state`` is one of ABSENT, TEXT, NULL, for all rows or for each. ``value`` is the number of the
    value in the pool, for each row; it counts where the state is TEXT.
    """

    name: str
    state: int | npt.NDArray[np.int64]
    value: Ints


@lru_cache(maxsize=256)
def _constants(names: tuple[str, ...]) -> tuple[pa.LargeBinaryArray, int]:
    """The text between the previous member and each name's value; and the empty text's number.

    Nine a name, at 3 * (state of the last member present, ABSENT when it is the first) + its own
    state; then three that end the object, by the state of the last member; last the empty text.
    """
    before = {ABSENT: "{", TEXT: '",', NULL: ","}
    inside = {TEXT: '"', NULL: "null"}
    texts = []
    for name in names:
        key = json.dumps(name, ensure_ascii=False) + ":"
        for last in (ABSENT, TEXT, NULL):
            texts.append("")
            texts.extend(before[last] + key + inside[state] for state in (TEXT, NULL))
    texts += ["{}", '"}', "}", ""]
    return pa.array([text.encode() for text in texts], pa.large_binary()), len(texts) - 1


def objects(
    count: int, values: pa.LargeBinaryArray, members: Sequence[Member]
) -> pa.LargeBinaryArray:
    """``count`` JSON objects. ``values`` are escaped already (:func:`escape`)."""
    constants, empty = _constants(tuple(member.name for member in members))
    pool = pa.concat_arrays([values, constants])
    base = len(values)
    width = 2 * len(members) + 1
    picks = np.empty((count, width), np.int64)
    last: int | npt.NDArray[np.int64] = ABSENT
    for number, member in enumerate(members):
        state = member.state
        picks[:, 2 * number] = base + 9 * number + 3 * last + state
        if isinstance(state, int):
            picks[:, 2 * number + 1] = member.value if state == TEXT else base + empty
            last = last if state == ABSENT else state
        else:
            picks[:, 2 * number + 1] = np.where(state == TEXT, member.value, base + empty)
            last = np.where(state == ABSENT, last, state)
    picks[:, -1] = base + 9 * len(members) + last
    offsets, data = parts_of(pool.take(pa.array(picks.reshape(-1))))
    return binary_array(np.ascontiguousarray(offsets[::width]), data)
