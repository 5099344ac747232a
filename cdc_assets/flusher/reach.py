"""Waiting for the log to reach an LSN, flushing here if nobody else does."""

from __future__ import annotations

import threading

from cdc_assets.flusher.flusher import run
from cdc_assets.log.sessions.heartbeat import active_process
from cdc_assets.pins.heap_facts import look_at_heaps
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.source.now import followed, review

# A running flusher registers about once a second: looking more often shows nothing new.
_LOOK_SECONDS = 0.2


def reach(pipeline: Pipeline, lsn: Lsn, stop: threading.Event | None = None) -> None:
    """Return once everything that committed below ``lsn`` is registered in the log, or at ``stop``.

    While another process is the active flusher, its progress is awaited; if it goes away, or isn't
    heard of any more, this one takes over. Raises SourceMismatch, and what ``run`` does.
    """
    store = pipeline.store
    stop = stop or threading.Event()
    is_ours = False
    while not stop.is_set():
        flushed = store.flushed_lsn()
        reached = flushed is not None and flushed >= lsn
        active = active_process(store)
        if not reached and (active is None or active[1]):
            run(pipeline.config, until=lsn, stop=stop)
            continue
        if reached or not is_ours:
            _look_once_more(pipeline)
            is_ours = True
        if reached:
            return
        store.await_flushed(lsn)
        stop.wait(_LOOK_SECONDS)


def _look_once_more(pipeline: Pipeline) -> None:
    """Raise SourceMismatch if this is another source than the log's: its LSNs don't compare.

    A source that is being promoted is waited for. Tables with changes that the log doesn't have are
    parked.
    """
    config = pipeline.config
    if config.snapshot.mode == "snapshot_only":
        return
    with pipeline.connect_source("flush") as source:
        slot, publication = config.slot, config.publication
        found, now = review(source, pipeline.replication_dsn, pipeline.store, slot, publication)
        if not now.in_recovery:
            found.refuse()
            look_at_heaps(source, pipeline.store, followed(pipeline.store))


def flush_target(pipeline: Pipeline, until: str) -> Lsn:
    """The LSN that ``--until`` means: ``current`` or an LSN; ValueError for anything else."""
    if until != "current":
        return Lsn.parse(until)
    with pipeline.connect_source("flush") as source:
        return current_lsn(source)
