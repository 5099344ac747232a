"""Whether a flusher is alive and ready, in words that name nothing of the source.

For whoever watches the process: it may ask without a secret. Nothing is asked of any database.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc_assets.config.source import SourceConfig
from cdc_assets.flusher.progress import Progress

# The loop goes round once a second. A turn of it may wait for a connection to be given up for dead.
STALLED_SECONDS = 120.0
# A report is written every two seconds, and may take five.
UNHEARD_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer: ``status`` is ok, or one word of what is wrong; ``reason`` says it in more."""

    status: str
    reason: str | None = None

    @property
    def is_well(self) -> bool:
        return self.reason is None


OK = Verdict("ok")


def live(progress: Progress, now: float) -> Verdict:
    """Not while the loop that receives, or waits for its turn, stands still (``now``: monotonic).

    A process that reconnects, or can't, is alive: to start it anew would mend nothing.
    """
    beat = progress.beat
    if beat is not None and now - beat > STALLED_SECONDS:
        return Verdict("stalled", f"the loop hasn't advanced for {now - beat:.0f} s")
    return OK


def ready(config: SourceConfig, progress: Progress, heard: float | None, now: float) -> Verdict:
    """Whether changes get into the log; ``heard``: when the last report did (monotonic)."""
    if not (alive := live(progress, now)).is_well or not config.streams:
        return alive
    if progress.waits:
        return Verdict("waiting", "another flusher streams")
    if progress.state != "streaming":
        return Verdict(progress.state, f"its state is: {progress.state}")
    if heard is None or now - heard > UNHEARD_SECONDS:
        return Verdict("log", f"no report got into the log for {UNHEARD_SECONDS:.0f} s")
    return OK
