"""Rows of staged files as Python has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A staged row; ``data`` is the parsed object, its empty-named member parsed too."""

    oid: int
    op: str
    lsn: int
    commit_lsn: int
    at: datetime
    xid: int
    unchanged: tuple[str, ...] | None
    data: Mapping[str, Any]


def parse_staged(oid: int, rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows of a staged file as Python has them (``Table.to_pylist``)."""
    parsed = []
    for row in rows:
        data = json.loads(row["_data"])
        if "" in data:
            data[""] = json.loads(data[""])
        unchanged = row["_unchanged_cols"]
        parsed.append(
            Row(
                oid,
                row["_op"],
                row["_lsn"],
                row["_commit_lsn"],
                row["_ts"],
                row["_xid"],
                None if unchanged is None else tuple(json.loads(unchanged)),
                data,
            )
        )
    return parsed
