"""The flusher as a child process of a command or of Dagster's code server.

``flusher.flusher`` is what the child runs; the callers decide whether one is wanted.
"""

from __future__ import annotations

from cdc_assets.config.source import SourceConfig
from cdc_assets.process.children import ChildSpec
from cdc_assets.process.home import home


def flusher_child(config: SourceConfig) -> ChildSpec:
    """The child that flushes this source; its configuration, secrets included, goes by the pipe."""
    return ChildSpec(
        "cdc_assets.flusher.flusher",
        log=home() / config.name / "flusher.log",
        settings=config.dump(),
    )
