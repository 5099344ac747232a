"""The server's clock: whether it was set back since it was last looked at. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cdc_assets.poller.bounds import WHOLE

SECOND = 10**6
# A process may have read the clock for its transaction and not have shown that yet, for as long as
# the machine doesn't let it go on. A clock that is set back by less than _SLIP is covered, too.
MARGIN = 5 * SECOND
_SLIP = 1 * SECOND


@dataclass(frozen=True, slots=True)
class Clock:
    """The server's time in microseconds since 1970, and ours that only goes on, in seconds."""

    server: int
    ours: float | None
    """None: of another process, which has ended."""

    def lowest(self, now: Clock) -> int | None:
        """What may have been written since at the lowest, if the clock was set back; else None.

        From one process to the next it isn't known by how much: then the whole table is read.
        """
        if self.ours is None or now.ours is None:
            return WHOLE if now.server < self.server - _SLIP else None
        passed = round((now.ours - self.ours) * SECOND)
        if now.server >= self.server + passed - _SLIP:
            return None
        return now.server - passed - MARGIN
