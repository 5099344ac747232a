"""Compares the source with the log's record of it while the stream goes on.

It is a thread with connections of its own: one that waits for a pin or a staging place can't look.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import SourceMismatch
from cdc_assets.log.sessions.heartbeat import Heart
from cdc_assets.pins.heap_facts import look_at_heaps
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.helper_thread import HelperThread, Note
from cdc_assets.readiness.admission import refuse_or_park
from cdc_assets.readiness.source.now import followed, remember
from cdc_assets.readiness.source.record import SlotRestart

# After a table is dropped or taken out of the publication, its log looks complete for so long.
REVIEW_SECONDS = 10.0


class Reviewer:
    """Reviews for as long as the flusher lives; ``on_mismatch`` gets what must end the stream."""

    def __init__(self, config: SourceConfig, heart: Heart, note: Note) -> None:
        self._config = config
        self._heart = heart
        self._session = 0
        self._pipeline: Pipeline | None = None
        self._slot_restart: SlotRestart | None = None
        self.on_mismatch: Callable[[SourceMismatch], None] = lambda _: None
        self._thread = HelperThread(
            "review", self._review, REVIEW_SECONDS, at_end=self._hang_up, note=note
        )

    def start(self) -> None:
        if self._config.decodes:  # else there is no log
            self._thread.start()

    def close(self) -> None:
        self._thread.close()

    def _review(self) -> None:
        """Park the tables whose log has a gap now; record the slot's restart LSN.

        The restart LSN is recorded one review late: by then the server has it on disk and never
        goes back behind it.
        """
        try:
            if self._pipeline is None:
                self._pipeline = Pipeline.open(self._config)
                self._session = self._heart.adopt(self._pipeline.store)  # it takes a lock
            store = self._pipeline.store
            with self._pipeline.connect_source("review") as source:
                found = refuse_or_park(source, self._config, store)
                look_at_heaps(source, store, followed(store))
        except SourceMismatch as error:
            self.on_mismatch(error)  # ends the session; the source is checked before the next one
            raise
        except psycopg.Error:
            self._hang_up()
            raise
        if found.went_on:  # a server that crashes forgets what was acknowledged a moment ago
            remember(store, found)
        if self._slot_restart is not None:
            store.record({"slot_restart_lsn": str(self._slot_restart)})
        begins = found.slot.restart if found.slot is not None else None
        self._slot_restart = None if begins is None else SlotRestart(begins, found.timeline)

    def _hang_up(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._heart.give_up(self._session)
            pipeline.close()
