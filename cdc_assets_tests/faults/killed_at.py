"""A flusher that kills itself (SIGKILL) when it passes a named step for the n-th time.

``python -m cdc_assets_tests.faults.killed_at STEP N --config FILE`` is the real flusher otherwise:
what is there is wrapped from here, so that production code knows nothing of it. Steps of the
decoder happen in the decoder process, which this module starts as itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from cdc_assets.flusher import flusher as main
from cdc_assets.flusher import session as receiver
from cdc_assets.flusher.decode.decoder import Decoder
from cdc_assets.flusher.decoder_process import link
from cdc_assets.flusher.decoder_process import loop as decoder_process
from cdc_assets.flusher.decoder_process.link import DecoderProcess
from cdc_assets.flusher.line.direct import DirectLine
from cdc_assets.flusher.stage import staging
from cdc_assets.flusher.stage.staging import Staging
from cdc_assets.flusher.stream import Stream
from cdc_assets.flusher.without_slot import relaying
from cdc_assets.log.staged import storage
from cdc_assets.log.store import LogStore
from cdc_assets.pins import pins, taking
from cdc_assets.pins.pins import Pins
from cdc_assets.poller.poller import Poller
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.relay import passing

Wrap = Callable[[Callable[[], None]], None]
"""Installs a step: calls what it is given whenever the step is passed."""


def before(owner: Any, name: str) -> Wrap:
    return _around(owner, name, first=True)


def after(owner: Any, name: str) -> Wrap:
    return _around(owner, name, first=False)


def _around(owner: Any, name: str, *, first: bool) -> Wrap:
    def install(passed: Callable[[], None]) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            if first:
                passed()
                return real(*args, **options)
            result = real(*args, **options)
            passed()
            return result

        setattr(owner, name, wrapped)

    return install


def _unsent(passed: Callable[[], None]) -> None:
    """When a message is about to be sent to the server."""
    real = DirectLine._flush

    def flush(self: DirectLine) -> None:
        if self._unsent:
            passed()
        real(self)

    setattr(DirectLine, "_flush", flush)  # noqa: B010 - mypy knows what a method is


def _registering(passed: Callable[[], None]) -> None:
    """When entries are inserted, and ``flushed_lsn`` isn't moved yet."""
    real = LogStore.advance

    def advance(self: LogStore, lsn: Lsn, commit_time: datetime | None = None) -> None:
        if commit_time is not None:
            passed()
        real(self, lsn, commit_time)

    setattr(LogStore, "advance", advance)  # noqa: B010 - mypy knows what a method is


RECEIVER: dict[str, Wrap] = {
    "a decoder is started": after(DecoderProcess, "__init__"),
    "a batch is half handed over": before(link, "_send_blob"),
    "before registration": before(LogStore, "register"),
    "during registration": _registering,
    "between registration and acknowledgement": after(LogStore, "register"),
    "before acknowledgement": before(Stream, "acknowledge"),
    "during acknowledgement": _unsent,
    "after acknowledgement": after(Stream, "acknowledge"),
}
DECODER: dict[str, Wrap] = {
    "before a batch is taken in": before(Decoder, "feed"),
    "after a batch is taken in": after(Decoder, "feed"),
    "during rotation": after(Decoder, "take_committed"),
    "during rotation of a part": after(Decoder, "take_open"),
    "before upload": before(staging, "store"),
    "during upload: not synced": before(os, "fsync"),
    "during upload: folder not synced": before(storage, "_sync"),
    "after upload": after(staging, "store"),
    "all uploaded, not reported": after(Staging, "write"),
    "before an answer": before(Connection, "send"),
}
PINS: dict[str, Wrap] = {
    "before the slot of a pin": before(pins, "create_slot"),
    "between slot and pin": before(Pins, "_pin"),
    "during the pin": before(taking, "plan_copy"),
    "between pin and holder": before(pins, "hold"),
    "after the pin": after(Pins, "_pin"),
}
POLLS: dict[str, Wrap] = {
    "noted, nothing read": after(Poller, "note"),
    "staged, not registered": after(Staging, "write_rows"),
    "before registration of a poll": before(LogStore, "register"),
    "registered, bounds not moved": before(Poller, "register"),
    "bounds moved, not committed": after(Poller, "register"),
    "registered and committed": before(Poller, "over"),
    "after a poll": after(Poller, "over"),
}
RELAY: dict[str, Wrap] = {
    "before a step": before(relaying, "pass_on"),
    "passed on, not flushed": before(LogStore, "advance"),
    "flushed, nothing ended": after(LogStore, "advance"),
    "flushed, not committed": after(passing, "_end_copies"),
    "a step is committed": after(relaying, "pass_on"),
    "before the group lets go": before(relaying, "let_go"),
    "the group has let go": after(relaying, "let_go"),
}


def arm(step: Wrap, passes: int) -> None:
    left = [passes]

    def passed() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    step(passed)


class _Popen(subprocess.Popen[bytes]):
    """Starts the decoder as this module."""

    def __init__(self, command: list[str], **options: Any) -> None:
        super().__init__([*command[:2], __spec__.name, *sys.argv[1:3], command[-1]], **options)


def run(arguments: list[str]) -> int:
    name, passes, *rest = arguments
    if rest[0] != "--config":
        arm(DECODER[name], int(passes))
        sys.argv = ["decoder", *rest]
        decoder_process.main()
        return 0
    if name in DECODER:
        ours = SimpleNamespace(
            Popen=_Popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        vars(link)["subprocess"] = ours
    else:
        arm({**RECEIVER, **PINS, **POLLS, **RELAY}[name], int(passes))
    receiver.BATCH_BYTES = 10_000  # ordinary transactions arrive in parts
    return main.main(rest)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
