"""Streams that end at one place for one reason each time: the source can't send what is next.

A lost connection is worth another try, and soon. A walsender that fails at a change (a row with
more than 1 GB of text, an output function that raises an error) fails at it each time, after it
has decoded everything before it again. Both look the same at first; in the second case nothing gets
into the log between two failures with the same words.

A message that doesn't end was damaged on the way, which a new connection mends; or the line is too
slow for it, which only more time mends: the time is doubled if nothing got into the log in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc_assets.flusher.stream import EndedByServer, Endless, StreamLost
from cdc_assets.postgres.lsn import Lsn

# By chance a server may run out of memory once or twice.
TIMES = 3


class Stuck(StreamLost):
    """The source can't send what follows ``flushed``; waiting alone doesn't mend it."""

    def __init__(self, flushed: Lsn, times: int, said: str) -> None:
        super().__init__(
            f"the source can't send what follows LSN {flushed}: the stream ended there {times}"
            f" times in a row, and the server said: {said}.",
            "Until it can, nothing arrives, and the slot keeps the WAL. Mend what the server says."
            " If it is a row that is too large (Postgres can't send 1 GB of text), make the row"
            " smaller; if it is a division by zero or the like, a row filter (where in tables:)"
            " fails at a row: correct it. Then begin behind it: cdc-assets drop-source, then"
            " cdc-assets resume, copy every table anew through a new slot.",
        )


@dataclass(slots=True)
class Standstill:
    """How often in a row the server ended the stream at one place with the same words.

    ``patience``: how many times as long as usual the next message may take.
    """

    times: int = 0
    patience: int = 1
    _at: Lsn = Lsn.ZERO
    _said: str = ""
    _files: int = -1

    def judged(self, flushed: Lsn, error: StreamLost, files: int) -> StreamLost:
        """``error``, which ended a session at ``flushed``; Stuck if it is always the same.

        ``files``: how many were registered so far. For a message that doesn't end, ``flushed``
        shows no standstill: keepalives before its transaction move it each time.
        """
        if isinstance(error, Endless):
            self.patience = 2 * self.patience if files == self._files else 1
            self._files = files
        if not isinstance(error, EndedByServer):
            return error
        if (flushed, error.said) != (self._at, self._said):
            self._at, self._said, self.times = flushed, error.said, 0
        self.times += 1
        return Stuck(flushed, self.times, error.said) if self.times >= TIMES else error
