"""One streaming session: frames to the decoder, files to the log, positions to the slot.

The design rules which thread may wait for what (a bounded queue and an acknowledgement that wait
for each other are a deadlock under a backlog):

- *This thread* waits for sockets only. It takes raw frames, collects them, answers keepalives. When
  too many bytes are under way it stops reading the stream, and goes on giving feedback.
- *The sender thread* waits for the pipe to the decoder.
- *The registrar thread* (``registrar``) waits for the decoder's replies and for the coordination
  database. What it registered is acknowledged here, and nothing else (invariant 1).

A session is used once. Any error ends it; a new one begins at ``flushed_lsn`` with a new decoder,
so no wrong state of the old one survives.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
import time

from cdc_assets.flusher.decoder_process.link import (
    DecoderProcess,
    Finish,
    Settings,
    Specs,
    send_frames,
)
from cdc_assets.flusher.line.frames import Received
from cdc_assets.flusher.line.room import Gathering
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.registrar import Registrar
from cdc_assets.flusher.stream import FEEDBACK_SECONDS, Stream
from cdc_assets.log.staged.storage import Storage
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn

logger = logging.getLogger(__name__)

# A batch is handed over at this size: 25,000 small changes, enough for decoding by columns to pay.
BATCH_BYTES = 4 * 2**20
# … or at this age, so that a quiet source isn't late.
BATCH_SECONDS = 0.05
# Most bytes handed over and not yet consumed, a bound on memory: what arrives during a flush of
# flush_bytes.
IN_FLIGHT_BYTES = 48 * 2**20
# How often a run that ends at an LSN asks an idle server how far it has read.
ASK_SECONDS = 0.25
# How often the server gets feedback while we don't read the stream: a quarter of the shortest
# wal_sender_timeout that anybody sets.
PAUSED_FEEDBACK_SECONDS = 0.25
# Feedback stays as frequent for as long again as the pause was, at most for so long: what the
# server's TCP sent in vain while our socket was full comes again after a wait that doubles each
# time, up to this, and the server's request for a reply comes behind it.
LONGEST_RETRANSMISSION_SECONDS = 120.0
# Staging and registering what is complete may take so much of the 30 seconds of an orderly stop.
FINISH_SECONDS = 12.0


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
        self._progress = progress
        self._stop = stop
        self._until = until
        self._patience = patience
        self._handed_bytes = 0
        self._queue: queue.SimpleQueue[Received | Specs | Finish | None]
        self._queue = queue.SimpleQueue()
        self._registrar = Registrar(
            pipeline, flushed, progress, until, tell=self._queue.put, wake=self._wake
        )
        self._settings = Settings(
            config.name,
            pipeline.source_dsn,
            config.publication,
            config.staging_uri,
            Storage.of(config.s3),
            config.staging.flush_bytes,
            config.staging.flush_interval_seconds,
            int(flushed),
            config.markers.id,
            int(until) if until is not None else None,
        )

    def run(self) -> None:
        """Raises StreamLost or psycopg.OperationalError (worth a new session), or CdcError."""
        config, registrar = self._pipeline.config, self._registrar
        registrar.begin()
        stream = Stream.start(
            self._pipeline.replication_dsn,
            config.name,
            config.slot,
            registrar.publications,
            registrar.flushed,
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
                threading.Thread(
                    target=registrar.run, args=(self._decoder,), name="registrar", daemon=True
                ),
            ]
            self._progress.sessions += 1
            self._progress.enter("streaming")
            for thread in threads:
                thread.start()
            try:
                self._receive(stream)
                self._finish(stream)
                acknowledged = registrar.flushed
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
        batch = list[Received]()
        batch_bytes, batch_since = 0, 0.0
        told = Lsn.ZERO
        paused_since: float | None = None
        blind_until = 0.0
        gathering = Gathering(stream.room, self._settings.flush_interval_seconds)
        while not self._stop.is_set() and not self._reached():
            self._check()
            under_way = self._handed_bytes - self._registrar.consumed_bytes + batch_bytes
            paused = under_way >= IN_FLIGHT_BYTES
            self._progress.in_flight_bytes = under_way
            reply_wanted, arrived = False, 0
            self._progress.beat = now = time.monotonic()
            if paused:
                paused_since = now if paused_since is None else paused_since
                again = min(now - paused_since, LONGEST_RETRANSMISSION_SECONDS)
                # A shorter pause that follows doesn't end it earlier.
                blind_until = max(blind_until, now + again + 4 * PAUSED_FEEDBACK_SECONDS)
            else:
                paused_since = None
                received = stream.receive(BATCH_BYTES - batch_bytes)
                if len(received.lengths):
                    arrived = len(received.blob)
                    batch_since = batch_since if batch else now
                    batch.append(received)
                    batch_bytes += arrived
                    self._progress.received = received.lsn
                    reply_wanted = received.reply_wanted
            full = batch_bytes >= BATCH_BYTES
            if batch and (full or paused or now - batch_since >= BATCH_SECONDS):
                self._hand_over(batch)
                batch, batch_bytes = [], 0
            silent = now - stream.feedback_at
            # While we can't see the server ask, feedback is frequent.
            blind = now < blind_until
            patience = FEEDBACK_SECONDS if not blind else PAUSED_FEEDBACK_SECONDS
            ask = self._until is not None and silent >= ASK_SECONDS
            if reply_wanted or ask or told != self._registrar.flushed or silent >= patience:
                told = self._registrar.flushed
                # The reply ends a message that only seems to be on its way (``stream``).
                overdue = not blind and stream.is_quiet and silent >= patience
                self._acknowledge(stream, told, reply=ask or overdue)
            if arrived and not full:
                time.sleep(gathering.seconds(arrived))
            elif not full:
                longest = BATCH_SECONDS if batch else ASK_SECONDS if self._until else 1.0
                if blind:
                    longest = min(longest, PAUSED_FEEDBACK_SECONDS)
                self._sleep(stream if not paused else None, longest)
        if batch:
            self._hand_over(batch)

    def _hand_over(self, batch: list[Received]) -> None:
        """Give a batch to the sender, joined: many small ones cost the decoder more."""
        alone = len(batch) > 1 and len(batch[-1].blob) >= BATCH_BYTES  # a huge value isn't copied
        for parts in (batch[:-1], batch[-1:]) if alone else (batch,):
            joined = Received.joined(parts)
            self._handed_bytes += len(joined.blob)
            self._queue.put(joined)

    def _finish(self, stream: Stream) -> None:
        """Let the decoder stage what is complete and the registrar register it."""
        self._queue.put(Finish())
        deadline = time.monotonic() + FINISH_SECONDS
        while not self._registrar.finished.wait(0.1):
            self._check()
            if time.monotonic() >= deadline:
                logger.warning(
                    "not all that had arrived could be staged in %s s; it will be sent again",
                    FINISH_SECONDS,
                )
                return
            if time.monotonic() - stream.feedback_at >= PAUSED_FEEDBACK_SECONDS:
                self._acknowledge(stream, self._registrar.flushed)
        self._check()

    def _acknowledge(self, stream: Stream, flushed: Lsn, *, reply: bool = False) -> None:
        stream.acknowledge(flushed, reply=reply)
        self._progress.acknowledged = flushed

    def _sleep(self, stream: Stream | None, seconds: float) -> None:
        """Wait until there is something to read, the registrar has news, or the time is over."""
        if stream is not None and stream.has_more:
            return
        sockets = [self._wake_reader] if stream is None else [self._wake_reader, stream.fileno()]
        readable, _, _ = select.select(sockets, [], [], seconds)
        if self._wake_reader in readable:
            os.read(self._wake_reader, 4096)

    def _reached(self) -> bool:
        return self._until is not None and self._registrar.flushed >= self._until

    def _check(self) -> None:
        if self._registrar.failure is not None:
            raise self._registrar.failure

    # --- the sender thread: the pipe to the decoder ---

    def _send(self) -> None:
        pipe = self._decoder.pipe
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, Received):
                    send_frames(pipe, item.lengths, item.blob, item.gap)
                else:
                    pipe.send(item)
        except OSError:
            logger.debug("the decoder hung up")  # the registrar hears why

    # --- any thread ---

    def fail(self, error: BaseException) -> None:
        """End the session with this error; the first one counts."""
        self._registrar.fail(error)

    def _wake(self) -> None:
        try:
            os.write(self._wake_writer, b"!")
        except BlockingIOError:
            return  # the pipe is full: that wakes it up
