"""The flusher as a Dagster resource: a supervised child process of the code server.

Invariant: the child dies with the code server (its stdin ends), and a tick never waits for it. A
lock in Postgres decides which of several flushers is active: code servers overlap when they are
reloaded.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from cdc_assets.dagster.resources.sources import configuration
from cdc_assets.flusher.child import flusher_child
from cdc_assets.process import children as process


class FlusherResource(dg.ConfigurableResource[None]):
    """Keeps the flusher of one source running."""

    source: str

    @property
    def log_path(self) -> Path:
        return flusher_child(configuration(self.source)).log

    @property
    def _name(self) -> str:
        return f"flusher:{self.source}"

    def tick(self) -> process.Status:
        """Start it if it is down and its back-off is over; returns at once."""
        return process.supervise(self._name, flusher_child(configuration(self.source)))

    def stop(self) -> None:
        """Stop it in order, if this process started it."""
        process.stop(self._name)
