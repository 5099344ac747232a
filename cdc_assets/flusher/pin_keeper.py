"""What makes pins beside the stream, in a thread with connections of its own.

It may never hold up the stream: a pin waits for every running transaction of the source.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import psycopg

from cdc_assets.errors import CdcError, SlotBusy, SourceMismatch
from cdc_assets.log.heart import Heart
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.pins import Pins

logger = logging.getLogger(__name__)

# A table that waits for its pin waits this long at most, if slot creation is quick.
PIN_SECONDS = 2.0
# … and after failures this long.
PIN_LONGEST_SECONDS = 30.0
# How long the log of a table that somebody drops, or takes out of the publication, looks whole.
REVIEW_SECONDS = 10.0
# A pin can wait minutes for other people's transactions; the end of the flusher can't.
_JOIN_SECONDS = 3.0


class PinKeeper:
    """Ticks :class:`Pins` for as long as the flusher lives, over all its sessions.

    A failure is logged and tried again with new connections: one table that can't be pinned doesn't
    stop those that stream. What is wrong with the source does: ``on_mismatch`` is told.
    """

    def __init__(self, pipeline: Pipeline, heart: Heart) -> None:
        self._pipeline = pipeline
        self._heart = heart
        self._pins: Pins | None = None
        self._session = 0
        self.on_mismatch: Callable[[SourceMismatch], None] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pins", daemon=True)

    def start(self) -> None:
        """Prepare the pins now (raises like ``Pins.prepare``), and tick from then on."""
        try:
            self._open().prepare()
        except BaseException:
            self._hang_up()
            raise
        self._thread.start()

    def close(self) -> None:
        """Stop; lets go of the pins unless one is just being made (its sessions end with us)."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            self._hang_up()

    def _open(self) -> Pins:
        if self._pins is None:
            self._pins = Pins(self._pipeline)
            self._session = self._heart.adopt(self._pins.store)
        return self._pins

    def _hang_up(self) -> None:
        """Close the connections; what the server still has of them ends with our heartbeats."""
        pins, self._pins = self._pins, None
        if pins is not None:
            self._heart.give_up(self._session)
            pins.close()

    def _run(self) -> None:
        wait = PIN_SECONDS
        reviewed = time.monotonic()
        while not self._stop.wait(wait):
            try:
                pins = self._open()
                if time.monotonic() - reviewed >= REVIEW_SECONDS:
                    reviewed = time.monotonic()
                    pins.review()
                pins.tick()
                wait = PIN_SECONDS
            except SlotBusy as error:  # its connections are fine, and hold pins
                logger.warning("tables wait for their pin: %s", error)
            except (CdcError, psycopg.Error) as error:
                if isinstance(error, SourceMismatch) and (tell := self.on_mismatch) is not None:
                    tell(error)  # it looks by itself before it streams again
                wait = min(2 * wait, PIN_LONGEST_SECONDS)
                logger.error("pinning failed; next try in %.0f s: %s", wait, error)  # noqa: TRY400
                if isinstance(error, psycopg.Error):
                    self._hang_up()  # its connections may be gone
