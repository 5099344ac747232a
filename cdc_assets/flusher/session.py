"""One streaming session: frames to the decoder, files to the log, positions to the slot.

The design rules which thread may wait for what (a bounded queue and an acknowledgement that wait
for each other are a deadlock under a backlog):

- *This thread* waits for sockets only. It takes raw frames, collects them, answers keepalives. When
  too many bytes are under way it stops reading the stream, and goes on giving feedback.
- *The sender thread* waits for the pipe to the decoder.
- *The registrar thread* waits for the decoder's replies and for the coordination database. It alone
  uses the log store.

Invariant 1: the only value ever acknowledged is ``_flushed``, which the registrar sets after the
transaction that moved ``flushed_lsn`` has committed. Invariant 2: a ``Flushed`` is registered in
one transaction. The database session that registers also holds the flusher's lock: when its
connection is lost, so is the lock, and nothing more can be registered, nor acknowledged beyond
what is registered.

A session is used once. Any error ends it; a new one begins at ``flushed_lsn`` with a new decoder,
so no wrong state of the old one survives.
"""

from __future__ import annotations

import array
import logging
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from cdc_assets.errors import ReplicationProblem, TableProblem
from cdc_assets.flusher.decode.specs import DecodeSpec, staging_specs
from cdc_assets.flusher.decoder.link import (
    Consumed,
    DecoderProcess,
    Excluded,
    Failed,
    Finish,
    Flushed,
    Frames,
    Refused,
    Retrying,
    Settings,
    Specs,
)
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.wire import FEEDBACK_SECONDS, Stream, StreamLost
from cdc_assets.log.heap_files import mark_truncated
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogStore, StagedFile
from cdc_assets.log.tables import TableRow
from cdc_assets.pins.enrol import streamed_publications
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn

logger = logging.getLogger(__name__)

# A batch is handed over at this size: 25,000 small changes, enough for decoding by columns to pay.
BATCH_BYTES = 4 * 2**20
# … or at this age, so that a quiet source isn't late.
BATCH_SECONDS = 0.05
# While frames flow, look at the socket this often: a busy server sends each change by itself, and
# waking up for each costs more than all the rest (measured: 3.4 instead of 1.2 µs a change).
GATHER_SECONDS = 0.002
# Most bytes handed over and not yet consumed, a bound on memory: what arrives during a flush of
# flush_bytes.
IN_FLIGHT_BYTES = 32 * 2**20
# On an idle source flushed_lsn advances after this much WAL of others (the promise is 8 MB) …
IDLE_STEP_BYTES = 2**20
# … or, if there is any, after this much time or when somebody waits; not at every keepalive.
IDLE_STEP_SECONDS = 10.0
# How often the registrar looks for new tables, and whether its session (with the lock) exists.
HEARTBEAT_SECONDS = 2.0
# How often a run that ends at an LSN asks an idle server how far it has read.
ASK_SECONDS = 0.25
# How often the server gets feedback while we don't read the stream: a quarter of the shortest
# wal_sender_timeout that anybody sets.
PAUSED_FEEDBACK_SECONDS = 0.25
# How long the decoder takes to be gone after its pipe has ended.
_LAST_SECONDS = 5.0
# Staging and registering what is complete may take so much of the 30 seconds of an orderly stop.
FINISH_SECONDS = 12.0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Frames on their way to the decoder."""

    frames: Frames
    joined: bytes | memoryview


def _died(returncode: int | None, flushed: Lsn) -> ReplicationProblem:
    """The error of a decoder that ended without a report."""
    where = f"the decoder process ended without a word, reading what follows LSN {flushed}"
    if returncode is None or returncode >= 0:
        return ReplicationProblem(f"{where} (exit code {returncode}).", "Its log may say more.")
    name = signal.Signals(-returncode).name
    remedy = (
        "Somebody killed it, or the machine's memory ran out: see the kernel's log, and lower"
        " staging.flush_bytes or give it more memory."
        if name == "SIGKILL"
        else "If it comes back at the same place, report it with the server's version."
    )
    return ReplicationProblem(f"{where}: {name} ended it.", remedy)


def _doubt(found: Excluded) -> str:
    names = ", ".join(found.doubtful)
    problem = TableProblem(
        found.table,
        f"its schema changed more often than can be followed: {names} may be what columns.exclude"
        " names, and was not staged",
        f"Name it there if it is. Copy it anew: cdc-assets resync {found.table}.",
    )
    return str(problem)


class Session:
    """Streams from ``flushed`` until told to stop, until ``until`` is registered, or an error."""

    def __init__(
        self,
        pipeline: Pipeline,
        flushed: Lsn,
        progress: Progress,
        *,
        stop: threading.Event,
        until: Lsn | None = None,
        patience: int = 1,
    ) -> None:
        config = pipeline.config
        self._pipeline = pipeline
        self._store: LogStore = pipeline.store
        self._progress = progress
        self._stop = stop
        self._until = until
        self._patience = patience
        self._awaited = Lsn.ZERO
        self._flushed = flushed
        self._position = flushed
        self._handed_bytes = self._consumed_bytes = 0
        self._queue: queue.SimpleQueue[_Batch | Specs | Finish | None]
        self._queue = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._finished = threading.Event()
        self._specs_at = self._advanced_at = time.monotonic()
        self._asked: tuple[str, ...] = ()
        self._rows: list[TableRow] = []
        self._revision: int | None = None
        self._specs: Mapping[int, DecodeSpec] = {}
        self._settings = Settings(
            config.name,
            pipeline.source_dsn,
            config.publication,
            pipeline.staging_uri,
            Storage.of(config.s3),
            config.staging.flush_bytes,
            # A caller waits for a run with an end: it needn't gather for long.
            min(config.staging.flush_interval_seconds, ASK_SECONDS)
            if until is not None
            else config.staging.flush_interval_seconds,
            int(flushed),
        )

    def run(self) -> None:
        """Raises StreamLost or psycopg.OperationalError (worth a new session), or CdcError."""
        config = self._pipeline.config
        rows = self._store.tables()
        self._rows, self._specs = rows, staging_specs(rows)
        self._progress.flushed = self._flushed
        self._asked = streamed_publications(self._pipeline, self._flushed)
        stream = Stream.start(
            self._pipeline.replication_dsn,
            config.name,
            config.slot,
            self._asked,
            self._flushed,
            self._patience,
        )
        acknowledged: Lsn | None = None
        try:
            self._decoder = DecoderProcess(self._settings)
            self._progress.decoder_pid = self._decoder.pid
            self._wake_reader, self._wake_writer = os.pipe()
            os.set_blocking(self._wake_writer, False)
            threads = [
                threading.Thread(target=self._send, name="sender", daemon=True),
                threading.Thread(target=self._register, name="registrar", daemon=True),
            ]
            self._queue.put(Specs(self._specs))
            self._progress.sessions += 1
            self._progress.enter("streaming")
            for thread in threads:
                thread.start()
            try:
                self._receive(stream)
                self._finish(stream)
                acknowledged = self._flushed
            finally:
                self._decoder.kill()  # ended already, unless something went wrong
                self._queue.put(None)
                for thread in threads:
                    thread.join()
                self._decoder.close()
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                self._progress.decoder_pid = None
        finally:
            stream.close(acknowledged)

    # --- this thread: the stream ---

    def _receive(self, stream: Stream) -> None:
        batch: list[memoryview] = []
        batch_bytes, batch_since = 0, 0.0
        told = Lsn.ZERO
        while not self._stop.is_set() and not self._reached():
            self._check()
            under_way = self._handed_bytes - self._consumed_bytes + batch_bytes
            paused = under_way >= IN_FLIGHT_BYTES
            self._progress.in_flight_bytes = under_way
            reply_wanted = flowing = False
            now = time.monotonic()
            if not paused:
                received = stream.receive(BATCH_BYTES - batch_bytes)
                if received.frames:
                    flowing = True
                    batch_since = batch_since if batch else now
                    batch += received.frames
                    batch_bytes += received.byte_size
                    self._progress.received_bytes += received.byte_size
                    # The LSN where the frame's record begins; of a keepalive, the end of the WAL.
                    self._progress.received = Lsn(int.from_bytes(received.frames[-1][1:9]))
                    reply_wanted = received.reply_wanted
            full = batch_bytes >= BATCH_BYTES
            if batch and (full or paused or now - batch_since >= BATCH_SECONDS):
                self._hand_over(batch)
                batch, batch_bytes = [], 0
            silent = now - stream.feedback_at
            # While paused we can't see the server ask, so feedback is frequent.
            patience = FEEDBACK_SECONDS if not paused else PAUSED_FEEDBACK_SECONDS
            ask = self._until is not None and silent >= ASK_SECONDS
            if reply_wanted or ask or told != self._flushed or silent >= patience:
                told = self._flushed
                # The reply ends a message that only seems to be on its way (``wire``).
                overdue = not paused and stream.is_quiet and silent >= patience
                self._acknowledge(stream, told, reply=ask or overdue)
            if flowing and not full:
                time.sleep(GATHER_SECONDS)
            elif not full:
                longest = BATCH_SECONDS if batch else ASK_SECONDS if self._until else 1.0
                if paused:
                    longest = PAUSED_FEEDBACK_SECONDS
                self._sleep(stream if not paused else None, longest)
        if batch:
            self._hand_over(batch)

    def _hand_over(self, batch: list[memoryview]) -> None:
        """Give a batch to the sender, joined: a small frame as an object takes thrice its size."""
        alone = len(batch) > 1 and len(batch[-1]) >= BATCH_BYTES  # a huge value isn't copied
        for frames in (batch[:-1], batch[-1:]) if alone else (batch,):
            lengths = array.array("i", map(len, frames))
            joined = frames[0] if len(frames) == 1 else b"".join(frames)
            self._handed_bytes += len(joined)
            self._queue.put(_Batch(Frames(lengths.tobytes()), joined))

    def _finish(self, stream: Stream) -> None:
        """Let the decoder stage what is complete and the registrar register it."""
        self._queue.put(Finish())
        deadline = time.monotonic() + FINISH_SECONDS
        while not self._finished.wait(0.1):
            self._check()
            if time.monotonic() >= deadline:
                logger.warning(
                    "not all that had arrived could be staged in %s s; it will be sent again",
                    FINISH_SECONDS,
                )
                return
            if time.monotonic() - stream.feedback_at >= PAUSED_FEEDBACK_SECONDS:
                self._acknowledge(stream, self._flushed)
        self._check()

    def _acknowledge(self, stream: Stream, flushed: Lsn, *, reply: bool = False) -> None:
        stream.acknowledge(flushed, reply=reply)
        self._progress.acknowledged = flushed

    def _sleep(self, stream: Stream | None, seconds: float) -> None:
        """Wait until there is something to read, the registrar has news, or the time is over."""
        sockets = [self._wake_reader] if stream is None else [self._wake_reader, stream.fileno()]
        readable, _, _ = select.select(sockets, [], [], seconds)
        if self._wake_reader in readable:
            os.read(self._wake_reader, 4096)

    def _reached(self) -> bool:
        return self._until is not None and self._flushed >= self._until

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- the sender thread: the pipe to the decoder ---

    def _send(self) -> None:
        pipe = self._decoder.pipe
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, _Batch):
                    pipe.send(item.frames)
                    pipe.send_bytes(item.joined)
                else:
                    pipe.send(item)
        except OSError:
            logger.debug("the decoder hung up")  # the registrar hears why

    # --- the registrar thread: replies, and the log store ---

    def _register(self) -> None:
        try:
            self._store.mark_followed(row for row in self._rows if self._unfollowed(row))
            while not self._finished.is_set():
                if self._decoder.pipe.poll(HEARTBEAT_SECONDS):
                    self._take(self._decoder.pipe.recv())
                self._advance()
                if time.monotonic() - self._specs_at >= HEARTBEAT_SECONDS:
                    self._refresh_specs()
        except (EOFError, ConnectionResetError):
            self.fail(_died(self._decoder.wait(_LAST_SECONDS), self._flushed))
        except Exception as error:  # noqa: BLE001 - handed to the thread that raises it
            self.fail(error)
        self._wake()

    def _take(self, reply: object) -> None:
        if isinstance(reply, Retrying):
            self._progress.staging_retries += 1
            self._progress.enter("retrying staging", reply.reason)
            return
        self._progress.enter("streaming")
        if isinstance(reply, Consumed):
            self._consumed_bytes += reply.byte_size
            self._progress.waiting_bytes = reply.waiting_bytes
            self._wake()
        elif isinstance(reply, Flushed):
            self._flush(reply)
            if reply.final:
                self._finished.set()
        elif isinstance(reply, Excluded):
            self._store.add_excluded(reply.table, reply.numbers)
            if reply.doubtful:
                self._store.park(reply.table, _doubt(reply))
        elif isinstance(reply, Refused):
            table, committed = reply.table, Lsn(reply.commit_lsn)
            if self._store.park_log(table, reply.reason, committed):
                logger.error("%s", reply.reason)
        elif isinstance(reply, Failed):
            logger.error("the decoder failed:\n%s", reply.trace)
            raise ReplicationProblem(f"the decoder failed: {reply.summary}")
        else:
            raise TypeError(f"unexpected reply {type(reply)}")

    def _flush(self, flushed: Flushed) -> None:
        position, commit_time = Lsn(flushed.position), flushed.commit_time
        self._position = max(self._position, position)
        self._progress.waiting_bytes = 0
        files = [
            StagedFile(
                file.table,
                file.path,
                file.row_count,
                file.byte_size,
                Lsn(flushed.commit_end),
                commit_time,
                file.first_row,
                file.sha256,
            )
            for file in flushed.files
            if commit_time is not None  # it is never None if there are files
        ]
        if not files:
            self._progress.level = self._position
            return
        began = time.monotonic()
        truncated = {file.table for file in flushed.files if file.operations.get("T")}
        if truncated:
            mark_truncated(self._store, truncated, Lsn(flushed.commit_end))
        self._store.register(files, position, commit_time)
        self._progress.count(flushed.files, flushed.seconds + time.monotonic() - began)
        self._registered(position)
        self._progress.level = self._position
        logger.debug(
            "registered %d rows in %d entries up to %s: staged in %.3f s, registered in %.3f s",
            sum(file.row_count for file in files),
            len(files),
            position,
            flushed.seconds,
            time.monotonic() - began,
        )

    def _advance(self) -> None:
        """Advance ``flushed_lsn`` over WAL without changes of ours, if worth a round trip."""
        moved = self._position - self._flushed
        if moved <= 0:
            return
        waited = time.monotonic() - self._advanced_at
        targets = (self._awaited, self._until or Lsn.ZERO)
        awaited = any(self._flushed < lsn <= self._position for lsn in targets)
        if moved >= IDLE_STEP_BYTES or waited >= IDLE_STEP_SECONDS or awaited:
            self._store.advance(self._position)
            self._registered(self._position)

    def _registered(self, position: Lsn) -> None:
        """``flushed_lsn`` holds ``position``: from now on it may be acknowledged."""
        self._advanced_at = time.monotonic()
        self._flushed = max(self._flushed, position)
        self._progress.flushed = self._flushed
        self._wake()

    def _refresh_specs(self) -> None:
        """Notice changes of the registered tables; fails when the session (the lock) is gone.

        A table is marked as followed once the decoder is sure to know it before it sees a change
        that commits from now on; it is pinned only after that (``pins.pins``).
        """
        revision = self._store.revision()
        self._awaited = self._store.awaited_lsn()
        self._specs_at = time.monotonic()
        beside = any(row.inserts_only and row.oid in self._specs for row in self._rows)
        if beside and len(self._asked) == 1:
            names = streamed_publications(self._pipeline, self._flushed)
            if names != self._asked:
                raise StreamLost(f"the stream is opened anew: it lacks {names[-1]}.")
        if revision == self._revision:
            return
        rows = self._rows = self._store.tables()
        self._revision = revision
        specs = staging_specs(rows)
        if specs != self._specs:
            self._specs = specs
            self._queue.put(Specs(specs))
        if any(map(self._unfollowed, rows)):
            self._store.mark_followed(filter(self._unfollowed, rows))

    def _unfollowed(self, row: TableRow) -> bool:
        """Whether the stream has the table's changes from now on, and it isn't marked so yet."""
        told = row.oid in self._specs and (not row.inserts_only or len(self._asked) > 1)
        return told and not row.followed

    def fail(self, error: BaseException) -> None:
        """End the session with this error, from any thread; the first one counts."""
        if self._failure is None:
            self._failure = error

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"!")
        except BlockingIOError:
            return  # the pipe is full: that wakes it up
