"""Which tables a group reads, by the configuration and as they come."""

from __future__ import annotations

from cdc_assets.config.groups.consumers import ConsumerConfig
from cdc_assets.config.patterns import TablePattern, matching
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.names import TableId
from cdc_assets.setup.discovery import discovered


def group_of(config: SourceConfig, name: str) -> ConsumerConfig:
    """The configured group; raises ConfigurationError if there is none of that name."""
    for group in config.consumers:
        if group.name == name:
            return group
    known = ", ".join(sorted(group.name for group in config.consumers)) or "none"
    raise ConfigurationError(
        f"source {config.name} has no consumer group {name}.",
        f"Add it: consumers: [{{name: {name}}}]. It has: {known}.",
    )


def newcomers(config: SourceConfig, group: ConsumerConfig, store: LogStore) -> frozenset[TableId]:
    """Tables of the log that the group would read, and the configuration doesn't have.

    One that the source, or the configuration, has no more stays one of them.
    """
    if not config.patterns:
        return frozenset()
    known = {table.id for table in config.tables}
    new = (row.table for row in store.tables() if row.oid and row.table not in known)
    return frozenset(filter(group.reads, new))


def following(written: SourceConfig, group: ConsumerConfig) -> SourceConfig:
    """The configuration with the tables that its patterns stand for: the source is asked.

    Raises ConfigurationError if the group names a table that isn't the source's.
    """
    found = discovered(written)
    patterns = [TablePattern.parse(text) for text in group.tables]
    names = [table.id for table in found.tables]
    _, idle = matching([pattern for pattern in patterns if pattern.is_name], names)
    if idle:
        raise ConfigurationError(
            f"consumers: {group.name} reads {idle[0]}, which is no table of source {found.name}.",
            "Add it under tables:, or correct the name.",
        )
    return found


def wanted(config: SourceConfig, group: ConsumerConfig) -> list[TableId]:
    """The tables that the group reads."""
    return [table.id for table in config.tables if group.reads(table.id)]
