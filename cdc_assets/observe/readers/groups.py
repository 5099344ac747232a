"""Consumer groups that are behind: staged files wait for them, and nobody else may notice.

For a second lake they wait until its maintenance is through, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from cdc_assets.config.groups.consumers import ConsumerConfig
from cdc_assets.config.source import SourceConfig
from cdc_assets.observe.condition import COMMAND, Condition, Limits
from cdc_assets.observe.status import SourceStatus

_DEFAULT = ConsumerConfig(name="default")
# Tables at rest are cared for once a day; what isn't costs room, which may take long to be missed.
_UNCARED = Limits(2 * 86_400.0, 7 * 86_400.0)


def groups(status: SourceStatus | None, config: SourceConfig) -> Iterator[Condition]:
    """One that is behind by its ``warn``; one that is out of the configuration, by the default."""
    known = {group.name: group for group in config.consumers}
    for group in status.groups if status is not None else ():
        if group.uncared_seconds is not None:
            yield _uncared(group.name, group.uncared_seconds)
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


def _uncared(group: str, seconds: float) -> Condition:
    return Condition(
        f"group_care:{group}",
        f"the second lake of the consumer group {group} isn't maintained",
        f"for {timedelta(seconds=round(seconds))}; what is staged is kept until it is, though its"
        " lake has it",
        f"Look at its schedule of maintenance, or with its configuration: `{COMMAND} maintain`.",
        _UNCARED,
        datetime.now(UTC) - timedelta(seconds=seconds),
    )
