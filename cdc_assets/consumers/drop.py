"""Giving a consumer group up: what it held is removed by the next maintenance."""

from __future__ import annotations

from cdc_assets.errors import ConfigurationError
from cdc_assets.log.groups.cursors import drop
from cdc_assets.log.groups.standing import groups
from cdc_assets.log.tables import GROUP
from cdc_assets.log.verified import note_written
from cdc_assets.messages.texts import command
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId


def drop_group(pipeline: Pipeline, name: str, table: TableId | None = None) -> list[TableId]:
    """Forget where the group is, or only in one table; returns the tables.

    A group that is read again begins anew. Raises ConfigurationError if there is none, or if a
    process still reads for it, which would take everything up again.
    """
    store = pipeline.store
    known = {group.name: group for group in groups(store)}
    if (found := known.get(name)) is None and name == GROUP:
        raise ConfigurationError(
            f"{GROUP} is the lake itself.", f"Give the source up: {command('drop-source')}"
        )
    if found is not None and found.processes and table is None:
        raise ConfigurationError(
            f"the consumer group {name} is being read by {', '.join(found.processes)}.",
            "End that first; one that was killed is known to be dead after half a minute.",
        )
    dropped = drop(store, name, table)
    if not dropped:
        there = ", ".join(sorted(known)) or "none"
        raise ConfigurationError(
            f"source {store.source} has no consumer group {name} that holds anything"
            + (f" of {table}." if table is not None else "."),
            f"It has: {there}.",
        )
    for each in dropped:
        note_written(store, each)  # maintenance would leave a quiet table alone for a day
    return dropped
