"""A session that reads rows by COPY in binary: 0.3 µs of CPU a row of sixteen columns.

libpq connects; from then on the session's bytes are read here, some hundreds of rows at a time,
where libpq would make one object for each. What only libpq can read (GSS) goes through it and is
then read in the same way. A session is of one thread.

Source: https://www.postgresql.org/docs/current/protocol-flow.html, "Simple Query", "COPY".
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
import psycopg
import pyarrow as pa

from cdc_assets.postgres.copy_out.kinds import Kind
from cdc_assets.postgres.copy_out.libpq import LibpqSession
from cdc_assets.postgres.copy_out.loops import rows_at
from cdc_assets.postgres.copy_out.tuples import (
    BATCH_BYTES,
    HEADER,
    SIGNATURE,
    SLACK_BYTES,
    TRAILER,
    broken,
)
from cdc_assets.postgres.copy_out.values import batch_of
from cdc_assets.postgres.session.messages import COPY_DATA, LONGEST_BYTES, PREFIX, server_error
from cdc_assets.postgres.session.wires import Wire, answered, wire_of

# How long to wait once there is nothing to read: the server then has more than a piece ready, and
# neither it nor we are woken for each of its 8 kB.
_NAP_SECONDS: Final = 0.0005
# After that long with nothing new, what is here is looked at.
_SILENCE_MILLISECONDS: Final = 50
# The answer to an empty query, to a session that is in no transaction.
_EMPTY: Final = b"I\0\0\0\4Z\0\0\0\5I"
_READY_BYTES = 6
_COPY_OUT, _COPY_DONE, _COMPLETE, _READY, _ERROR = b"HcCZE"
# Notices, parameters, notifications; and a SELECT's rows, which a statement that sets may have.
_ASIDE: Final = b"NSATDI"


class Session(Protocol):
    """What reads rows: :class:`DirectSession`, or libpq where that can't."""

    def execute(self, statement: str) -> None:
        """Run a statement whose rows aren't wanted. Raises psycopg.Error."""

    def read(self, query: str, kinds: Sequence[Kind]) -> Iterator[pa.RecordBatch]:
        """The rows of a SELECT, whose columns are sent as ``kinds``. Raises psycopg.Error.

        If it isn't read to its end, the session is closed.
        """

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...


def open_session(address: str) -> Session:
    """Connect. Raises psycopg.Error."""
    connection = psycopg.connect(address, autocommit=True)
    try:
        direct = DirectSession.take_over(connection)
    except BaseException:
        connection.close()
        raise
    return direct or LibpqSession(connection)


class DirectSession:
    """A session whose bytes are read past libpq."""

    def __init__(self, connection: psycopg.Connection[Any], wire: Wire) -> None:
        self._connection, self._wire = connection, wire
        self._buffer = np.empty(BATCH_BYTES + SLACK_BYTES, np.uint8)
        self._at = self._filled = 0
        self._poll = select.poll()
        self._poll.register(wire.fileno(), select.POLLIN)
        self._answered, self.closed = True, False

    @classmethod
    def take_over(cls, connection: psycopg.Connection[Any]) -> Self | None:
        """Take a session that is in no transaction; None: libpq has to read it."""
        wire = wire_of(connection.pgconn)
        if wire is None:
            return None
        try:
            connection.pgconn.send_query(b"")
            while _EMPTY.startswith(said := answered(wire, len(_EMPTY))) and said != _EMPTY:
                time.sleep(_NAP_SECONDS)  # the rest of it is under way
            if said != _EMPTY:
                wire.close()
                while connection.pgconn.get_result() is not None:
                    pass
                return None
            wire.begin_behind(len(_EMPTY))
        except BaseException as error:
            wire.close()
            if isinstance(error, OSError):
                raise psycopg.OperationalError(f"the connection was lost: {error}") from error
            raise
        connection.pgconn.nonblocking = 1  # its end sends Terminate, and would wait for the server
        return cls(connection, wire)

    def execute(self, statement: str) -> None:
        failed: psycopg.Error | None = None
        try:
            self._send(statement)
            while not self._answered:
                kind, body = self._message(failed)
                if kind == _READY:
                    self._answered = True
                elif kind == _ERROR:
                    failed = server_error(body)
                elif kind != _COMPLETE and kind not in _ASIDE:
                    raise self._astray(kind)
        finally:
            self._close_unless_answered()
        if failed is not None:
            raise failed

    def read(self, query: str, kinds: Sequence[Kind]) -> Iterator[pa.RecordBatch]:
        try:
            self._send(f"copy ({query}) to stdout (format binary)")
            for begin, rows in self._rows(len(kinds)):
                yield batch_of(self._buffer, begin, rows, kinds)
        finally:
            self._close_unless_answered()

    def _rows(self, fields: int) -> Iterator[tuple[int, int]]:
        """Where rows begin in the buffer that lie back to back, and how many, to the end."""
        failed: psycopg.Error | None = None
        at_end = False
        while not self._answered:
            while (message := self._whole()) is not None:
                begin = self._at
                rows, behind = rows_at(self._buffer, begin, self._filled, fields)
                if rows and not at_end:
                    self._at = behind
                    yield begin, rows
                    continue
                kind, first, self._at = message
                if kind == COPY_DATA and not at_end:
                    at_end = self._is_trailer(first, self._at)
                    if not at_end:
                        self._at = self._row_behind_header(first, self._at, fields)
                elif kind == _ERROR:
                    failed = server_error(self._bytes(first, self._at))
                elif kind == _READY and (at_end or failed is not None):
                    self._answered = True
                    break
                elif kind not in (_COPY_OUT, _COPY_DONE, _COMPLETE) and kind not in _ASIDE:
                    raise self._astray(kind)
            if not self._answered:
                self._fill(failed)
        if failed is not None:
            raise failed

    def _row_behind_header(self, first: int, end: int, fields: int) -> int:
        """Where the row that shares its message with the header begins, as a message of its own.

        That message is written over the header's end.
        """
        row = self._behind_header(first, end)
        if row == first:
            raise broken(f"a row has another number of fields than {fields}")
        if row > end:
            raise broken("its header is torn")
        if row < end:
            PREFIX.pack_into(self._buffer.data, row - PREFIX.size, COPY_DATA, 4 + end - row)
            return row - PREFIX.size
        return end

    def _behind_header(self, first: int, end: int) -> int:
        body = self._bytes(first, min(end, first + HEADER.size))
        if not body.startswith(SIGNATURE):
            return first
        if len(body) < HEADER.size:
            raise broken("its header is torn")
        return first + HEADER.size + int(HEADER.unpack(body)[2])

    def _is_trailer(self, first: int, end: int) -> bool:
        first = self._behind_header(first, end)
        return end - first == len(TRAILER) and self._bytes(first, end) == TRAILER

    def _send(self, statement: str) -> None:
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        self._answered = False
        body = statement.encode() + b"\0"
        rest = PREFIX.pack(ord("Q"), 4 + len(body)) + body
        try:
            while rest:
                try:
                    rest = rest[self._wire.send(rest) :]
                except BlockingIOError:
                    self._poll.modify(self._wire.fileno(), select.POLLOUT)
                    self._poll.poll()
                    self._poll.modify(self._wire.fileno(), select.POLLIN)
        except OSError as error:
            raise self._lost(error) from error

    def _message(self, failed: psycopg.Error | None) -> tuple[int, bytes]:
        """The next message, and what is in it."""
        while (message := self._whole()) is None:
            self._fill(failed)
        kind, first, self._at = message
        return kind, self._bytes(first, self._at)

    def _whole(self) -> tuple[int, int, int] | None:
        """The next message's kind, and where its body begins and ends; None if it isn't here."""
        if self._filled - self._at < PREFIX.size:
            return None
        kind, length = PREFIX.unpack_from(self._buffer.data, self._at)
        if not 4 <= length <= LONGEST_BYTES:
            raise self._astray(kind)
        end = self._at + 1 + length
        return (kind, self._at + PREFIX.size, end) if end <= self._filled else None

    def _bytes(self, begin: int, end: int) -> bytes:
        return self._buffer[begin:end].tobytes()

    def _fill(self, failed: psycopg.Error | None) -> None:
        """Read until the buffer is full, the answer has come to its end, or nothing more comes.

        ``failed``: what is raised instead if the server hangs up.
        """
        self._make_room()
        view, full = self._buffer.data, len(self._buffer) - SLACK_BYTES
        try:
            while self._filled < full:
                try:
                    got = self._wire.receive_into(view[self._filled : full], full)
                except BlockingIOError:
                    if self._filled == self._at:
                        self._poll.poll()
                    elif self._poll.poll(_SILENCE_MILLISECONDS):
                        time.sleep(_NAP_SECONDS)
                    else:
                        return
                    continue
                if got == 0:
                    raise ConnectionError("server closed the connection unexpectedly")
                self._filled += got
                if self._seems_ready():
                    return
        except OSError as error:
            # What came before it is read first; then there is nothing more, and this comes back.
            if self._whole() is None:
                lost = self._lost(error)
                raise failed or lost from error

    def _seems_ready(self) -> bool:
        """Whether what was read last may be the end of an answer."""
        last = self._buffer[max(self._at, self._filled - _READY_BYTES) : self._filled]
        return last[:-1].tobytes() == b"Z\0\0\0\5"

    def _make_room(self) -> None:
        """Move what isn't read yet to the front, of a buffer that grows with what has arrived.

        What isn't read is a torn message: no buffer is twice as large as the largest of them.
        """
        rest = self._buffer[self._at : self._filled]
        if self._at == 0 and self._filled < len(self._buffer) - SLACK_BYTES:
            return
        size = BATCH_BYTES
        if len(rest) >= PREFIX.size:
            length = 1 + PREFIX.unpack_from(rest.data)[1]
            while size < min(2 * len(rest), length):
                size *= 2
        if size + SLACK_BYTES == len(self._buffer):
            self._buffer[: len(rest)] = rest.copy()
        else:
            larger = np.empty(size + SLACK_BYTES, np.uint8)
            larger[: len(rest)] = rest
            self._buffer = larger
        self._at, self._filled = 0, len(rest)

    def _lost(self, error: OSError) -> psycopg.Error:
        self.close()
        return psycopg.OperationalError(f"the connection was lost: {error}")

    def _astray(self, kind: int) -> psycopg.Error:
        self.close()
        return broken(f"a message of kind {chr(kind)!r} is out of place")

    def _close_unless_answered(self) -> None:
        """What isn't read of an answer would be taken for the next one's."""
        if not self._answered:
            self.close()

    def close(self) -> None:
        self.closed = True
        self._wire.close()
        self._connection.close()
