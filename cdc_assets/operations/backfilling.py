"""Backfills, carried out and steered for commands, jobs and signals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from threading import Event
from typing import Literal

from pyspark.sql import SparkSession

from cdc_assets.backfill.carry_out import carry_out
from cdc_assets.errors import ConfigurationError
from cdc_assets.flusher.reach import reach
from cdc_assets.log import backfills as record
from cdc_assets.log.backfills import Backfill, State
from cdc_assets.pipeline import Pipeline

logger = logging.getLogger(__name__)

Wish = Literal["pause", "resume", "stop"]
BECOMES: Mapping[Wish, State] = {"pause": "paused", "resume": "requested", "stop": "stopped"}
_LOOK_SECONDS = 1.0


def backfill(
    pipeline: Pipeline,
    session: SparkSession,
    number: int,
    on_progress: Callable[[str], None],
    stop: Event | None = None,
) -> Backfill:
    """Carry a backfill out, or wait while another process does; until it ends, or is paused.

    Returned, too, once ``stop`` is set: then it is still to be carried out. Raises CdcError if it
    fails here.
    """
    stop = stop or Event()
    while True:
        done = carry_out(pipeline, session, number, partial(reach, pipeline), on_progress, stop)
        if done.has_ended or done.state == "paused" or stop.wait(_LOOK_SECONDS):
            return done


def wish(pipeline: Pipeline, what: Wish, number: int) -> Backfill:
    """Pause a backfill, resume or stop it. Raises ConfigurationError if it can't be by now."""
    store = pipeline.store
    if not record.become(store, number, BECOMES[what]):
        now = record.backfill(store, number)
        is_so = now.state == BECOMES[what] or (what == "resume" and now.state == "running")
        if not is_so:
            raise ConfigurationError(f"backfill {number} can't {what}: it is {now.state}.")
    return record.backfill(store, number)
