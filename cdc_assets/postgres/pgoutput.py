"""The wire format of pgoutput (protocol 1, text), read by columns instead of message by message.

What lives here: where the fields of a message are, the Relation message, and the two vectorized
readers everything else is built on: :func:`scan` (one look at each frame of a batch) and
:func:`walk` (the values of many tuples of one relation, column by column). Both only compute
positions; not a byte is copied. What does not belong: transactions, tables, JSON (``flusher``).

Sources: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html and
https://www.postgresql.org/docs/current/protocol-replication.html.

A frame is what one CopyData message holds. XLogData is ``w``, start, end, send time (25 bytes),
then one pgoutput message; a keepalive is ``k``, end of WAL, send time, reply wanted (18 bytes).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cdc_assets.errors import ReplicationProblem

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Microseconds from 1970 to 2000, where Postgres counts from.
POSTGRES_EPOCH_MICROSECONDS = 946_684_800_000_000
# Bytes of an XLogData header; the pgoutput message begins behind it.
XLOG_HEADER_BYTES = 25
KEEPALIVE_BYTES = 18
# Zero bytes wanted behind the last tuple: a reader of 4 bytes may look past a final one-byte
# column.
PADDING = b"\0" * 8

XLOG_DATA, KEEPALIVE = ord("w"), ord("k")
BEGIN, COMMIT, RELATION = ord("B"), ord("C"), ord("R")
INSERT, UPDATE, DELETE, TRUNCATE = ord("I"), ord("U"), ord("D"), ord("T")
ORIGIN, TYPE, MESSAGE = ord("O"), ord("Y"), ord("M")
OLD_KEY, OLD_ROW, NEW_ROW = ord("K"), ord("O"), ord("N")
TEXT, NULL, UNCHANGED = ord("t"), ord("n"), ord("u")

_KNOWN = np.zeros(256, np.bool_)
_KNOWN[
    [BEGIN, COMMIT, RELATION, INSERT, UPDATE, DELETE, TRUNCATE, ORIGIN, TYPE, MESSAGE, KEEPALIVE]
] = True


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column as a Relation message tells it; ``is_key``: part of the replica identity."""

    name: str
    type_oid: int
    type_modifier: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """What the tuples of a table look like from here on, until the next one of the same oid."""

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
            for _ in range(count):
                flags, end = rest[at], rest.index(b"\0", at + 1)
                type_oid, modifier = struct.unpack_from(">Ii", rest, end + 1)
                columns.append(
                    RelationColumn(rest[at + 1 : end].decode(), type_oid, modifier, bool(flags & 1))
                )
                at = end + 9
        except (ValueError, IndexError, struct.error) as error:
            raise broken(f"a Relation message of {len(message)} bytes") from error
        return cls(
            oid, schema.decode() or "pg_catalog", name.decode(), identity.decode(), (*columns,)
        )


def broken(what: str) -> ReplicationProblem:
    """The stream isn't what the protocol says; nothing that was read can be trusted."""
    return ReplicationProblem(
        f"the replication stream is broken: {what} can't be read as pgoutput protocol 1.",
        "Nothing of it was staged; a restart reads it again. If it comes back, report it with the"
        " server's version.",
    )


def be32(buffer: Bytes) -> npt.NDArray[np.int32]:
    """The big-endian int32 at *every* byte position, as a view: index it to gather some."""
    return np.ndarray((max(len(buffer) - 3, 0),), ">i4", buffer.data, strides=(1,))


def be64(buffer: Bytes) -> Ints:
    """The big-endian int64 at every byte position, as a view."""
    return np.ndarray((max(len(buffer) - 7, 0),), ">i8", buffer.data, strides=(1,))


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

    def uint32(self, frames: Ints, offset: int) -> Ints:
        """The unsigned 32-bit field (an oid, a transaction id) at ``offset`` of each frame."""
        return be32(self.buffer)[self.start[frames] + offset].view(">u4").astype(np.int64)

    def message(self, frame: int) -> bytes:
        """The pgoutput message of one frame."""
        begin = int(self.start[frame]) + XLOG_HEADER_BYTES
        return self.buffer[begin : int(self.stop[frame])].tobytes()


def scan(blob: bytes | bytearray | memoryview, lengths: npt.NDArray[np.int32]) -> Scan:
    """Find the frames of ``blob``: ``lengths`` are their sizes, in order.

    Raises ReplicationProblem for anything that protocol 1 doesn't have.
    """
    buffer = bytes_of(blob)
    stop = np.cumsum(lengths, dtype=np.int64)
    start = stop - lengths
    if len(lengths) == 0:
        return Scan(buffer, start, stop, np.empty(0, np.uint8))
    if stop[-1] != len(buffer) or int(lengths.min()) < KEEPALIVE_BYTES:
        raise broken(f"a batch of {len(lengths)} frames and {len(buffer)} bytes")
    data = buffer[start] == XLOG_DATA
    if bool((lengths[data] <= XLOG_HEADER_BYTES).any()):
        raise broken("a message without a body")
    kind = buffer[start + np.where(data, XLOG_HEADER_BYTES, 0)]
    if not bool(_KNOWN[kind].all()):
        unknown = bytes(np.unique(kind[~_KNOWN[kind]]))
        raise broken(f"a message of kind {unknown!r}")
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


def walk(buffer: Bytes, position: Ints, columns: int) -> Tuples:
    """Read the tuples whose column count stands at ``position``; all have ``columns`` columns.

    ``buffer`` is padded by PADDING. Raises ReplicationProblem if a tuple leaves the buffer or has
    another number of columns; the caller checks that each ends where its message does.
    """
    count = len(position)
    kind = np.empty((columns, count), np.uint8)
    first = np.empty((columns, count), np.int64)
    stop = np.empty((columns, count), np.int64)
    int32 = be32(buffer)
    try:
        stated = (buffer[position].astype(np.int64) << 8) | buffer[position + 1]
        if not bool((stated == columns).all()):
            raise broken(f"a tuple that should have {columns} columns")
        at = position + 2
        for column in range(columns):
            kinds = buffer[at]
            text = kinds == TEXT
            if bool(text.all()):
                begin = at + 5
                end = begin + int32[at + 1]
            else:
                if not bool((text | (kinds == NULL) | (kinds == UNCHANGED)).all()):
                    raise broken("a column that is neither text nor null nor unchanged")
                begin = at + np.where(text, 5, 1)
                end = begin + np.where(text, int32[at + 1], 0)
            kind[column], first[column], stop[column] = kinds, begin, end
            at = end
    except IndexError as error:
        raise broken("a tuple") from error
    return Tuples(kind, first, stop, at)
