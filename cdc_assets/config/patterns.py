"""Patterns of table names: ``public.*``, ``sales.order_*``, ``*.*``.

A part in quotes stands for itself; in one without, ``*`` is any text and ``?`` any character.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from cdc_assets.postgres.names import TableId

_PART = r'"(?:[^"]|"")+"|[\w$*?\u0080-\U0010ffff]+'
_PATTERN = re.compile(rf"\A(?:(?P<schema>{_PART})\.)?(?P<name>{_PART})\Z")


@dataclass(frozen=True, slots=True)
class TablePattern:
    """The names of tables that ``text`` stands for; without a schema it is of ``public``."""

    text: str
    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        match = _PATTERN.match(text.strip())
        if match is None:
            raise ValueError(f"{text!r} names no table; write public.orders, or public.* for all")
        return cls(text.strip(), match["schema"] or "public", match["name"])

    @property
    def is_name(self) -> bool:
        """Whether it stands for one table at most."""
        return not _is_wild(self.name) and self.only_schema is not None

    @property
    def only_schema(self) -> str | None:
        """The schema that its tables are of; None for several."""
        if _is_wild(self.schema):
            return None
        return _unquoted(self.schema) if self.schema[0] == '"' else self.schema.lower()

    def matches(self, table: TableId) -> bool:
        return _matches(self.schema, table.schema) and _matches(self.name, table.name)


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"')


def _is_wild(part: str) -> bool:
    return part[0] != '"' and bool(set("*?") & set(part))


def _matches(part: str, name: str) -> bool:
    if part.startswith('"'):
        return _unquoted(part) == name
    return fnmatchcase(name, part.lower().replace("[", "[[]"))


def matching(
    patterns: Iterable[TablePattern], tables: Sequence[TableId]
) -> tuple[list[TableId], list[str]]:
    """The tables that a pattern stands for, in their order; and the patterns of no table."""
    found, idle = set[TableId](), list[str]()
    for pattern in patterns:
        theirs = {table for table in tables if pattern.matches(table)}
        found |= theirs
        if not theirs:
            idle.append(pattern.text)
    return [table for table in tables if table in found], idle
