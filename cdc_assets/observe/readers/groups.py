"""Consumer groups that are behind: staged files wait for them, and nobody else may notice."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from cdc_assets.config.groups.consumers import ConsumerConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.observe.condition import COMMAND, Condition, Limits
from cdc_assets.observe.status import SourceStatus

_DEFAULT = ConsumerConfig(name="default")


def groups(status: SourceStatus | None, config: SourceConfig) -> Iterator[Condition]:
    """One that is behind by its ``warn``; one that is out of the configuration, by the default."""
    known = {group.name: group for group in config.consumers}
    for group in status.groups if status is not None else ():
        if group.lag_seconds is None:
            continue
        named = known.get(group.name, _DEFAULT)
        who = ", ".join(group.processes) or "no process reads for it"
        since = datetime.now(UTC) - timedelta(seconds=group.lag_seconds)
        left = "" if group.name in known else ", which is out of the configuration,"
        yield Condition(
            f"group:{group.name}",
            f"the consumer group {group.name}{left} is behind",
            f"{timedelta(seconds=round(group.lag_seconds))}, of {group.behind} most;"
            f" {group.pending_rows:,} changes wait for it, and {group.held_bytes / 1e6:,.1f} MB"
            f" staged are kept for it alone ({who})",
            "Start its program, or the flusher and the merges of its lake. If nobody needs it:"
            f" `{COMMAND} drop-group {group.name}`, and take it out of consumers:"
            " (docs/operate/consumers.md).",
            Limits(named.warn.total_seconds(), named.fail.total_seconds()),
            since,
        )
