"""Waiting for the log to reach an LSN, flushing here if nobody else does."""

from __future__ import annotations

import threading

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.flusher import run
from cdc_assets.log.sessions.flusher_status import active_flusher
from cdc_assets.log.store import FLUSHED_LOOK_SECONDS
from cdc_assets.pins.heap_facts import look_at_heaps
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.source.now import followed, review


class LogBehind(ReplicationProblem):
    """The log hasn't come to ``lsn`` in ``seconds``."""

    def __init__(self, lsn: Lsn, seconds: float) -> None:
        super().__init__(
            f"the log hasn't come to {lsn} in {seconds:.0f} s.",
            "cdc-assets status says what the flusher is at; try again once it is level.",
        )


def reach(
    pipeline: Pipeline,
    lsn: Lsn,
    stop: threading.Event | None = None,
    *,
    seconds: float | None = None,
) -> None:
    """Return once everything that committed below ``lsn`` is registered in the log, or at ``stop``.

    While another process is the active flusher, its progress is awaited; if it goes away, or isn't
    heard of any more, this one takes over. Raises SourceMismatch, what ``run`` does, and LogBehind
    after ``seconds``, which also sets ``stop``.
    """
    stop = stop or threading.Event()
    if seconds is None:
        _reach(pipeline, lsn, stop)
        return
    timer = threading.Timer(seconds, stop.set)
    timer.daemon = True
    timer.start()
    try:
        _reach(pipeline, lsn, stop)
    finally:
        timer.cancel()
    if stop.is_set() and not pipeline.store.is_flushed(lsn):
        raise LogBehind(lsn, seconds)


def _reach(pipeline: Pipeline, lsn: Lsn, stop: threading.Event) -> None:
    store = pipeline.store
    is_ours = False
    while not stop.is_set():
        reached = store.is_flushed(lsn)
        active = active_flusher(store)
        if not reached and (active is None or active.is_silent):
            run(pipeline.config, until=lsn, stop=stop)
            continue
        if reached or not is_ours:
            _look_once_more(pipeline)
            is_ours = True
        if reached:
            return
        store.note_awaited(lsn)
        stop.wait(FLUSHED_LOOK_SECONDS)


def _look_once_more(pipeline: Pipeline) -> None:
    """Raise SourceMismatch if this is another source than the log's: its LSNs don't compare.

    A source that is being promoted is waited for. Tables with changes that the log doesn't have are
    parked.
    """
    config = pipeline.config
    if not config.decodes:
        return
    with pipeline.connect_source("flush") as source:
        found, _ = review(source, config, pipeline.store)
        if not found.passes:
            found.refuse()
            look_at_heaps(source, pipeline.store, followed(pipeline.store))


def flush_target(pipeline: Pipeline, until: str) -> Lsn:
    """The LSN that ``--until`` means: ``current`` or an LSN; ValueError for anything else."""
    if until != "current":
        return Lsn.parse(until)
    with pipeline.connect_source("flush") as source:
        return current_lsn(source)
