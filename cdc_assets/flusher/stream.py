"""The replication connection: START_REPLICATION, frames in, feedback out; nothing else.

How frames are read is in ``line``. Everything here is non-blocking except :meth:`Stream.start` and
:meth:`Stream.close`, so that feedback flows whatever else happens (a server that hears nothing for
``wal_sender_timeout`` hangs up). Once it streams, no query goes over this connection: it would hang
the stream (probes have connections of their own).
"""

from __future__ import annotations

import logging
import select
import struct
import time
from collections.abc import Sequence
from typing import Final

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGresult

from cdc_assets.errors import ReplicationLost, ReplicationProblem, SourceMismatch, first_line
from cdc_assets.flusher.line.direct import DirectLine
from cdc_assets.flusher.line.ends import Ended
from cdc_assets.flusher.line.frames import Received
from cdc_assets.flusher.line.libpq import LibpqLine
from cdc_assets.flusher.line.room import make_room
from cdc_assets.messages.foreign_words import of_server
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.pgoutput import POSTGRES_EPOCH_MICROSECONDS
from cdc_assets.postgres.session.connect import Connection, is_outage, replication_connect

logger = logging.getLogger(__name__)

# Well below wal_sender_timeout's default of 60 s; a server that allows less asks for a reply.
FEEDBACK_SECONDS: Final = 10.0
# How long an orderly end waits for the server's own end.
CLOSE_SECONDS: Final = 5.0
# A message that is still arriving after so long may never end: with a damaged length it swallows
# all that follows. The largest message, 1 GB, takes so long on a line of 5 Mbit/s; on a slower one
# it is given more time (see ``standstill``).
ENDLESS_SECONDS: Final = 1800.0
# With the server's own setting, the walsender of a stopped flusher may hold the slot for ever. With
# this one it ends when a waiting flusher may take its turn (see ``log.sessions.heartbeat``).
_HANG_UP: Final = (
    b"select pg_catalog.set_config(name, '30s', false) from pg_catalog.pg_settings"
    b" where name = 'wal_sender_timeout' and setting::int not between 1 and 30000"
)
# Read at a time while waiting for the server's end.
_DRAIN_BYTES: Final = 2**20
# What a line raises once it is lost, whichever way it is read.
_LINE_LOST: Final = (OSError, psycopg.OperationalError)
_FEEDBACK = struct.Struct(">cQQQqB")
_OBJECT_IN_USE = b"55006"
_UNDEFINED_OBJECT = b"42704"


class StreamLost(ReplicationLost):
    """The connection ended; opening a new one may help."""


class Endless(StreamLost):
    """A message was still arriving after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"a message of the replication stream hasn't ended in {seconds:.0f} s: its length was"
            " damaged on the way, or the line is too slow for its size.",
            "It is sent again, and given twice as long if that doesn't help. TLS (sslmode) keeps"
            " what is on the line from being damaged.",
        )


class EndedByServer(StreamLost):
    """The server ended the stream because of ``said``, not of a shutdown or a lost connection."""

    def __init__(self, said: str) -> None:
        self.said = said
        super().__init__(f"the server ended the replication stream: {said}.")


class SlotInUse(StreamLost):
    """Another process streams from the slot now; it may end."""


class Stream:
    """An open logical replication stream of one slot."""

    def __init__(
        self,
        connection: Connection,
        line: DirectLine | LibpqLine,
        beside: Sequence[str] = (),
        patience: int = 1,
    ) -> None:
        """``beside``: publications that the next session does without if somebody drops them.

        ``patience``: how many times ENDLESS_SECONDS a message may take.
        """
        self._connection = connection
        self._line = line
        self._beside = beside
        self._patience = patience
        self._arriving_since: float | None = None
        self.feedback_at = 0.0
        """When feedback was last written, on the monotonic clock."""
        self.is_quiet = True
        """Whether no whole message has arrived since then."""
        self.room = make_room(line.fileno())
        """How many bytes the server can send while nobody looks."""

    @classmethod
    def start(
        cls,
        dsn: str,
        source: str,
        slot: str,
        publications: Sequence[str],
        at: Lsn,
        patience: int = 1,
    ) -> Stream:
        """Stream what commits from ``at`` on and is in one of ``publications``.

        The first publication is required. ``patience``: how many times ENDLESS_SECONDS a message
        may take. Raises SlotInUse, StreamLost (worth another try) or ReplicationProblem (not).
        """
        try:
            connection = replication_connect(dsn, f"cdc_assets {source} flusher")
        except ReplicationLost as error:
            raise StreamLost(error.what, error.remedy) from error
        line: DirectLine | LibpqLine | None = None
        try:
            libpq = connection.pgconn
            libpq.exec_(_HANG_UP)
            names = pq.Escaping(libpq).escape_literal(
                b",".join(b'"' + p.encode().replace(b'"', b'""') + b'"' for p in publications)
            )
            libpq.nonblocking = 0  # all of it is sent, or it fails
            libpq.send_query(
                f'START_REPLICATION SLOT "{slot}" LOGICAL {at}'
                f" (proto_version '1', publication_names {bytes(names).decode()})".encode()
            )
            line = DirectLine.take_over(libpq)
            if line is None:
                result = libpq.get_result()
                if result is None or result.status != pq.ExecStatus.COPY_BOTH:
                    raise _refused(slot, result)
                line = LibpqLine(libpq)
            return cls(connection, line, publications[1:], patience)
        except BaseException as error:
            if line is not None:
                line.close()
            connection.close()
            if isinstance(error, _LINE_LOST):
                raise _lost(error) from error
            raise

    def fileno(self) -> int:
        return self._line.fileno()

    @property
    def has_more(self) -> bool:
        """Whether the next look brings something though :meth:`fileno` may not be readable."""
        return self._line.has_more

    def receive(self, limit_bytes: int) -> Received:
        """The frames that have arrived, of about ``limit_bytes`` at most. Doesn't wait.

        Raises StreamLost when the connection or the stream ended.
        """
        received = self._look(limit_bytes)
        if received is None:
            return Received.of(())
        if len(received.lengths):
            self._arriving_since, self.is_quiet = None, False
        else:
            self._must_end()
        return received

    def _look(self, limit_bytes: int) -> Received | None:
        try:
            return self._line.receive(limit_bytes)
        except Ended as ended:
            raise self._ended(ended) from ended
        except _LINE_LOST as error:
            raise _lost(error) from error

    def _must_end(self) -> None:
        """Raise Endless if a message that is still arriving takes too long."""
        now = time.monotonic()
        if self._arriving_since is None:
            self._arriving_since = now
        elif now - self._arriving_since >= (longest := ENDLESS_SECONDS * self._patience):
            raise Endless(longest)

    def acknowledge(self, flushed: Lsn, *, reply: bool = False) -> None:
        """Acknowledge ``flushed``: the server may forget everything below it.

        ``reply``: ask for a keepalive, which says how far the server has read.
        The written position equals the flushed one: a server that believes we wrote more than we
        flushed sends no keepalives, and an idle slot would not advance.
        """
        try:
            self._line.send(_feedback(flushed, reply=reply))
        except _LINE_LOST as error:
            raise _lost(error) from error
        self.feedback_at, self.is_quiet = time.monotonic(), True

    def close(self, flushed: Lsn | None = None) -> None:
        """Hang up; with ``flushed``, acknowledge it and end the stream in order first."""
        try:
            if flushed is not None:
                self._line.end(_feedback(flushed), CLOSE_SECONDS)
                self._drain()
        except _LINE_LOST as error:
            logger.warning(
                "the last acknowledgement didn't reach the server: %s", first_line(error)
            )
        finally:
            self._line.close()
            self._connection.close()  # sends Terminate

    def _drain(self) -> None:
        """Read on until the server has ended the stream too.

        A socket closed with unread bytes is reset, and then the server never reads the
        acknowledgement sent before. In a large transaction the server only ends behind it.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._line.receive(_DRAIN_BYTES) is None:
                    select.select([self._line], [], [], left)
            except Ended:
                return
        logger.info("the server had more to send; it may not have read the last acknowledgement")

    def _ended(self, ended: Ended) -> ReplicationProblem:
        message, state = ended.message, ended.state
        message = of_server(message, state.decode() if state is not None else None)
        if state == _UNDEFINED_OBJECT and any(name in message for name in self._beside):
            # The next session doesn't ask for that publication; its tables are parked.
            return StreamLost(f"the stream is opened anew: {message}.")
        if state == _UNDEFINED_OBJECT and "publication" in message:
            # Before version 18 the server can't decode what was changed while there was none.
            return SourceMismatch(
                ["publication_gone"],
                f"publication_gone: the publication was dropped for a while: {message}.",
                "cdc-assets resync --all copies every table anew through a new slot.",
            )
        if state is None or state[:2] in (b"57", b"08"):  # shutdown, connection
            return StreamLost(f"the server ended the replication stream: {message or 'no reason'}.")
        return EndedByServer(" ".join(message.split()).removesuffix("."))


def _feedback(flushed: Lsn, *, reply: bool = False) -> bytes:
    now = time.time_ns() // 1000 - POSTGRES_EPOCH_MICROSECONDS
    lsn = int(flushed)
    return _FEEDBACK.pack(b"r", lsn, lsn, lsn, now, reply)


def _lost(error: Exception) -> StreamLost:
    return StreamLost(f"the replication connection was lost: {first_line(error)}.")


def _refused(slot: str, result: PGresult | None) -> ReplicationProblem:
    if result is None:
        return StreamLost(f"the server doesn't answer the request to stream from slot {slot}.")
    message = result.get_error_message().strip()
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    if state == _OBJECT_IN_USE:
        return SlotInUse(f"slot {slot} is in use: {message}.", "Waiting until it is free.")
    if is_outage(state):
        return StreamLost(f"the server doesn't stream now: {message}.")
    if state == _UNDEFINED_OBJECT:
        return StreamLost(f"the replication slot {slot} was just dropped: {message}.")
    return ReplicationProblem(
        f"the server refused to stream from slot {slot}: {message}.",
        "Run cdc-assets check: it names what is missing.",
    )
