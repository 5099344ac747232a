"""What carries the bytes of a replication connection past libpq: its socket, or its TLS on it.

libpq connects, checks certificates and answers for passwords. Of a connection with TLS it gives
away OpenSSL's own handle (``PQsslStruct``), which is read and written here by the same OpenSSL. One
thread has both: neither libpq nor OpenSSL is called by two at once.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import os
import select
import socket
from contextlib import suppress
from ctypes import c_char_p, c_int, c_long, c_ulong, c_void_p
from typing import Any, Final, Self

from psycopg import pq
from psycopg.pq.abc import PGconn

_WANT_READ, _WANT_WRITE, _ZERO_RETURN, _SYSCALL = 2, 3, 6, 5  # SSL_get_error's
_SET_SSL, _NO_CLOSE = 109, 0  # BIO_set_ssl's


class SocketWire:
    """A connection without encryption. Never waits; an OSError means that it is lost.

    It is closed before the connection is.
    """

    has_more: Final = False
    """Whether the next look brings or raises something though :meth:`fileno` isn't readable."""

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

    def begin_behind(self, size: int) -> None:
        """Read the first ``size`` of the bytes that :meth:`peek` returned; now nobody else reads.

        Until then it can be closed, and libpq reads all of it.
        """
        self._socket.recv(size)

    def receive_into(self, room: memoryview, limit_bytes: int) -> int:
        """Read what has arrived, ``limit_bytes`` at most; returns how much, 0 at the end.

        Raises BlockingIOError if nothing has arrived, or OSError.
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
    """A connection with TLS, which OpenSSL reads for libpq. Waits for nothing, as SocketWire.

    A server that streams makes a record of each frame, and OpenSSL gives one record at a time. Its
    own buffer in between asks for as many as there are, in one call.
    """

    def __init__(self, library: _OpenSsl, handle: int, descriptor: int) -> None:
        self._library = library
        self._handle: int | None = handle
        self._buffered: int | None = None
        self._descriptor = descriptor
        self._lost: OSError | None = None
        self.has_more = False

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
        self._forget_errors()
        got = self._library.peek(self._opened(), ctypes.addressof(buffer), size)
        return buffer.raw[: got if got > 0 else self._end(got)]

    def begin_behind(self, size: int) -> None:
        buffer, handle = ctypes.create_string_buffer(size), self._opened()
        self._library.read(handle, ctypes.addressof(buffer), size)
        # Else each record costs two looks at the socket. But what was read ahead is hidden from
        # libpq, which would wait for it.
        self._library.read_ahead(handle, 1)
        self._buffered = self._library.buffered(handle)

    def receive_into(self, room: memoryview, limit_bytes: int) -> int:
        if self._lost is not None:
            raise self._lost
        self._opened()
        start, size = ctypes.addressof(ctypes.c_char.from_buffer(room)), len(room[:limit_bytes])
        self._forget_errors()
        got: int = self._library.read_many(self._buffered, start, size)
        self.has_more = got == size
        if got <= 0:
            return self._end(got)
        if got < size:
            self._keep()
        return got

    def send(self, data: bytes) -> int:
        self._forget_errors()
        sent: int = self._library.write(self._opened(), data, len(data))
        if sent > 0:
            return sent
        self._end(sent)
        raise ConnectionError("server closed the connection unexpectedly")

    def _keep(self) -> None:
        """Raise at the next look why there was no more, unless that is yet to come."""
        try:
            self._end(-1)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost = error
        self.has_more = True

    def _forget_errors(self) -> None:
        """So that the next one is of the next call: some releases of OpenSSL leave earlier ones."""
        self._library.clear()
        ctypes.set_errno(0)

    def _end(self, returned: int) -> int:
        """0 at an orderly end, which is what ``returned`` means; else raises."""
        number = ctypes.get_errno()
        why = self._library.error(self._opened(), returned)
        if why == _ZERO_RETURN or (why == _SYSCALL and not number):
            return 0
        if why in (_WANT_READ, _WANT_WRITE):
            raise BlockingIOError
        if why == _SYSCALL:
            # Not as an OSError of EAGAIN, which would mean that there is more to come.
            raise ConnectionError(number, os.strerror(number))
        raise ConnectionError(f"TLS ended with an error: {self._library.reason()}")

    def close(self) -> None:
        """Let go of the handle, which libpq still has."""
        handle, self._handle = self._handle, None
        buffered, self._buffered = self._buffered, None
        self._descriptor = -1
        if handle is not None and buffered is not None:
            self._library.let_go(buffered, handle)

    def _opened(self) -> int:
        if self._handle is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._handle


Wire = SocketWire | TlsWire


def wire_of(connection: PGconn) -> Wire | None:
    """What ``connection``'s bytes go over; None if only libpq can read it."""
    return TlsWire.of(connection) if connection.ssl_in_use else SocketWire.of(connection)


def answered(wire: Wire, size: int) -> bytes:
    """Wait for an answer; returns its first bytes, which stay. Raises OSError."""
    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    while True:
        with suppress(BlockingIOError):
            return wire.peek(size)
        poll.poll()


class _OpenSsl:
    """The functions of libpq, and of the OpenSSL that it is linked with."""

    def __init__(self, path: str) -> None:
        # Names are looked up in what the library at path needs: in libpq, then in its OpenSSL.
        library = ctypes.PyDLL(path, use_errno=True)

        def function(name: str, returns: Any, *takes: Any) -> Any:
            found = library[name]
            found.argtypes, found.restype = takes, returns
            return found

        self._struct = function("PQsslStruct", c_void_p, c_void_p, c_char_p)
        self.peek = function("SSL_peek", c_int, c_void_p, c_void_p, c_int)
        self.read = function("SSL_read", c_int, c_void_p, c_void_p, c_int)
        self.write = function("SSL_write", c_int, c_void_p, c_char_p, c_int)
        self.read_ahead = function("SSL_set_read_ahead", None, c_void_p, c_int)
        self.error = function("SSL_get_error", c_int, c_void_p, c_int)
        self.clear = function("ERR_clear_error", None)
        self._first = function("ERR_peek_error", c_ulong)
        self._reason = function("ERR_reason_error_string", c_char_p, c_ulong)
        self._new = function("BIO_new", c_void_p, c_void_p)
        self._of_ssl = function("BIO_f_ssl", c_void_p)
        self._of_buffer = function("BIO_f_buffer", c_void_p)
        self._control = function("BIO_ctrl", c_long, c_void_p, c_int, c_long, c_void_p)
        self._push = function("BIO_push", c_void_p, c_void_p, c_void_p)
        self._pop = function("BIO_pop", c_void_p, c_void_p)
        self._free = function("BIO_free", c_int, c_void_p)
        self._bytes_of = function("SSL_get_rbio", c_void_p, c_void_p)
        self._shutdown = function("SSL_get_shutdown", c_int, c_void_p)
        self._set_shutdown = function("SSL_set_shutdown", None, c_void_p, c_int)
        self._set_quiet = function("SSL_set_quiet_shutdown", None, c_void_p, c_int)
        # A call that takes long, beside which other threads go on.
        self.read_many = ctypes.CDLL(path, use_errno=True).BIO_read
        self.read_many.argtypes, self.read_many.restype = (c_void_p, c_void_p, c_int), c_int

    def handle_of(self, connection: PGconn) -> int | None:
        """The SSL object of a connection, None if its TLS isn't OpenSSL's."""
        handle: int | None = self._struct(getattr(connection, "pgconn_ptr", None), b"OpenSSL")
        return handle

    def buffered(self, handle: int) -> int:
        """A chain that reads ``handle``; :meth:`let_go` frees it."""
        reader, buffer = self._new(self._of_ssl()), self._new(self._of_buffer())
        self._control(reader, _SET_SSL, _NO_CLOSE, handle)
        found: int = self._push(buffer, reader)
        return found

    def let_go(self, buffered: int, handle: int) -> None:
        """Free a chain, and say nothing to the server, as OpenSSL would."""
        self.read_ahead(handle, 0)
        before = self._shutdown(handle)
        self._set_quiet(handle, 1)
        reader = self._pop(buffered)
        for one in (buffered, reader, self._bytes_of(handle)):  # the reader had a share of the last
            self._free(one)
        self._set_shutdown(handle, before)
        self._set_quiet(handle, 0)

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
