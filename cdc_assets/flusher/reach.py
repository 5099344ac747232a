"""Waiting for the log to reach an LSN, flushing here if nobody else does."""

from __future__ import annotations

import threading

from cdc_assets.flusher.main import run
from cdc_assets.flusher.turn import active_process
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.replication import current_lsn

# A running flusher registers about once a second: looking more often shows nothing new.
_LOOK_SECONDS = 0.2


def reach(pipeline: Pipeline, lsn: Lsn, stop: threading.Event | None = None) -> None:
    """Return once everything that committed below ``lsn`` is registered in the log, or at ``stop``.

    While another process is the active flusher, its progress is awaited; if it goes away, or isn't
    heard of any more, this one takes over.
    """
    store = pipeline.store
    stop = stop or threading.Event()
    while not stop.is_set() and ((flushed := store.flushed_lsn()) is None or flushed < lsn):
        active = active_process(store)
        if active is not None and not active[1]:
            stop.wait(_LOOK_SECONDS)
        else:
            run(pipeline.config, until=lsn, stop=stop)


def flush_target(pipeline: Pipeline, until: str) -> Lsn:
    """What ``--until`` means: ``current`` or an LSN; ValueError for anything else."""
    if until != "current":
        return Lsn.parse(until)
    with pipeline.connect_source("flush") as source:
        return current_lsn(source)
