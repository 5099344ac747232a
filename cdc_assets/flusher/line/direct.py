"""A replication stream read past libpq, which would make one object for each frame.

libpq connects and asks for the stream; from the server's CopyBothResponse on every byte is read
here. That response is looked at before anybody reads it, so libpq never has a byte of the stream.
If something else is there (GSS, an error, a notice before it), libpq goes on.

Whatever is no frame is taken as libpq takes it: notices and parameters are skipped, anything else
ends the stream, behind the frames before it, and an error has its SQL state. No message is longer
than Postgres can send; the buffer grows with what has arrived, never with what a length says.
"""

from __future__ import annotations

import select
import time
from typing import Final, Self

import numpy as np
from psycopg.pq.abc import PGconn

from cdc_assets.flusher.line.ends import Ended
from cdc_assets.flusher.line.frames import PREFIX_BYTES, Received, frames
from cdc_assets.postgres.pgoutput import Ints
from cdc_assets.postgres.session.messages import (
    COPY_DATA,
    LONGEST_BYTES,
    PREFIX,
    described,
    error_fields,
)
from cdc_assets.postgres.session.wires import Wire, answered, wire_of

# CopyBothResponse: format 0, no columns.
_COPY_BOTH: Final = b"W\0\0\0\7\0\0\0"
_COPY_DONE: Final = b"c\0\0\0\4"
# Notices, parameters, notifications.
_ASIDE: Final = b"NSA"
# CopyDone, CommandComplete, ReadyForQuery, ErrorResponse.
_LAST: Final = b"cCZE"
# Messages that are never long get as much as libpq gives them.
_SHORT, _LONGEST_SHORT_BYTES = b"ScCZ", 30_000
# What a look brings at most, unless a frame is larger.
BUFFER_BYTES: Final = 2**20


class DirectLine:
    """Whole frames in, feedback out; doesn't wait. An OSError means that the line is lost."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._buffer = bytearray(BUFFER_BYTES)
        self._filled = 0
        self._awaited = PREFIX_BYTES  # fewer bytes have no whole message
        self._unsent = b""
        self._over: Exception | None = None

    @classmethod
    def take_over(cls, connection: PGconn) -> Self | None:
        """Take the stream that ``connection`` asked for; None: libpq has to read the answer.

        Waits for the answer.
        """
        wire = wire_of(connection)
        if wire is None:
            return None
        try:
            # A part of it falls to libpq, which waits for the rest.
            if answered(wire, len(_COPY_BOTH)) != _COPY_BOTH:
                wire.close()
                return None
            wire.begin_behind(len(_COPY_BOTH))
        except BaseException:
            wire.close()
            raise
        # Its end sends Terminate, and would wait for ever for a server that doesn't read.
        connection.nonblocking = 1
        return cls(wire)

    def fileno(self) -> int:
        return self._wire.fileno()

    @property
    def has_more(self) -> bool:
        """Whether the next look brings something though :meth:`fileno` may not be readable."""
        return self._wire.has_more

    def receive(self, limit_bytes: int) -> Received | None:
        """Frames that have arrived, perhaps none as yet; None if nothing has arrived.

        ``limit_bytes``: about what is read at most; the frame that it completes may be larger.
        Raises Ended, or OSError.
        """
        if self._over is not None:
            raise self._over
        self._flush()
        with memoryview(self._buffer) as view:
            try:
                got = self._wire.receive_into(view[self._filled :], limit_bytes)
            except BlockingIOError:
                return None
        if got == 0:
            raise ConnectionError("server closed the connection unexpectedly")
        self._filled += got
        ends = self._ends() if self._filled >= self._awaited else np.empty(0, np.int64)
        end = int(ends[-1]) if len(ends) else 0
        if self._over is not None and not end:
            raise self._over
        found = memoryview(self._buffer)[:end]
        data = found if len(self._buffer) > BUFFER_BYTES else bytes(found)
        self._forget(end)
        lengths = np.diff(ends, prepend=0).astype(np.int32) - PREFIX_BYTES
        return Received(data, lengths, PREFIX_BYTES)

    def _ends(self) -> Ints:
        """Where the whole frames end, behind one another from 0 on; all else is dealt with."""
        ends = frames(np.frombuffer(self._buffer, np.uint8, self._filled))
        end, walked = int(ends[-1]) if len(ends) else 0, list[int]()
        while self._filled - end >= PREFIX_BYTES:
            kind, length = PREFIX.unpack_from(self._buffer, end)
            stop = end + 1 + length
            longest = _LONGEST_SHORT_BYTES if kind in _SHORT else LONGEST_BYTES
            if not 4 <= length <= longest or kind not in (COPY_DATA, *_ASIDE, *_LAST):
                self._over = _astray()
                break
            if stop > self._filled:
                break
            if kind == COPY_DATA:
                walked.append(end := stop)
            elif kind in _ASIDE:
                if not _is_aside(kind, bytes(self._buffer[end + PREFIX_BYTES : stop])):
                    self._over = _astray()
                    break
                self._buffer[end : self._filled - stop + end] = self._buffer[stop : self._filled]
                self._filled -= stop - end
            else:
                self._over = _ended(kind, bytes(self._buffer[end + PREFIX_BYTES : stop]))
                break
        return np.concatenate([ends, np.array(walked, np.int64)])

    def _forget(self, end: int) -> None:
        """Move what begins at ``end`` to the front, of a buffer that has room behind it.

        A large buffer goes with the frames that were in it.
        """
        rest, size = self._filled - end, len(self._buffer)
        if end:
            size = BUFFER_BYTES
        while size - rest < BUFFER_BYTES // 2:
            size *= 2
        if end or size != len(self._buffer):
            kept = self._buffer if len(self._buffer) == size == BUFFER_BYTES else bytearray(size)
            memoryview(kept)[:rest] = memoryview(self._buffer)[end : self._filled]
            self._buffer, self._filled = kept, rest
        self._awaited = PREFIX_BYTES
        if rest >= PREFIX_BYTES:
            self._awaited = 1 + PREFIX.unpack_from(self._buffer)[1]

    def send(self, body: bytes) -> None:
        """Send a CopyData message; what doesn't fit goes with the next look."""
        self._unsent += _copy_data(body)
        self._flush()

    def _flush(self) -> None:
        if self._unsent:
            try:
                self._unsent = self._unsent[self._wire.send(self._unsent) :]
            except BlockingIOError:
                return

    def end(self, body: bytes, seconds: float) -> None:
        """Send a last message, and that it is the last; waits at most so long. Raises OSError."""
        deadline = time.monotonic() + seconds
        self._unsent += _copy_data(body) + _COPY_DONE
        self._flush()
        while self._unsent:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the server doesn't read")
            select.select([], [self], [], left)
            self._flush()

    def close(self) -> None:
        self._wire.close()


def _copy_data(body: bytes) -> bytes:
    return PREFIX.pack(COPY_DATA, 4 + len(body)) + body


def _astray() -> ConnectionError:
    return ConnectionError("lost synchronization with server")


def _is_aside(kind: int, body: bytes) -> bool:
    """Whether it is what its kind says, and no frame whose kind was damaged on the way."""
    if kind == ord("N"):
        return body == b"\0" or body.find(b"\0\0") == len(body) - 2 >= 0
    if kind == ord("A"):
        body = body[4:]  # behind the process that notifies
    return body.count(b"\0") == 2 and body[-1:] == b"\0"


def _ended(kind: int, body: bytes) -> Ended:
    if kind != ord("E"):
        return Ended()
    fields = error_fields(body)
    message = f"{fields.get('S', 'ERROR')}:  {described(fields)}"
    return Ended(message, fields["C"].encode() if "C" in fields else None)
