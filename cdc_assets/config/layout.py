"""How rows may be laid out: partition transforms and orders as the configuration spells them.

Pure; ``lake.layout`` applies them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

PROPERTY = "cdc.layout"

_NAME = r"`(?:[^`]|``)+`|[^\s`(),]+"
_CALL = re.compile(
    rf"\A\s*(?P<function>\w+)\s*\(\s*(?:(?P<first>\d+)\s*,\s*)?(?P<column>{_NAME})"
    rf"(?:\s*,\s*(?P<second>\d+))?\s*\)\s*\Z"
)
_PLAIN = re.compile(rf"\A\s*(?P<column>{_NAME})\s*\Z")
_ORDER = re.compile(
    rf"\A\s*(?P<column>{_NAME})(?:\s+(?P<direction>asc|desc))?"
    r"(?:\s+nulls\s+(?P<nulls>first|last))?\s*\Z",
    re.IGNORECASE,
)
# From Spark's spellings of a transform to Iceberg's.
_TRANSFORMS = {
    **{f"{unit}{s}": unit for unit in ("year", "month", "day", "hour") for s in ("", "s")},
    "bucket": "bucket",
    "truncate": "truncate",
    "identity": "identity",
    "date": "day",
    "date_hour": "hour",
}
_SIZED = ("bucket", "truncate")


@dataclass(frozen=True, slots=True)
class Part:
    """A partition field: a transform, as Iceberg spells it, of a column."""

    column: str
    transform: str

    @property
    def sql(self) -> str:
        """As Spark SQL spells it."""
        name, _, size = self.transform.partition("[")
        if name == "identity":
            return _ticked(self.column)
        arguments = f"{size[:-1]}, " if size else ""
        return f"{name}({arguments}{_ticked(self.column)})"


@dataclass(frozen=True, slots=True)
class Order:
    """A column that rows are ordered by."""

    column: str
    descending: bool
    nulls_first: bool

    @property
    def sql(self) -> str:
        direction = "desc" if self.descending else "asc"
        return f"{_ticked(self.column)} {direction} nulls {'first' if self.nulls_first else 'last'}"


def parse_part(text: str) -> Part:
    """``day(created_at)``, ``bucket(16, id)``, ``region``. Raises ValueError."""
    if match := _PLAIN.match(text):
        return Part(_unquoted(match["column"]), "identity")
    match = _CALL.match(text)
    transform = _TRANSFORMS.get(match["function"].lower()) if match else None
    size = (match["first"] or match["second"]) if match else None
    if match is None or transform is None or (transform in _SIZED) != (size is not None):
        raise ValueError(
            f"{text!r} isn't a partition transform; write a column, year(c), month(c), day(c),"
            " hour(c), bucket(16, c) or truncate(4, c)"
        )
    return Part(_unquoted(match["column"]), f"{transform}[{size}]" if size else transform)


def parse_order(text: str) -> Order:
    """``created_at desc nulls last``, ``id``. Raises ValueError."""
    match = _ORDER.match(text)
    if match is None:
        raise ValueError(f"{text!r} isn't an order; write a column, and asc or desc after it")
    descending = (match["direction"] or "").lower() == "desc"
    nulls = (match["nulls"] or ("last" if descending else "first")).lower()
    return Order(_unquoted(match["column"]), descending, nulls == "first")


def described(partition_by: Sequence[str], sort_by: Sequence[str]) -> str:
    """The value of the table property PROPERTY for a table with this layout."""
    return json.dumps({"partition_by": list(partition_by), "sort_by": list(sort_by)})


def _unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def _ticked(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
