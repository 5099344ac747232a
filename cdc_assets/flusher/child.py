"""The flusher as a child process of whoever wants one: a command, or Dagster's code server.

What it does as a child is in ``flusher.main``; whether one is wanted is decided elsewhere.
"""

from __future__ import annotations

from cdc_assets.config import SourceConfig, home
from cdc_assets.process import ChildSpec


def flusher_child(config: SourceConfig) -> ChildSpec:
    """The child that flushes this source; its configuration, secrets included, goes by the pipe."""
    return ChildSpec(
        "cdc_assets.flusher.main",
        log=home() / config.name / "flusher.log",
        settings=config.dump(),
    )
