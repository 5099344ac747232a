"""A lake table's own record of its columns: the field that holds each column of the source.

The table is the truth, as for its cursor; the coordination schema only has a copy. A field is known
by its Iceberg id, a column by its attribute number, and a rename keeps both. So a writer that finds
a table altered half-way by a dead one sees the changes left to make, and the columns that somebody
else has renamed or dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cdc_assets.postgres.catalog import Column

PROPERTY = "cdc.columns"


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The source's columns and key as the lake table has them.

    ``fields``: the field id of every column that there ever was, by attribute number; empty while
    columns are matched by name. ``fill``: added columns whose value in older rows is still to be
    written: a text, or None where it has to be read from the source. ``altering``: a writer has
    begun to change the columns. ``since``: the sequence number of the snapshot that named the
    cursor when the columns were changed last; the rows of an older one don't match them.
    ``exclude`` and ``types`` are the configuration that the table was made with, None where an
    older version made it. ``unknown``: columns of a table without a key that were added, and
    dropped again before their values in older rows were read.
    """

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    fields: Mapping[int, int] = field(default_factory=dict)
    fill: Mapping[int, str | None] = field(default_factory=dict)
    altering: bool = False
    since: int = 0
    exclude: tuple[str, ...] | None = None
    types: Mapping[str, str] | None = None
    unknown: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        data: dict[str, Any] = json.loads(text)
        return cls(
            tuple(Column.from_json(column) for column in data["columns"]),
            tuple(data["key"]),
            {int(number): field_id for number, field_id in data.get("fields", {}).items()},
            {int(number): value for number, value in data.get("fill", {}).items()},
            data.get("altering", False),
            data.get("since", 0),
            tuple(data["exclude"]) if data.get("exclude") is not None else None,
            data.get("types"),
            tuple(data.get("unknown", ())),
        )

    def dump(self) -> str:
        return json.dumps(
            {
                "columns": [column.to_json() for column in self.columns],
                "key": list(self.key),
                "fields": dict(self.fields),
                "fill": dict(self.fill),
                "altering": self.altering,
                "since": self.since,
                "exclude": self.exclude,
                "types": dict(self.types) if self.types is not None else None,
                "unknown": self.unknown,
            },
            ensure_ascii=False,
        )
