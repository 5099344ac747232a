"""The configurations that this code location was built from, by source name.

A resource's configuration is shown in the UI and is copied whenever the resource is rebuilt, so a
resource only carries the source's name; the configuration, which may hold a secret, is looked up
here.
"""

from __future__ import annotations

from collections.abc import Mapping

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError

_configs: dict[str, SourceConfig] = {}


def remember(config: SourceConfig) -> None:
    """Make ``config`` known to the resources of this process; a newer one of that name wins."""
    _configs[config.name] = config


def sources() -> Mapping[str, SourceConfig]:
    """Those that this process has built definitions of, by name."""
    return _configs


def configuration(source: str) -> SourceConfig:
    """The configuration of ``source``; raises ConfigurationError if definitions lack it."""
    if source not in _configs:
        raise ConfigurationError(
            f"no definitions were built for a source named {source!r}.",
            "Add its folder with a defs.yaml below defs/, or correct the resource's source.",
        )
    return _configs[source]
