"""Consumer groups: programs that read a source's log beside the lake, as the YAML names them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from cdc_assets.config.base import Duration, Section
from cdc_assets.config.patterns import TablePattern
from cdc_assets.postgres.names import TableId

# The name of the group that the lake is.
_TAKEN = "lake"


def _free(name: str) -> str:
    if name == _TAKEN:
        raise ValueError(f"{_TAKEN} is the group of the source's own lake; take another name")
    return name


GroupName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$"), AfterValidator(_free)]


class ConsumerConfig(Section):
    """A consumer group: processes that share the tables of one copy of the data."""

    name: GroupName
    """Of the group: what a program follows, or a second lake is, and ``drop-group`` drops."""
    tables: tuple[str, ...] = ()
    """Names and patterns of those of the source's tables that it reads; by default all."""
    start: Literal["snapshot", "now"] = "snapshot"
    """Whether it begins with the rows that the lake table has, or with what changes from now on."""
    warn: Duration = timedelta(hours=1)
    """How old a change that it hasn't read is let become before a warning is sent: staged files
    wait for it."""
    fail: Duration = timedelta(days=1)
    """After so long it is a failure."""

    @field_validator("tables")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(TablePattern.parse(text).text for text in value)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.warn > self.fail:
            raise ValueError("warn has to be at most fail")
        return self

    @cached_property
    def _patterns(self) -> tuple[TablePattern, ...]:
        return tuple(map(TablePattern.parse, self.tables))

    def reads(self, table: TableId) -> bool:
        """Whether the group reads a table of the source."""
        return not self._patterns or any(pattern.matches(table) for pattern in self._patterns)


def named_apart(value: Iterable[ConsumerConfig]) -> tuple[ConsumerConfig, ...]:
    """``value``; raises ValueError if two groups have one name."""
    groups = tuple(value)
    names = [group.name for group in groups]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)} stands twice; keep one")
    return groups
