"""The flusher of one source: takes its turn, checks where the slot stands, streams, starts again.

``python -m cdc_assets.flusher.main --config FILE`` is the supervised child; :func:`run` is the
same in the caller's process. Only one flusher of a source is active: it holds the advisory lock
``flusher:<source>`` on the very session it registers with. The others wait hot.

Two checks stand before the first byte. A slot that is gone, or that somebody else moved beyond
``flushed_lsn``, means that changes are missing: that is said with the way out, never skipped.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from typing import Literal

import psycopg
from tenacity import RetryCallState, Retrying, retry_if_exception, sleep_using_event

from cdc_assets.config import SourceConfig, config_from_environment, load_config
from cdc_assets.errors import CdcError, ConfigurationError, CoordinationError, SlotLost, SlotMoved
from cdc_assets.flusher.companions import Health, PinKeeper
from cdc_assets.flusher.receiver import Progress, Session
from cdc_assets.flusher.staging import check_place
from cdc_assets.flusher.stream import SlotInUse, StreamLost
from cdc_assets.log.files import Storage
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.pins import Pins
from cdc_assets.postgres.replication import slot_status
from cdc_assets.process import die_with_parent

logger = logging.getLogger(__name__)

# How often a waiting flusher looks whether it is its turn: what a take-over costs.
LOCK_SECONDS = 1.0
# Back-off between sessions: at once, then doubling; a server restart takes some seconds.
FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
# A session that lived this long was well: the next failure is a first one again.
HEALTHY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class FlushResult:
    """How a run ended: everything that committed below ``flushed`` is in the log."""

    flushed: Lsn | None
    rows: int
    files: int
    staged_bytes: int
    ended_by: Literal["until", "stop"]


def run(
    config: SourceConfig,
    *,
    until: Lsn | None = None,
    stop: threading.Event | None = None,
    progress: Progress | None = None,
) -> FlushResult:
    """Stream and stage until everything that committed up to ``until`` is in the log, or ``stop``.

    ``progress`` is kept true meanwhile, for a caller that shows it.

    It survives the loss of its connections, once it has streamed, and waits for a staging place
    that fails. Raises SlotLost, SlotMoved, ReplicationProblem, PreflightError, CoordinationError,
    EnvironmentProblem, StagingProblem (at once, if nobody can write there), or
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
        self._streamed = False
        self._failures = 0

    def run(self) -> FlushResult:
        config = self._config
        if config.snapshot.mode != "snapshot_only":  # which stages nothing
            check_place(config.staging_uri, config.name, Storage.of(config.s3))
        try:
            for attempt in Retrying(
                retry=retry_if_exception(self._worth_another),
                wait=self._patience,
                sleep=sleep_using_event(self._stop),
                before_sleep=self._say,
                reraise=True,
            ):
                with attempt:
                    if not self._stop.is_set():  # told to stop while it was down: in order
                        self._once()
        finally:
            self._drop_keeper()
        done = self._progress
        reached = self._until is not None and done.flushed >= self._until
        return FlushResult(
            done.flushed if done.flushed > Lsn.ZERO else None,
            done.rows,
            done.files,
            done.staged_bytes,
            "until" if reached else "stop",
        )

    def _once(self) -> None:
        """One turn: lock, pins, checks, one session."""
        began = time.monotonic()
        try:
            with Pipeline.open(self._config) as pipeline:
                if not self._wait_for_turn(pipeline):
                    return
                self._prepare_pins(pipeline)
                if self._config.snapshot.mode == "snapshot_only":
                    self._stop.wait()  # nothing is streamed: the pins are held, that is all
                    return
                flushed = check_slot(pipeline)
                self._progress.flushed = flushed
                health = Health(pipeline, self._progress)
                health.start()
                try:
                    logger.info("streaming from %s", flushed)
                    self._session(pipeline, flushed)
                finally:
                    health.close()
        finally:
            if time.monotonic() - began >= HEALTHY_SECONDS:
                self._failures = 0

    def _session(self, pipeline: Pipeline, flushed: Lsn) -> None:
        self._streamed = True
        Session(pipeline, flushed, self._progress, stop=self._stop, until=self._until).run()

    def _wait_for_turn(self, pipeline: Pipeline) -> bool:
        """True once the lock is ours; False if there is nothing left to wait for."""
        said = False
        while not pipeline.store.try_lock(f"flusher:{self._config.name}"):
            if not said:
                logger.info("another flusher of %s is active; waiting", self._config.name)
                said = True
            self._streamed = True  # whatever happens now, waiting goes on
            flushed = pipeline.store.flushed_lsn()
            if self._until is not None and flushed is not None and flushed >= self._until:
                self._progress.flushed = flushed
                return False  # the other one did it
            if self._stop.wait(LOCK_SECONDS):
                return False
        return True

    def _prepare_pins(self, pipeline: Pipeline) -> None:
        if self._keeper is not None:
            return
        pins = Pins(pipeline)
        try:
            pins.prepare()
        except BaseException:
            pins.close()
            raise
        self._keeper = PinKeeper(pins, pipeline)
        self._keeper.start()

    def _drop_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    # --- what is worth another try, and when ---

    def _worth_another(self, error: BaseException) -> bool:
        if isinstance(error, SlotInUse):
            return True
        return self._streamed and isinstance(error, StreamLost | psycopg.OperationalError)

    def _patience(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, SlotInUse):
            return LOCK_SECONDS
        self._failures += 1
        cap = min(FIRST_WAIT_SECONDS * 2.0 ** min(self._failures - 1, 16), LONGEST_WAIT_SECONDS)
        return random.uniform(cap / 2, cap)  # noqa: S311 - not all flushers at once

    def _say(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        waits = state.next_action.sleep if state.next_action is not None else 0.0
        self._progress.enter("reconnecting", error)
        logger.warning("%s Trying again in %.1f s.", error, waits)


def check_slot(pipeline: Pipeline) -> Lsn:
    """Where to stream from: ``flushed_lsn``.

    Raises SlotLost or SlotMoved if the slot can't serve it.
    """
    config = pipeline.config
    flushed = pipeline.store.flushed_lsn()
    with pipeline.connect_source("flusher check") as source:
        slot = slot_status(source, config.slot)
    if flushed is None:
        raise CoordinationError(
            f"source {config.name} has a slot but no flushed_lsn: its log has no beginning.",
            "Run cdc-assets resync for its tables.",
        )
    if slot is None or slot.wal_status == "lost":
        state = "is gone" if slot is None else "lost the WAL it needs (max_slot_wal_keep_size)"
        raise SlotLost(
            f"the replication slot {config.slot} {state}; the log has the changes up to {flushed},"
            " those after it are missing.",
            "Drop what is left of the slot"
            f" (select pg_drop_replication_slot('{config.slot}')), then run cdc-assets resync for"
            " every table of this source.",
        )
    if slot.confirmed_flush is not None and slot.confirmed_flush > flushed:
        raise SlotMoved(
            f"somebody else moved the replication slot {config.slot} to {slot.confirmed_flush}, but"
            f" the log ends at {flushed}: the changes between them are missing.",
            "Find out who used the slot (or restored the coordination database); then run"
            " cdc-assets resync for every table of this source.",
        )
    return flushed


def main(arguments: list[str] | None = None) -> int:
    """The supervised child: 0 after an orderly stop, 1 on an error, 2 on a bad configuration."""
    parser = argparse.ArgumentParser(prog="cdc_assets.flusher", description=(__doc__ or "")[:70])
    parser.add_argument("--config", metavar="FILE", help="default: handed down by the parent")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=os.environ.get("CDC_ASSETS_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    stop = die_with_parent()
    try:
        config = load_config(options.config) if options.config else config_from_environment()
        result = run(config, stop=stop)
    except (CdcError, psycopg.Error) as error:
        logger.error("%s", error)  # noqa: TRY400 - it says what to do; a trace adds nothing
        return 2 if isinstance(error, ConfigurationError) else 1
    logger.info("stopped; the log ends at %s", result.flushed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
