"""A session of a second lake: passes on what another source stages (``relay``).

It has the flusher's turn, and is supervised and reported as a session that streams is. It asks the
coordination database once a second, as often as a flusher registers; the source isn't asked.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.decode.markers import MOST
from cdc_assets.flusher.progress import Progress
from cdc_assets.log.asked.wishes import refuse_if_dropped
from cdc_assets.log.sessions.flusher_status import active_flusher
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import command
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.process.children import process_name
from cdc_assets.relay.first import first_log
from cdc_assets.relay.passing import Passed, let_go, pass_on

logger = logging.getLogger(__name__)

# Where somebody waits, nobody notices less.
LOOK_SECONDS, _AWAITED_SECONDS = 1.0, 0.2
# How often the group's cursor follows the lake's, which moves with each merge.
LET_GO_SECONDS = 5.0
# How long a run that ends at an LSN waits while nobody flushes the first source.
PATIENCE_SECONDS = 15.0
# In Progress.troubles.
_TROUBLE = "log"


class Relaying:
    """Passes on until told to stop, until ``until`` is passed on, or an error.

    ``holder``: whom the heartbeats of this process are of.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        progress: Progress,
        holder: uuid.UUID,
        *,
        stop: threading.Event,
        until: Lsn | None = None,
    ) -> None:
        self._config, self._store = pipeline.config, pipeline.store
        self._first = first_log(pipeline.config, pipeline.store)
        self._progress, self._holder = progress, holder
        self._stop, self._until = stop, until
        self._let_go_at = float("-inf")
        self._alone_since: float | None = None

    def run(self) -> None:
        """Raises psycopg.OperationalError (worth a new session), or CdcError."""
        self._progress.sessions += 1
        self._progress.enter("streaming")
        with _Reader(self._store, self._first, self._group, self._holder):
            while not self._stop.is_set():
                self._progress.beat = time.monotonic()
                done = self.step()
                if self._until is not None and (done.flushed or Lsn.ZERO) >= self._until:
                    return
                if done.is_level:
                    self._stop.wait(self._seconds(done))

    @property
    def _group(self) -> str:
        assert self._config.log is not None
        return self._config.log.group

    def step(self) -> Passed:
        done = pass_on(self._config, self._store, self._first, most_marks=MOST)
        now = time.monotonic()
        if now - self._let_go_at >= LET_GO_SECONDS:
            refuse_if_dropped(self._store)
            self._first = first_log(self._config, self._store)
            let_go(self._config, self._store, self._first)
            self._look_for_flusher(now)
            self._let_go_at = now
        progress = self._progress
        progress.rows += done.rows
        progress.files += done.entries
        if done.flushed is not None:
            progress.flushed = progress.level = done.flushed
            progress.received = max(progress.received, done.first)
        self._ask(done)
        return done

    def _ask(self, done: Passed) -> None:
        """Have the first source's flusher get to what somebody waits for here, if there is one."""
        wanted = max(done.awaited, self._until or Lsn.ZERO)
        if wanted > done.first:
            self._first.note_awaited(wanted)
        if self._until is None or self._alone_since is None or not done.is_level:
            return
        if time.monotonic() - self._alone_since > PATIENCE_SECONDS:
            raise ReplicationProblem(
                f"the log of {self._first.source} ends at {done.first}, and nobody flushes it up to"
                f" {self._until}.",
                f"Start its flusher, or with its configuration: {command('flush', '--until')}"
                " current",
            )

    def _look_for_flusher(self, now: float) -> None:
        trouble = None
        if active_flusher(self._first) is not None:
            self._alone_since = None
        else:
            self._alone_since = now if self._alone_since is None else self._alone_since
            trouble = f"nobody flushes source {self._first.source}, whose log it is"
        self._progress.note(_TROUBLE, trouble)

    def _seconds(self, done: Passed) -> float:
        awaited = max(done.awaited, self._until or Lsn.ZERO) > (done.flushed or Lsn.ZERO)
        awaited = awaited and self._alone_since is None  # else nothing comes
        return _AWAITED_SECONDS if awaited else LOOK_SECONDS


class _Reader:
    """This process among those that read for consumer groups: nobody drops the group meanwhile."""

    def __init__(self, store: LogStore, first: LogStore, group: str, holder: uuid.UUID) -> None:
        self._store, self._which = store, (group, first.source)
        self._holder = holder

    def __enter__(self) -> None:
        self._leave()  # who had the turn before
        self._store.connection.execute(
            "insert into consumer (worker, consumer_group, source, process, tables)"
            " values (%s, %s, %s, %s, '{}')",
            (self._holder, *self._which, process_name()),
        )

    def __exit__(self, *_: object) -> None:
        if not self._store.connection.closed:
            self._leave()

    def _leave(self) -> None:
        self._store.connection.execute(
            "delete from consumer where consumer_group = %s and source = %s", self._which
        )
