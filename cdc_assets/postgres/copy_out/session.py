"""A session that reads rows by COPY in binary: 0.3 µs of CPU a row of sixteen columns.

libpq connects; from then on the session's bytes are read here, some hundreds of rows at a time,
where libpq would make one object for each. What only libpq can read (GSS) goes through it and is
then read in the same way. A session is of one thread.

Source: https://www.postgresql.org/docs/current/protocol-flow.html, "Simple Query", "COPY".
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
import psycopg
import pyarrow as pa

from cdc_assets.postgres.copy_out.tuples import (
    COPY_DATA,
    PREFIX,
    SLACK_BYTES,
    broken,
    rows_at,
)
from cdc_assets.postgres.copy_out.values import Kind, batch_of
from cdc_assets.postgres.pgoutput import Ints
from cdc_assets.postgres.session.messages import server_error
from cdc_assets.postgres.session.wires import Wire, answered, wire_of

# Bytes that become one batch, unless a row is longer: they fit the CPU's caches.
BATCH_BYTES: Final = 2**20
# How long to wait once there is nothing to read: the server then has more than a piece ready, and
# neither it nor we are woken for each of its 8 kB.
_NAP_SECONDS: Final = 0.0005
# After that long with nothing new, what is here is looked at.
_SILENCE_MILLISECONDS: Final = 50
# Postgres allocates 1 GB at most for a message; its length counts itself.
_LONGEST_BYTES: Final = 2**30 + 4
# The answer to an empty query, to a session that is in no transaction.
_EMPTY: Final = b"I\0\0\0\4Z\0\0\0\5I"
_READY_BYTES = 6
_COPY_OUT, _COPY_DONE, _COMPLETE, _READY, _ERROR = b"HcCZE"
# Notices, parameters, notifications; and a SELECT's rows, which a statement that sets may have.
_ASIDE: Final = b"NSATDI"
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0"
_HEADER: Final = struct.Struct(">11sII")
_TRAILER: Final = b"\xff\xff"


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
        self.closed = False

    @classmethod
    def take_over(cls, connection: psycopg.Connection[Any]) -> Self | None:
        """Take a session that is in no transaction; None: libpq has to read it."""
        wire = wire_of(connection.pgconn)
        if wire is None:
            return None
        try:
            connection.pgconn.send_query(b"")
            if answered(wire, len(_EMPTY)) != _EMPTY:
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
        self._send(statement)
        failed: psycopg.Error | None = None
        while True:
            kind, body = self._message(failed)
            if kind == _READY:
                break
            if kind == _ERROR:
                failed = server_error(body)
            elif kind != _COMPLETE and kind not in _ASIDE:
                raise self._astray(kind)
        if failed is not None:
            raise failed

    def read(self, query: str, kinds: Sequence[Kind]) -> Iterator[pa.RecordBatch]:
        self._send(f"copy ({query}) to stdout (format binary)")
        ended = False
        try:
            for begin, end in self._rows(len(kinds)):
                yield batch_of(self._buffer, begin, end, kinds)
            ended = True
        except psycopg.Error as error:
            ended = _is_servers(error)
            raise
        finally:
            if not ended:
                self.close()

    def _rows(self, fields: int) -> Iterator[tuple[Ints, Ints]]:
        """Where the fields of rows in the buffer begin and end, batch by batch, to the end."""
        failed: psycopg.Error | None = None
        over = False
        while not over:
            found = list[tuple[Ints, Ints]]()
            while True:
                begin, end = rows_at(self._buffer, self._at, self._filled, fields)
                if len(begin):
                    found.append((begin, end))
                    self._at = int(end[-1])
                    continue
                if (message := self._whole()) is None:
                    break
                kind, first, self._at = message
                if kind == COPY_DATA:
                    found += self._odd_row(first, self._at, fields)
                elif kind == _ERROR:
                    failed = server_error(self._bytes(first, self._at))
                elif kind == _READY:
                    over = True
                    break
                elif kind not in (_COPY_OUT, _COPY_DONE, _COMPLETE) and kind not in _ASIDE:
                    raise self._astray(kind)
            if found:
                yield (
                    np.concatenate([begin for begin, _ in found]),
                    np.concatenate([end for _, end in found]),
                )
            if not over:
                self._fill(failed)
        if failed is not None:
            raise failed

    def _odd_row(self, first: int, end: int, fields: int) -> list[tuple[Ints, Ints]]:
        """The row in a message that :func:`rows_at` doesn't find; none in header and trailer."""
        body = self._bytes(first, min(end, first + _HEADER.size))
        if body.startswith(_SIGNATURE):
            if len(body) < _HEADER.size:
                raise broken("its header is torn")
            first += _HEADER.size + _HEADER.unpack(body)[2]
        if first == end or self._bytes(first, end) == _TRAILER:
            return []
        if self._bytes(first, min(end, first + 2)) != fields.to_bytes(2):
            raise broken(f"a row has another number of fields than {fields}")
        return [(np.array([first + 2], np.int64), np.array([end], np.int64))]

    def _send(self, statement: str) -> None:
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        body = statement.encode() + b"\0"
        rest = PREFIX.pack(ord("Q"), 4 + len(body)) + body
        try:
            while rest:
                try:
                    rest = rest[self._wire.send(rest) :]
                except BlockingIOError:
                    select.select([], [self._wire], [])
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
        if not 4 <= length <= _LONGEST_BYTES:
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
        """Move what isn't read yet to the front, of a buffer that grows with what has arrived."""
        rest = self._buffer[self._at : self._filled]
        size = BATCH_BYTES
        while size <= 2 * len(rest):
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

    def close(self) -> None:
        self.closed = True
        self._wire.close()
        self._connection.close()


def _is_servers(error: psycopg.Error) -> bool:
    """Whether the server said so, which then waits for a statement; not that its words are odd."""
    return error.sqlstate not in (None, psycopg.errors.ProtocolViolation.sqlstate)


class LibpqSession:
    """A session whose bytes only libpq can read: an object for each row."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def execute(self, statement: str) -> None:
        self._connection.execute(statement.encode())

    def read(self, query: str, kinds: Sequence[Kind]) -> Iterator[pa.RecordBatch]:
        ended = False
        copy_out = f"copy ({query}) to stdout (format binary)"
        try:
            with self._connection.cursor() as cursor, cursor.copy(copy_out.encode()) as copy:
                rows, size, header = list[bytes](), 0, True
                while row := copy.read():
                    row = bytes(row)
                    if header:
                        row, header = row[_HEADER.size + _HEADER.unpack_from(row)[2] :], False
                    if row and row != _TRAILER:
                        if not row.startswith(len(kinds).to_bytes(2)):
                            raise broken(f"a row has another number of fields than {len(kinds)}")
                        rows.append(row)
                        size += len(row)
                    if size >= BATCH_BYTES:
                        yield _joined(rows, kinds)
                        rows, size = [], 0
                if rows:
                    yield _joined(rows, kinds)
            ended = True
        except psycopg.Error as error:
            ended = _is_servers(error)
            raise
        finally:
            if not ended:
                self.close()

    def close(self) -> None:
        self._connection.close()


def _joined(rows: Sequence[bytes], kinds: Sequence[Kind]) -> pa.RecordBatch:
    end = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
    begin = np.concatenate([np.zeros(1, np.int64), end[:-1]]) + 2
    buffer = np.frombuffer(b"".join([*rows, bytes(SLACK_BYTES)]), np.uint8)
    return batch_of(buffer, begin, end, kinds)
