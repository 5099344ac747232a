"""A second lake: a source whose log is another source's, read as one of its consumer groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from cdc_assets.config.base import Section
from cdc_assets.config.groups.consumers import GroupName

if TYPE_CHECKING:
    from cdc_assets.config.source import SourceConfig


class LogConfig(Section):
    """The log of another source of the same database: what it stages goes into this lake, too."""

    of: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    """The name of that source. Both have one coordination schema and one staging.uri."""
    group: GroupName
    """The consumer group there that this lake is: staged files wait for it."""


def refuse_beside_log(config: SourceConfig) -> None:
    """Raise ValueError for the first setting that a source with another's log can't have."""
    if config.log is not None:
        for wrong in _settings(config):
            raise ValueError(wrong)


def _settings(config: SourceConfig) -> Iterator[str]:
    assert config.log is not None
    of = config.log.of
    if of == config.name:
        yield "log.of: it is the source itself; give this one another name"
    if config.query is not None:
        yield f"query: with log: changes come from the log of {of}; remove one of them"
    if config.postgres.embedded:
        yield "postgres.embedded: with log: give the address of the database that the log is of"
    if config.postgres.standby or config.snapshot.from_ is not None:
        yield "postgres.standby and snapshot.from: with log: tables are copied from the primary"
    if config.slot not in ("", f"cdc_{config.name}"):  # what a parent hands down has the default
        yield f"slot: with log: there is none but that of {of}; remove it"
    if config.snapshot.mode != "initial":
        yield "snapshot.mode: with log: a second lake begins with a copy; take initial"
    for setting, given in (
        ("markers.table", config.markers.table),
        ("backfills.signals", config.backfills.signals),
        ("consumers", config.consumers),
    ):
        if given:
            yield f"{setting}: with log: it belongs into the configuration of {of}; move it there"
