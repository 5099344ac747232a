"""A diff as the command does it: both lakes are opened, and read by the Spark of the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cdc_assets.config.addresses import selected, services
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConfigurationError
from cdc_assets.marks.diff import sides
from cdc_assets.marks.diff.compare import Difference, compare
from cdc_assets.operations.running import Spark
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


@dataclass(frozen=True, slots=True)
class Diff:
    """What differs between two lakes at a mark."""

    mark: str
    lsn: Lsn
    tables: tuple[Difference, ...]

    @property
    def exit_code(self) -> int:
        """0 if all are equal, 2 if a table isn't tagged on a side, else 1 (without tables, too)."""
        outcomes = {found.outcome for found in self.tables}
        return 2 if "no mark" in outcomes else 0 if outcomes == {"equal"} else 1


def diff(
    blue: SourceConfig,
    green: SourceConfig,
    mark: str,
    names: Sequence[str],
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    show_keys: bool = False,
) -> Diff:
    """Compare the lakes of two configurations of one source: the tables of these names, or all.

    Raises ConfigurationError if they aren't two, or haven't the mark at one LSN.
    """
    if (blue.name, blue.state) == (green.name, green.state):
        raise ConfigurationError(
            f"both configurations are of one log of the source {blue.name}: there is one lake.",
            "Give the other one a name: of its own.",
        )
    with ExitStack() as stack:
        both = list[sides.Side]()
        for side, config in (("blue", blue), ("green", green)):
            stack.enter_context(services(config))
            both.append(stack.enter_context(sides.opened(side, config, mark)))
        lsn = sides.same_point(both[0], both[1])
        tables = sides.both(both[0], both[1], [_named(blue, green, name) for name in names])
        # A session has the catalog of one; the server is that of blue for both.
        here = green.model_copy(update={"spark": blue.spark})
        first, second = (
            stack.enter_context(stack.enter_context(Spark(config)).session())
            for config in (blue, here)
        )
        found = compare(both[0], both[1], (first, second), tables, on_progress, show_keys=show_keys)
        return Diff(mark, lsn, tuple(found))


def _named(blue: SourceConfig, green: SourceConfig, name: str) -> TableId:
    try:
        return selected(blue, [name])[0]
    except ConfigurationError:
        if name not in {table.name for table in green.tables}:
            raise
        return selected(green, [name])[0]
