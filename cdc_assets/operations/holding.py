"""Holding a snapshot of the source for a person's dump."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from cdc_assets.errors import TableProblem, TablesFailed
from cdc_assets.log.asked.wishes import refuse_if_dropped
from cdc_assets.log.locks import PINS_LOCK
from cdc_assets.log.states import TableState
from cdc_assets.pins.elsewhere.restored import HeldPoint, hold_point
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline

# As long as a pin is waited for.
_PATIENCE_SECONDS = 180
_LOOK_SECONDS = 0.2


@contextmanager
def held_point(pipeline: Pipeline) -> Iterator[HeldPoint]:
    """A snapshot of all tables that wait for their copy, whose logs have begun; held meanwhile.

    Raises TablesFailed if there is none, and SlotBusy where transactions don't end.
    """
    with closing(Pins(pipeline)) as pins:
        pins.prepare()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            pins.tick()
            rows = [row for row in pins.store.tables(None, TableState.WAITING) if row.oid]
            begun = [row for row in rows if row.log_from is not None]
            if begun == rows or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_SECONDS)
        if not begun:
            what = "no table waits for its copy, with a log that has begun"
            raise TablesFailed([TableProblem(pipeline.config.name, what, "See cdc-assets status.")])
        pins.store.lock(PINS_LOCK)
        try:
            refuse_if_dropped(pins.store)
            with pipeline.connect_source("pins") as source:
                held = hold_point(pipeline, source, begun)
        finally:
            pins.store.unlock(PINS_LOCK)
    with closing(held.session):
        yield held
