"""A replication stream read by libpq, which also knows GSS: one call, one object for each frame.

psycopg has no replication API, but libpq has all that is needed.
"""

from __future__ import annotations

import select

from psycopg import pq
from psycopg.pq.abc import PGconn

from cdc_assets.flusher.line.ends import Ended
from cdc_assets.flusher.line.frames import Received

# A frame that isn't copied once more together with others.
_LARGE_BYTES = 2**20


class LibpqLine:
    """Whole frames in, feedback out; doesn't wait. An OperationalError: the line is lost."""

    def __init__(self, connection: PGconn) -> None:
        self._connection = connection
        self._connection.nonblocking = 1
        self._large: memoryview | None = None

    def fileno(self) -> int:
        return self._connection.socket

    @property
    def has_more(self) -> bool:
        """Whether the next look brings something though :meth:`fileno` may not be readable."""
        return self._large is not None

    def receive(self, limit_bytes: int) -> Received | None:
        """Frames that have arrived, of about ``limit_bytes`` at most, perhaps none as yet.

        None if nothing has arrived. Raises Ended, or psycopg.OperationalError.
        """
        if self._large is not None:
            large, self._large = self._large, None
            return Received.of([large])
        frames: list[memoryview] = []
        append, get = frames.append, self._connection.get_copy_data
        size, asked, arrived = 0, False, False
        while size < limit_bytes:
            length, frame = get(1)
            if length > 0:
                asked = False
                if length >= _LARGE_BYTES and frames:
                    self._large = frame
                    break
                append(frame)
                size += length
            elif length < 0:
                raise self._ended()
            elif asked:
                break  # nothing more on the socket
            else:
                arrived = bool(select.select([self._connection.socket], [], [], 0)[0])
                self._connection.consume_input()
                asked = True
        return Received.of(frames) if frames or arrived else None

    def _ended(self) -> Ended:
        result = self._connection.get_result()
        if result is None:
            return Ended()
        state = result.error_field(pq.DiagnosticField.SQLSTATE)
        return Ended(result.get_error_message().strip(), state)

    def send(self, body: bytes) -> None:
        """Send a CopyData message. Raises psycopg.OperationalError."""
        self._connection.put_copy_data(body)
        self._connection.flush()

    def end(self, body: bytes, _: float) -> None:
        """Send a last message, and that it is the last. Raises psycopg.OperationalError."""
        self._connection.nonblocking = 0
        self.send(body)
        self._connection.put_copy_end()
        self._connection.flush()

    def close(self) -> None:
        """Nothing: whoever opened the connection closes it."""
