"""Makes pins beside the stream, in a thread with connections of its own.

Pinning must not hold up the stream: a pin waits for every running transaction of the source.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from cdc_assets.errors import SourceMismatch
from cdc_assets.log.sessions.heartbeat import Heart
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.helper_thread import HelperThread, Note

# A table waits at most this long for its pin, if slot creation is quick …
PIN_SECONDS = 2.0
# … and after failures at most this long.
PIN_LONGEST_SECONDS = 30.0


class PinKeeper:
    """Ticks :class:`Pins` for as long as the flusher lives, over all its sessions.

    A failure is noted and tried again: one table that can't be pinned doesn't stop those that
    stream. A mismatch of the source does: ``on_mismatch`` is called with it.
    """

    def __init__(self, pipeline: Pipeline, heart: Heart, note: Note) -> None:
        self._pipeline = pipeline
        self._heart = heart
        self._pins: Pins | None = None
        self._session = 0
        self.on_mismatch: Callable[[SourceMismatch], None] = lambda _: None
        self._thread = HelperThread(
            "pins",
            self._tick,
            PIN_SECONDS,
            longest_seconds=PIN_LONGEST_SECONDS,
            at_end=self._hang_up,
            note=note,
        )

    def start(self) -> None:
        """Prepare the pins now (raises like ``Pins.prepare``), and tick from then on."""
        try:
            self._open().prepare(patient=False)
        except BaseException:
            self._hang_up()
            raise
        self._thread.start()

    def close(self) -> None:
        """Stop, and release the pins unless one is being made now (its sessions end with us)."""
        self._thread.close()

    def _open(self) -> Pins:
        if self._pins is None:
            self._pins = Pins(self._pipeline)
            self._session = self._heart.adopt(self._pins.store)
        return self._pins

    def _hang_up(self) -> None:
        """Close the connections; sessions that the server still has end with our heartbeats."""
        pins, self._pins = self._pins, None
        if pins is not None:
            self._heart.give_up(self._session)
            pins.close()

    def _tick(self) -> None:
        pins = self._open()
        try:
            pins.tick()
        except SourceMismatch as error:
            self.on_mismatch(error)  # ends the session; the source is checked before the next one
            raise
        except psycopg.Error:
            # Connections of their own hold the pins; trouble with one table doesn't close those.
            if pins.store.connection.closed:
                self._hang_up()
            raise
