"""What carries the bytes of a replication connection past libpq: its socket, or its TLS on it.

libpq connects, checks certificates and answers for passwords. Of a connection with TLS it gives
away OpenSSL's own handle (``PQsslStruct``), which is read and written here by the same OpenSSL. One
thread has both: neither libpq nor OpenSSL is called by two at once.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import select
import socket
from contextlib import suppress
from ctypes import c_char_p, c_int, c_ulong, c_void_p
from typing import Final, Self

from psycopg import pq
from psycopg.pq.abc import PGconn

# A record of TLS has no more than this. Who has room for it gets all of it: what OpenSSL would keep
# back makes no socket readable.
RECORD_BYTES: Final = 2**14
_WANT_READ, _WANT_WRITE, _ZERO_RETURN, _SYSCALL = 2, 3, 6, 5  # SSL_get_error's


class SocketWire:
    """A connection without encryption. Never waits; an OSError means that it is lost."""

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._socket.setblocking(False)

    @classmethod
    def of(cls, connection: PGconn) -> Self:
        """The socket of ``connection``; closing the one leaves the other open."""
        return cls(socket.socket(fileno=socket.dup(connection.socket)))

    def fileno(self) -> int:
        return self._socket.fileno()

    def peek(self, size: int) -> bytes:
        """The next bytes, at most ``size``, which stay; none at the end.

        Raises BlockingIOError if there are none yet, or OSError.
        """
        return self._socket.recv(size, socket.MSG_PEEK)

    def skip(self, size: int) -> None:
        """Read the first ``size`` of the bytes that :meth:`peek` returned."""
        self._socket.recv(size)

    def receive_into(self, room: memoryview, limit_bytes: int) -> int:
        """Read what has arrived, about ``limit_bytes`` at most; returns how much, 0 at the end.

        ``room`` has at least RECORD_BYTES. Raises BlockingIOError if nothing has arrived, or
        OSError.
        """
        return self._socket.recv_into(room[:limit_bytes])

    def send(self, data: bytes) -> int:
        """Send as much as fits; returns how much. Raises BlockingIOError if nothing does.

        Whatever wasn't sent is first in the next ``data``. Raises OSError.
        """
        return self._socket.send(data)

    def close(self) -> None:
        self._socket.close()


class TlsWire:
    """A connection with TLS, which OpenSSL reads for libpq. Waits for nothing, as SocketWire."""

    def __init__(self, library: _OpenSsl, handle: int, descriptor: int) -> None:
        self._library = library
        self._handle = handle
        self._descriptor = descriptor
        self._lost: OSError | None = None

    @classmethod
    def of(cls, connection: PGconn) -> Self | None:
        """The TLS of ``connection``, which has to outlive it; None if libpq keeps it to itself."""
        library = _openssl()
        handle = library and library.handle_of(connection)
        return cls(library, handle, connection.socket) if library and handle else None

    def fileno(self) -> int:
        return self._descriptor

    def peek(self, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._library.clear()
        got = self._library.peek(self._handle, ctypes.addressof(buffer), size)
        return buffer.raw[: got if got > 0 else self._end(got)]

    def skip(self, size: int) -> None:
        buffer = ctypes.create_string_buffer(size)
        self._library.read(self._handle, ctypes.addressof(buffer), size)

    def receive_into(self, room: memoryview, limit_bytes: int) -> int:
        if self._lost is not None:
            raise self._lost
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        got, size = 0, len(room)
        self._library.clear()
        while got < limit_bytes and size - got >= RECORD_BYTES:
            read = self._library.read(self._handle, start + got, size - got)
            if read <= 0:
                if not got:
                    return self._end(read)
                self._keep(read)
                break
            got += read
        return got

    def send(self, data: bytes) -> int:
        self._library.clear()
        sent: int = self._library.write(self._handle, data, len(data))
        if sent > 0:
            return sent
        self._end(sent)
        raise ConnectionError("server closed the connection unexpectedly")

    def _keep(self, returned: int) -> None:
        """Raise at the next look what ``returned`` means: OpenSSL tells it once."""
        try:
            self._end(returned)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost = error

    def _end(self, returned: int) -> int:
        """0 at an orderly end, which is what ``returned`` means; else raises."""
        number = ctypes.get_errno()
        why = self._library.error(self._handle, returned)
        if why == _ZERO_RETURN or (why == _SYSCALL and not number):
            return 0
        if why in (_WANT_READ, _WANT_WRITE):
            raise BlockingIOError
        if why == _SYSCALL:
            raise OSError(number, os.strerror(number))
        raise ConnectionError(f"TLS ended with an error: {self._library.reason()}")

    def close(self) -> None:
        """Nothing: the handle is libpq's."""


Wire = SocketWire | TlsWire


def wire_of(connection: PGconn) -> Wire | None:
    """What ``connection``'s bytes go over; None if only libpq can read it."""
    return TlsWire.of(connection) if connection.ssl_in_use else SocketWire.of(connection)


def answered(wire: Wire, size: int) -> bytes:
    """Wait for an answer; returns its first bytes, which stay. Raises OSError."""
    while True:
        with suppress(BlockingIOError):
            return wire.peek(size)
        select.select([wire], [], [])


class _OpenSsl:
    """The functions of libpq, and of the OpenSSL that it is linked with."""

    def __init__(self, path: str) -> None:
        # Names are looked up in what the library at path needs: in libpq, then in its OpenSSL.
        waiting, quick = ctypes.CDLL(path, use_errno=True), ctypes.PyDLL(path)
        self._struct = quick.PQsslStruct
        self._struct.argtypes, self._struct.restype = (c_void_p, c_char_p), c_void_p
        self.peek, self.read, self.write = waiting.SSL_peek, waiting.SSL_read, waiting.SSL_write
        for called in (self.peek, self.read):
            called.argtypes, called.restype = (c_void_p, c_void_p, c_int), c_int
        self.write.argtypes, self.write.restype = (c_void_p, c_char_p, c_int), c_int
        self.error = quick.SSL_get_error
        self.error.argtypes, self.error.restype = (c_void_p, c_int), c_int
        self.clear = quick.ERR_clear_error
        self.clear.argtypes, self.clear.restype = (), None
        self._first, self._reason = quick.ERR_peek_error, quick.ERR_reason_error_string
        self._first.argtypes, self._first.restype = (), c_ulong
        self._reason.argtypes, self._reason.restype = (c_ulong,), c_char_p

    def handle_of(self, connection: PGconn) -> int | None:
        """The SSL object of a connection, None if its TLS isn't OpenSSL's."""
        handle: int | None = self._struct(getattr(connection, "pgconn_ptr", None), b"OpenSSL")
        return handle

    def reason(self) -> str:
        """Of the first error since :attr:`clear`."""
        said: bytes | None = self._reason(self._first())
        return said.decode(errors="replace") if said else "no reason given"


@functools.cache
def _openssl() -> _OpenSsl | None:
    """None if it isn't found where psycopg's compiled module has it (its pure one: nowhere)."""
    try:
        path = importlib.import_module(f"psycopg_{pq.__impl__}.pq").__file__
        return _OpenSsl(path) if path else None
    except (ImportError, OSError, AttributeError):
        return None
