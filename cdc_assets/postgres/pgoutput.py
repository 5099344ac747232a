"""The wire format of pgoutput (protocol 1, text), read by columns instead of message by message.

This module has the places of a message's fields, the Relation message, and the two vectorized
readers everything else is built on: :func:`scan` (one look at each frame of a batch) and
:func:`walk` (the values of many tuples of one relation, column by column). Both only compute
positions; not a byte is copied. Transactions, tables and JSON are in ``flusher``.

Sources: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html and
https://www.postgresql.org/docs/current/protocol-replication.html.

A frame is what one CopyData message holds. XLogData is ``w``, start, end, send time (25 bytes),
then one pgoutput message; a keepalive is ``k``, end of WAL, send time, reply wanted (18 bytes).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cdc_assets.errors import ReplicationProblem
from cdc_assets.postgres.lsn import Lsn

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Microseconds from 1970 to 2000, where Postgres counts from.
POSTGRES_EPOCH_MICROSECONDS = 946_684_800_000_000
# A commit's time is at most this far from 2000, some 1,900 years: every reader has dates for it.
LONGEST_MICROSECONDS = 60 * 10**15
# Bytes of an XLogData header; the pgoutput message begins behind it.
XLOG_HEADER_BYTES = 25
KEEPALIVE_BYTES = 18
# Zero bytes needed behind the last tuple: a column that would begin where its message has ended is
# refused only after its kind and its length, five bytes, were read.
PADDING = b"\0" * 8

_BE32, _BE64 = np.dtype(">u4"), np.dtype(">i8")
XLOG_DATA, KEEPALIVE = ord("w"), ord("k")
BEGIN, COMMIT, RELATION = ord("B"), ord("C"), ord("R")
INSERT, UPDATE, DELETE, TRUNCATE = ord("I"), ord("U"), ord("D"), ord("T")
ORIGIN, TYPE, MESSAGE = ord("O"), ord("Y"), ord("M")
OLD_KEY, OLD_ROW, NEW_ROW = ord("K"), ord("O"), ord("N")
TEXT, NULL, UNCHANGED = ord("t"), ord("n"), ord("u")

# CASCADE and RESTART IDENTITY.
_TRUNCATE_OPTIONS = 3

# The bytes of each kind of message's shortest frame (every field with a fixed place is in it) and
# longest frame. No frame is long enough for a byte that isn't a kind.
_MOST = np.full(256, np.iinfo(np.int64).max)
_LEAST = _MOST.copy()
for _kind, _body in (
    *((BEGIN, 20), (COMMIT, 25), (RELATION, 9), (TRUNCATE, 5)),
    *((INSERT, 7), (UPDATE, 7), (DELETE, 7)),  # oid, marker, number of columns
    *((ORIGIN, 9), (TYPE, 6), (MESSAGE, 14)),
):
    _LEAST[_kind] = XLOG_HEADER_BYTES + 1 + _body
_MOST[[BEGIN, COMMIT]] = _LEAST[[BEGIN, COMMIT]]
_MOST[KEEPALIVE] = _LEAST[KEEPALIVE] = KEEPALIVE_BYTES


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as a Relation message has it, which is without its attribute number.

    ``is_key``: part of the replica identity.
    """

    name: str
    type_oid: int
    modifier: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """The form of a table's tuples, until the next Relation message of the same oid."""

    oid: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]

    @classmethod
    def parse(cls, message: bytes) -> Relation:
        """Read a Relation message (from its ``R`` on). Raises ReplicationProblem if it is torn."""
        try:
            oid = int.from_bytes(message[1:5])
            schema, name, rest = message[5:].split(b"\0", 2)
            identity, count = struct.unpack_from(">cH", rest)
            columns, at = [], 3
            if identity not in b"dfin":
                raise ValueError("no such replica identity")
            for _ in range(count):
                flags, end = rest[at], rest.index(b"\0", at + 1)
                if flags > 1:
                    raise ValueError("no such flags of a column")
                type_oid, modifier = struct.unpack_from(">Ii", rest, end + 1)
                columns.append(
                    RelationColumn(rest[at + 1 : end].decode(), type_oid, modifier, bool(flags & 1))
                )
                at = end + 9
            names = {column.name for column in columns}
            if at != len(rest) or len(names) != count or "" in names:
                raise ValueError("more bytes than columns, or columns that have one name or none")
            return cls(
                oid, schema.decode() or "pg_catalog", name.decode(), identity.decode(), (*columns,)
            )
        except (ValueError, IndexError, struct.error) as error:
            raise broken(f"a Relation message of {len(message)} bytes") from error


def truncated_relations(message: bytes) -> list[int]:
    """The oids that a Truncate message names. Raises ReplicationProblem if it is torn."""
    count, options = struct.unpack_from(">IB", message, 1)
    if count == 0 or options > _TRUNCATE_OPTIONS or len(message) != 6 + 4 * count:
        raise broken(f"a Truncate message of {len(message)} bytes for {count} tables")
    return [*struct.unpack_from(f">{count}I", message, 6)]


def check_bystander(message: bytes, lsn: int) -> None:
    """Check a message that is otherwise ignored, Type or Message; there are few of them.

    Else a change whose kind was damaged might be skipped as one. Raises ReplicationProblem.
    """
    kind, body = message[0], message[1:]
    if kind == TYPE:
        names = body[4:].split(b"\0")
        fits = len(names) == 3 and names[1] != b"" and names[2] == b""
    else:
        end = body.find(b"\0", 9)
        size = int.from_bytes(body[end + 1 : end + 5])
        fits = body[0] <= 1 and end > 0 and len(body) == end + 5 + size
    if not fits:
        raise broken(f"a message of kind {chr(kind)!r} in {len(message)} bytes", lsn)


def broken(what: str, lsn: int | None = None) -> ReplicationProblem:
    """The error for a stream that violates the protocol: nothing read from it can be trusted."""
    where = "" if lsn is None else f" at LSN {Lsn(lsn)}"
    return ReplicationProblem(
        f"the replication stream is broken: {what}{where} can't be read as pgoutput protocol 1.",
        "Nothing of it was staged; a restart reads it again. If it comes back, report it with the"
        " server's version.",
    )


def at_every_byte(buffer: Bytes, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """A value of ``kind`` at *every* byte position, as a view: index it to gather some."""
    return np.ndarray((max(len(buffer) - kind.itemsize + 1, 0),), kind, buffer.data, strides=(1,))


def be32(buffer: Bytes) -> npt.NDArray[np.uint32]:
    """The big-endian uint32 at every byte position."""
    return at_every_byte(buffer, _BE32)


def be64(buffer: Bytes) -> Ints:
    """The big-endian int64 at every byte position."""
    return at_every_byte(buffer, _BE64)


def bytes_of(blob: bytes | bytearray | memoryview) -> Bytes:
    """``blob`` as an array, without a copy."""
    return np.frombuffer(blob, np.uint8)


@dataclass(frozen=True, slots=True)
class Scan:
    """The frames of one batch: where each begins and ends, and the kind of its message."""

    buffer: Bytes
    start: Ints
    stop: Ints
    kind: Bytes

    def of(self, *kinds: int) -> Ints:
        """The numbers of the frames that are of one of ``kinds``, in order."""
        wanted = self.kind == kinds[0]
        for kind in kinds[1:]:
            wanted |= self.kind == kind
        return np.flatnonzero(wanted)

    def int64(self, frames: Ints, offset: int) -> Ints:
        """The int64 field at ``offset`` of each of ``frames``."""
        return be64(self.buffer)[self.start[frames] + offset].astype(np.int64)

    def lsn(self, frames: Ints, offset: int) -> Ints:
        """The LSN at ``offset`` of each; raises ReplicationProblem if one is out of range."""
        found = self.int64(frames, offset)
        if bool((found < 0).any()):
            raise broken("an LSN beyond 7FFFFFFF/FFFFFFFF")
        return found

    def time(self, frames: Ints, offset: int) -> Ints:
        """Microseconds since 2000 at ``offset`` of each; ReplicationProblem if one is no date."""
        found = self.int64(frames, offset)
        if bool(((found < -LONGEST_MICROSECONDS) | (found > LONGEST_MICROSECONDS)).any()):
            raise broken("a time that is no date")
        return found

    def uint32(self, frames: Ints, offset: int) -> Ints:
        """The unsigned 32-bit field (an oid, a transaction id) at ``offset`` of each frame."""
        return be32(self.buffer)[self.start[frames] + offset].astype(np.int64)

    def frame_lsn(self, frame: int) -> int:
        """The start LSN in the XLogData header of one frame."""
        return int(be64(self.buffer)[self.start[frame] + 1]) % 2**64

    def message(self, frame: int) -> bytes:
        """The pgoutput message of one frame."""
        begin = int(self.start[frame]) + XLOG_HEADER_BYTES
        return self.buffer[begin : int(self.stop[frame])].tobytes()


def scan(
    blob: bytes | bytearray | memoryview, lengths: npt.NDArray[np.int32], gap: int = 0
) -> Scan:
    """Find the frames of ``blob``: their sizes are ``lengths``; ``gap`` bytes are before each.

    Raises ReplicationProblem for anything that protocol 1 doesn't have.
    """
    buffer = bytes_of(blob)
    stop: Ints = np.cumsum(lengths + gap, dtype=np.int64)
    start: Ints = stop - lengths
    if len(lengths) == 0:
        return Scan(buffer, start, stop, np.empty(0, np.uint8))
    if stop[-1] != len(buffer) or int(lengths.min()) < KEEPALIVE_BYTES:
        raise broken(f"a batch of {len(lengths)} frames and {len(buffer)} bytes")
    data = buffer[start] == XLOG_DATA
    if bool((lengths[data] <= XLOG_HEADER_BYTES).any()):
        raise broken("a message without a body")
    kind = buffer[start + np.where(data, XLOG_HEADER_BYTES, 0)]
    fits = (lengths >= _LEAST[kind]) & (lengths <= _MOST[kind]) & (data != (kind == KEEPALIVE))
    if not bool(fits.all()):
        odd = int(np.argmin(fits))
        what = f"a message of kind {bytes(kind[odd : odd + 1])!r} in {lengths[odd]} bytes"
        raise broken(what, int(be64(buffer)[start[odd] + 1]) % 2**64)
    return Scan(buffer, start, stop, kind)


@dataclass(frozen=True, slots=True)
class Tuples:
    """Many tuples of one relation: of column c and tuple i, the kind and where its text lies.

    ``kind``, ``first`` and ``stop`` have the shape (columns, tuples); a value that is not text has
    an empty range. ``end``: where each tuple ends.
    """

    kind: Bytes
    first: Ints
    stop: Ints
    end: Ints


class TornTuple(Exception):
    """Tuple ``number`` of those that were walked violates the protocol: it has ``what``."""

    def __init__(self, odd: Mask, what: str) -> None:
        self.number = int(np.argmax(odd))
        self.what = what
        super().__init__(what)


def walk(buffer: Bytes, position: Ints, stop: Ints, columns: int) -> Tuples:
    """Read the tuples whose column count stands at ``position``; all have ``columns`` columns.

    ``stop``: where the message of each ends, PADDING bytes before the end of ``buffer`` at the
    latest. Lengths are read as unsigned, so one that is negative leads out of its message like one
    that is too long: no position is ever used that wasn't compared with ``stop``. Raises TornTuple;
    the caller checks that each message ends where its last tuple does.
    """
    count = len(position)
    kind = np.empty((columns, count), np.uint8)
    first = np.empty((columns, count), np.int64)
    last = np.empty((columns, count), np.int64)
    length = be32(buffer)
    at = position + 2
    _refuse(at > stop, "no columns")
    stated = (buffer[position].astype(np.int64) << 8) | buffer[position + 1]
    _refuse(stated != columns, f"another number of columns than {columns}")
    for column in range(columns):
        kinds = buffer[at]
        text = kinds == TEXT
        if bool(text.all()):
            begin = at + 5
            end = begin + length[at + 1]
        else:
            odd = ~(text | (kinds == NULL) | (kinds == UNCHANGED))
            _refuse(odd, "a column that is neither text nor null nor unchanged")
            begin = at + np.where(text, 5, 1)
            end = begin + np.where(text, length[at + 1], 0)
        _refuse(end > stop, "a column that is longer than its message")
        kind[column], first[column], last[column] = kinds, begin, end
        at = end
    return Tuples(kind, first, last, at)


def _refuse(odd: Mask, what: str) -> None:
    if bool(odd.any()):
        raise TornTuple(odd, what)
