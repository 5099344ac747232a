"""How a replication stream ends, whichever way it is read."""

from __future__ import annotations


class Ended(Exception):
    """The server ended the stream, with the message and the SQL state of its error, if any."""

    def __init__(self, message: str = "", state: bytes | None = None) -> None:
        self.message = message
        self.state = state
        super().__init__(message)
