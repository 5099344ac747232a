"""A table of a source as the log knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc_assets.errors import CoordinationError
from cdc_assets.log.states import LOGGED, TableState
from cdc_assets.messages.texts import command
from cdc_assets.postgres.catalog import Column, parse_columns
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.row_filters import same_text


@dataclass(frozen=True, slots=True)
class TableRow:
    """A replicated table as the coordination schema knows it."""

    table: TableId
    oid: int
    epoch: int
    state: TableState
    key_columns: tuple[str, ...]
    columns: tuple[Column, ...]
    snapshot_lsn: Lsn | None
    complete_lsn: Lsn | None
    pin: str | None
    reason: str | None
    excluded: frozenset[str] = frozenset()
    followed: bool = False
    published_as: str | None = None
    mode: str = "mirror"
    excluded_numbers: frozenset[int] = frozenset()
    inserts_only: bool = False
    """Its changes come through the publication of inserts."""
    left_out: tuple[str, ...] = ()
    """Generated columns that Postgres doesn't send."""
    text_numbers: frozenset[int] = frozenset()
    """Attribute numbers of key columns that are text in the lake: no other type holds them."""
    masks: Mapping[str, str] = field(default_factory=dict)
    """The rules of masked columns (``Mask.rule``), by name as configured."""
    mask_numbers: Mapping[int, str] = field(default_factory=dict)
    """The same by attribute number, which survives a rename, as far as known."""
    mask_wish: Mapping[str, str] | None = None
    """The rules of whoever asked for the next copy, if anybody did."""
    filter_wanted: str | None = None
    """Which of its rows are replicated, as configured when it was described; None: all."""
    row_filter: str | None = None
    """The same as Postgres writes it (``postgres.publication.row_filters``), since its pin."""
    filter_wish: str | None = None
    """The filter of whoever asked for the next copy, if ``mask_wish`` is there."""
    log_from: Lsn | None = None
    """While it waits: the LSN from which on commits are in its log, whole; None: not known yet."""

    @property
    def as_wished(self) -> bool:
        """Whether it is described with the masks and filter that its copy was asked for with."""
        return self.mask_wish is None or (
            self.mask_wish == self.masks and same_text(self.filter_wish, self.filter_wanted)
        )

    def mask_rule(self, column: Column) -> str | None:
        """The rule of a column's mask, None if it isn't masked."""
        return self.mask_numbers.get(column.number) or self.masks.get(column.name)

    @property
    def followed_since(self) -> Lsn | None:
        """The LSN from which its log has no gap; None if no log of it is needed."""
        return self.snapshot_lsn if self.state in LOGGED else None


def table_row(row: dict[str, Any]) -> TableRow:
    """A row whose columns are named like the fields of TableRow."""
    parsed: dict[str, Any] = {
        "table": TableId.parse(row["table"]),
        "state": TableState(row["state"]),
        "columns": _columns(row["table"], row["columns"]),
        **{name: _lsn(row[name]) for name in ("snapshot_lsn", "complete_lsn", "log_from")},
        **{name: tuple(row[name]) for name in ("key_columns", "left_out")},
        **{name: frozenset(row[name]) for name in ("excluded", "excluded_numbers", "text_numbers")},
        "mask_numbers": {int(number): rule for number, rule in row["mask_numbers"].items()},
    }
    return TableRow(**row | parsed)


def _columns(table: str, found: str) -> tuple[Column, ...]:
    try:
        return parse_columns(found)
    except (KeyError, TypeError, ValueError) as error:
        raise CoordinationError(
            f"what the coordination schema says of the columns of {table} can't be read"
            f" ({type(error).__name__}).",
            "Somebody wrote into its table tables: set columns to '[]' there, and then:"
            f" {command('resync', table)}",
        ) from error


def _lsn(value: object) -> Lsn | None:
    return None if value is None else Lsn.parse(str(value))
