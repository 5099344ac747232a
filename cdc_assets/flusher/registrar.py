"""The registrar of a session: it takes the decoder's replies to the log.

It is a thread of its own, which waits for the decoder and for the coordination database, and it
alone uses the log store. What changes in the registry of tables goes to the decoder from here.

Invariant 1: the only value ever acknowledged is ``flushed``, which is set after the transaction
that moved ``flushed_lsn`` has committed. Invariant 2: a ``Flushed`` is registered in one
transaction. The database session that registers also holds the flusher's lock: when its connection
is lost, so is the lock, and nothing more can be registered, nor acknowledged beyond what is
registered.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext

from cdc_assets.errors import ReplicationProblem, TableProblem
from cdc_assets.flusher.decode.markers import MOST
from cdc_assets.flusher.decode.specs import DecodeSpec, staging_specs
from cdc_assets.flusher.decoder_process.link import (
    Consumed,
    DecoderProcess,
    Excluded,
    Failed,
    Flushed,
    Refused,
    Retrying,
    Specs,
)
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.stream import StreamLost
from cdc_assets.log.asked.markers import take_markers
from cdc_assets.log.heaps.files import mark_truncated
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.texts import copy_anew
from cdc_assets.pins.streamed import streamed_publications
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn

logger = logging.getLogger(__name__)

# On an idle source flushed_lsn advances after this much WAL of others (the promise is 8 MB) …
IDLE_STEP_BYTES = 2**20
# … or, if there is any, after this much time or when somebody waits; not at every keepalive.
IDLE_STEP_SECONDS = 10.0
# How often the registrar looks for new tables, and whether its session (with the lock) exists.
REFRESH_SECONDS = 2.0
# How soon it is seen that somebody waits for what passed without changes of ours.
AWAITED_SECONDS = 0.5
# How long the decoder takes to be gone after its pipe has ended.
_LAST_SECONDS = 5.0


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
        " or columns.mask names, and was not staged",
        f"Name it there if it is. {copy_anew(found.table)}",
    )
    return problem.reason


class Registrar:
    """Registers what the decoder stages, from ``flushed`` on.

    ``tell`` gets specs for the decoder; ``wake`` is called when there is news for the receiver:
    ``flushed``, ``consumed_bytes``, ``failure``, or ``finished``, the end of an orderly session.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        flushed: Lsn,
        progress: Progress,
        until: Lsn | None,
        *,
        tell: Callable[[Specs], None],
        wake: Callable[[], None],
    ) -> None:
        self._pipeline = pipeline
        self._store = pipeline.store
        self._progress = progress
        self._until = until
        self._tell = tell
        self._wake = wake
        self.flushed = flushed
        self.consumed_bytes = 0
        self.failure: BaseException | None = None
        self.finished = threading.Event()
        self.publications: tuple[str, ...] = ()
        self._awaited = Lsn.ZERO
        self._position = flushed
        self._refreshed_at = self._advanced_at = time.monotonic()
        self._rows: list[TableRow] = []
        self._revision: int | None = None
        self._specs: Mapping[int, DecodeSpec] = {}

    def begin(self) -> None:
        """Read what the stream begins with: its ``publications``, and the decoder's first specs."""
        self._rows = self._store.tables()
        self._specs = staging_specs(self._rows, self._pipeline.config)
        self._tell(Specs(self._specs))
        self._progress.flushed = self.flushed
        self.publications = streamed_publications(self._pipeline, self.flushed)

    def run(self, decoder: DecoderProcess) -> None:
        """Take replies until the last one, or an error, which is left in ``failure``."""
        try:
            self._store.mark_followed(row for row in self._rows if self._unfollowed(row))
            while not self.finished.is_set():
                ahead = self._position > self.flushed
                if decoder.pipe.poll(AWAITED_SECONDS if ahead else REFRESH_SECONDS):
                    self._take(decoder.pipe.recv())
                elif ahead:
                    self._awaited = self._store.awaited_lsn()
                self._advance()
                if time.monotonic() - self._refreshed_at >= REFRESH_SECONDS:
                    self._refresh()
        except (EOFError, ConnectionResetError):
            self.fail(_died(decoder.wait(_LAST_SECONDS), self.flushed))
        except Exception as error:  # noqa: BLE001 - handed to the thread that raises it
            self.fail(error)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End the session with this error, from any thread; the first one counts."""
        if self.failure is None:
            self.failure = error

    def _take(self, reply: object) -> None:
        if isinstance(reply, Retrying):
            self._progress.staging_retries += 1
            self._progress.enter("retrying staging", reply.reason)
            return
        self._progress.enter("streaming")
        if isinstance(reply, Consumed):
            self.consumed_bytes += reply.byte_size
            self._progress.waiting_bytes = reply.waiting_bytes
            self._wake()
        elif isinstance(reply, Flushed):
            self._flush(reply)
            if reply.final:
                self.finished.set()
        elif isinstance(reply, Excluded):
            self._store.add_covered(reply.table, reply.numbers, reply.masked)
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
        if not flushed.staged and not flushed.markers:
            self._progress.level = self._position
            return
        assert commit_time is not None  # of the last transaction in the files
        began, commit_end = time.monotonic(), Lsn(flushed.commit_end)
        truncated = {rows.table for rows in flushed.staged if rows.operations.get("T")}
        if truncated:
            mark_truncated(self._store, truncated, commit_end)
        with self._store.connection.transaction() if flushed.markers else nullcontext():
            self._store.register(flushed.staged, commit_end, position, commit_time)
            if flushed.markers:
                tables = [table.id for table in self._pipeline.config.tables]
                take_markers(self._store, position, flushed.markers, tables, most=MOST)
        self._progress.count(flushed.staged, flushed.seconds + time.monotonic() - began)
        self._registered(position)
        self._progress.level = self._position
        logger.debug(
            "registered %d rows in %d entries up to %s: staged in %.3f s, registered in %.3f s",
            sum(rows.row_count for rows in flushed.staged),
            len(flushed.staged),
            position,
            flushed.seconds,
            time.monotonic() - began,
        )

    def _advance(self) -> None:
        """Advance ``flushed_lsn`` over WAL without changes of ours, if worth a round trip."""
        moved = self._position - self.flushed
        if moved <= 0:
            return
        waited = time.monotonic() - self._advanced_at
        targets = (self._awaited, self._until or Lsn.ZERO)
        awaited = any(self.flushed < lsn <= self._position for lsn in targets)
        if moved >= IDLE_STEP_BYTES or waited >= IDLE_STEP_SECONDS or awaited:
            self._store.advance(self._position)
            self._registered(self._position)

    def _registered(self, position: Lsn) -> None:
        """``flushed_lsn`` holds ``position``: from now on it may be acknowledged."""
        self._advanced_at = time.monotonic()
        self.flushed = max(self.flushed, position)
        self._progress.flushed = self.flushed
        self._wake()

    def _refresh(self) -> None:
        """Notice changes of the registered tables; fails when the session (the lock) is gone.

        A table is marked as followed once the decoder is sure to know it before it sees a change
        that commits from now on; it is pinned only after that (``pins.pins``).
        """
        revision = self._store.revision()
        self._awaited = self._store.awaited_lsn()
        self._refreshed_at = time.monotonic()
        beside = any(row.inserts_only and row.oid in self._specs for row in self._rows)
        if beside and len(self.publications) == 1:
            names = streamed_publications(self._pipeline, self.flushed)
            if names != self.publications:
                raise StreamLost(f"the stream is opened anew: it lacks {names[-1]}.")
        if revision == self._revision:
            return
        rows = self._rows = self._store.tables()
        self._revision = revision
        specs = staging_specs(rows, self._pipeline.config)
        if specs != self._specs:
            self._specs = specs
            self._tell(Specs(specs))
        if any(map(self._unfollowed, rows)):
            self._store.mark_followed(filter(self._unfollowed, rows))

    def _unfollowed(self, row: TableRow) -> bool:
        """Whether the stream has the table's changes from now on, and it isn't marked so yet."""
        told = row.oid in self._specs and (not row.inserts_only or len(self.publications) > 1)
        return told and not row.followed
