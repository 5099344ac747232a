"""The flusher of one source: takes its turn, checks where the slot stands, streams, starts again.

``python -m cdc_assets.flusher.flusher --config FILE`` is the supervised child; :func:`run` is the
same in the caller's process. Only one flusher of a source is active: it holds the lock
``flusher:<source>`` on the very session it registers with. The others wait hot; one that hangs
loses its turn (``log.sessions.heartbeat``).

Before the first byte of each session the source is held against what the log remembers of it
(``readiness.source.restart_record``): a mismatch is said with the way out, never skipped.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import threading
import time
from dataclasses import dataclass, replace

import psycopg

from cdc_assets.config.source import SourceConfig, config_from_parent, load_config
from cdc_assets.errors import (
    CdcError,
    ConfigurationError,
    ReplicationLost,
    SourceMismatch,
    first_line,
)
from cdc_assets.flusher.guard import Guard
from cdc_assets.flusher.pin_keeper import PinKeeper
from cdc_assets.flusher.polling import Polling
from cdc_assets.flusher.progress import Progress
from cdc_assets.flusher.report.reporter import Health
from cdc_assets.flusher.reviewer import Reviewer
from cdc_assets.flusher.session import Session
from cdc_assets.flusher.standstill import Standstill, Stuck
from cdc_assets.flusher.stream import SlotInUse, StreamLost
from cdc_assets.flusher.without_slot.relaying import Relaying
from cdc_assets.log.locks import flusher_lock
from cdc_assets.log.sessions.flusher_status import active_flusher
from cdc_assets.log.sessions.heartbeat import Heart
from cdc_assets.log.store import LogStore
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.process.backoff import Backoff
from cdc_assets.process.lifeline import die_with_parent, read_settings
from cdc_assets.process.traces import log_level, log_to_stderr
from cdc_assets.readiness.admission import admit, refuse_other_cluster
from cdc_assets.readiness.flushing import refuse_to_flush
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.readiness.source.record import PASSING

logger = logging.getLogger(__name__)

# How often a waiting flusher tries to take its turn: the delay of a take-over.
LOCK_SECONDS = 1.0
# Between sessions: at once, then doubling; a server restart takes some seconds.
BACKOFF = Backoff(first_seconds=0.5, cap_seconds=30.0)
# And if the source fails at one place each time: it decodes all before it at each try.
LONGEST_STUCK_SECONDS = 600.0
# How often a run that a caller waits for tries to stream for the first time.
_TRIES = 3
# Errors that may pass by themselves.
_PASSING = (
    ReplicationLost,
    SourceMismatch,
    psycopg.OperationalError,
    psycopg.errors.ReadOnlySqlTransaction,
)


@dataclass(frozen=True, slots=True)
class FlushResult:
    """How a run ended: everything that committed below ``flushed`` is in the log."""

    flushed: Lsn | None
    rows: int
    files: int
    staged_bytes: int


def run(
    config: SourceConfig,
    *,
    until: Lsn | None = None,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
) -> FlushResult:
    """Stream and stage until everything that committed up to ``until`` is in the log, or ``stop``.

    ``progress`` is kept current, for a caller that shows it.

    Once it has streamed, the run survives the loss of its connections, and waits for a staging
    place that fails. If the source can't send what is next, it tries again at growing intervals,
    with ``until`` only a few times. Raises NotReady (at once, naming all that is wrong),
    SourceMismatch, ReplicationProblem, PreflightError, CoordinationError, EnvironmentProblem, or
    psycopg.OperationalError when a database can't be reached to begin with.
    """
    return _Flusher(config, until, stop or threading.Event(), progress or Progress()).run()


class _Flusher:
    def __init__(
        self,
        config: SourceConfig,
        until: Lsn | None,
        stop: threading.Event,
        progress: Progress,
    ) -> None:
        self._config = config
        self._until = until
        self._stop = stop
        self._progress = progress
        self._keeper: PinKeeper | None = None
        self._heart = Heart(config, progress.note)
        self._health = Health(config, progress)
        self._guard = Guard(config)
        self._reviewer = Reviewer(config, self._heart, progress.note)
        self._streamed = False
        self._failures = 0
        self._standstill = Standstill()

    def run(self) -> FlushResult:
        refuse_to_flush(self._config)
        self._heart.start()
        self._health.start()
        self._guard.start()
        try:
            while not self._stop.is_set():
                try:
                    self._once()
                    break
                except (CdcError, psycopg.Error) as error:
                    if not self._worth_another(error):
                        raise
                    self._wait(error)  # a stop meanwhile is an orderly end
        except (CdcError, psycopg.Error) as error:
            self._progress.enter("stopped", error)
            raise
        finally:
            self._reviewer.close()
            self._drop_keeper()
            self._guard.close()
            self._heart.close()
            self._progress.enter("stopped")
            self._health.close()
        done = self._progress
        return FlushResult(
            done.flushed if done.flushed > Lsn.ZERO else None,
            done.rows,
            done.files,
            done.staged_bytes,
        )

    def _once(self) -> None:
        """One turn: lock, pins, checks, one session."""
        began = time.monotonic()
        session = 0
        try:
            with Pipeline.open(self._config) as pipeline:
                session = self._heart.adopt(pipeline.store)
                if not self._wait_for_turn(pipeline.store):
                    return
                self._prepare_pins(pipeline)
                if not self._config.streams:
                    self._stop.wait()  # nothing is streamed: the pins are held, that is all
                    return
                if self._config.log is not None:
                    self._relays(pipeline)
                    return
                if self._config.query is not None:
                    self._polls(pipeline)
                    return
                flushed = admit(pipeline)
                self._progress.flushed = flushed
                logger.info("streaming from %s", flushed)
                self._session(pipeline, flushed)
        finally:
            self._progress.beat = None
            self._heart.give_up(session)
            if time.monotonic() - began >= BACKOFF.healthy_seconds:
                self._failures = 0

    def _session(self, pipeline: Pipeline, flushed: Lsn) -> None:
        self._streamed = True
        session = Session(
            pipeline,
            flushed,
            self._progress,
            stop=self._stop,
            until=self._until,
            patience=self._standstill.patience,
        )
        assert self._keeper is not None
        self._keeper.on_mismatch = self._reviewer.on_mismatch = session.fail
        try:
            session.run()
        except StreamLost as error:
            done = self._progress
            judged = self._standstill.judged(done.flushed, error, done.files)
            if judged is error:
                raise
            raise judged from error

    def _polls(self, pipeline: Pipeline) -> None:
        """Query mode: a session that polls instead of streaming."""
        with pipeline.connect_source("flusher check") as source:
            refuse_other_cluster(source, pipeline.store)
        self._streamed = True
        flushed = pipeline.store.flushed_lsn() or Lsn.ZERO
        self._progress.flushed = flushed
        logger.info("querying from %s", flushed)
        Polling(pipeline, flushed, self._progress, stop=self._stop, until=self._until).run()

    def _relays(self, pipeline: Pipeline) -> None:
        """A second lake: a session that passes on what another source stages."""
        self._streamed = True
        holder = self._heart.holder
        session = Relaying(pipeline, self._progress, holder, stop=self._stop, until=self._until)
        logger.info("passing on from %s", pipeline.store.flushed_lsn())
        session.run()

    def _wait_for_turn(self, store: LogStore) -> bool:
        """True once the lock is ours; False if there is nothing left to wait for."""
        said = False
        while not store.try_lock(flusher_lock(self._config.name)):
            if not said:
                logger.info(
                    "another flusher of %s is active (%s); waiting",
                    self._config.name,
                    active_flusher(store) or "just ending",
                )
                said = True
                self._progress.waits = True
                self._progress.enter("waiting")
            self._streamed = True  # from now on a passing error is waited out
            self._progress.beat = time.monotonic()
            flushed = store.flushed_lsn()
            if self._until is not None and flushed is not None and flushed >= self._until:
                self._progress.flushed = flushed
                return False  # the other flusher has done it
            if self._stop.wait(LOCK_SECONDS):
                return False
        self._progress.waits, self._progress.beat = False, None
        return True

    def _prepare_pins(self, pipeline: Pipeline) -> None:
        if self._keeper is None:
            keeper = PinKeeper(pipeline, self._heart, self._progress.note)
            keeper.start()
            self._keeper = keeper
            self._reviewer.start()

    def _drop_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    # --- what is worth another try, and when ---

    def _worth_another(self, error: Exception) -> bool:
        if isinstance(error, SlotInUse):
            return True
        if isinstance(error, Stuck) and self._until is not None:
            return False  # a caller waits for this run
        if isinstance(error, SourceMismatch) and not PASSING.issuperset(error.codes):
            return False
        if self._until is not None and not self._progress.sessions and self._failures >= _TRIES:
            return False  # somebody waits for a run that nothing has ever let in
        # A standby that is about to be promoted is read-only for a while.
        return self._streamed and isinstance(error, _PASSING)

    def _wait(self, error: Exception) -> None:
        if isinstance(error, SlotInUse):
            seconds = LOCK_SECONDS
        else:
            self._failures += 1
            backoff, failures = BACKOFF, self._failures
            if isinstance(error, Stuck):
                backoff = replace(BACKOFF, cap_seconds=LONGEST_STUCK_SECONDS)
                failures = max(failures, self._standstill.times)
            cap = backoff.delay_seconds(failures)
            seconds = random.uniform(cap / 2, cap)  # noqa: S311 - not all flushers at once
        if isinstance(error, Stuck):
            self._progress.enter_stuck(error)
        else:
            self._progress.enter("reconnecting", error)
        logger.warning("%s Trying again in %.1f s.", first_line(error), seconds)
        self._stop.wait(seconds)


def main(arguments: list[str] | None = None) -> int:
    """The supervised child: 0 after an orderly stop, 1 on an error, 2 on a bad configuration."""
    parser = argparse.ArgumentParser(prog="cdc_assets.flusher", description=(__doc__ or "")[:70])
    parser.add_argument("--config", metavar="FILE", help="default: handed down by the parent")
    options = parser.parse_args(arguments)
    log_to_stderr(logging.INFO, stacks=True)
    settings = "" if options.config else read_settings()
    stop = die_with_parent()
    config: SourceConfig | None = None
    try:
        logging.getLogger().setLevel(log_level())
        config = load_config(options.config) if options.config else config_from_parent(settings)
        result = run(config, stop=stop)
    except Exception as error:  # noqa: BLE001 - whatever it is, the log's last line is quoted
        problem = explained(error, config)
        logger.error("%s", problem)  # noqa: TRY400 - it says what to do; a trace adds nothing
        return 2 if isinstance(problem, ConfigurationError) else 1
    logger.info("stopped; the log ends at %s", result.flushed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
