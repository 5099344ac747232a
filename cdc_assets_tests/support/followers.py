"""A program that follows a group: it keeps each table's rows by key, in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cdc_assets.consumers import (
    Begin,
    Changes,
    Event,
    Schema,
    SnapshotEnd,
    SnapshotRows,
    Stream,
    Truncate,
    follow,
)
from cdc_assets.consumers.events import ROW_COLUMNS
from cdc_assets_tests.support.lake import Lake

Row = dict[str, Any]


@dataclass
class Replica:
    """Rows by table and key, and the tokens that go with them; ``seen``: events by their kind."""

    rows: dict[str, dict[str, Row]] = field(default_factory=dict)
    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    seen: list[Event] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        self.seen.append(event)
        if isinstance(event, Begin):
            self.rows[event.table] = {}
        if isinstance(event, Begin | Schema):
            self.keys[event.table] = event.key
            names = [name for name in event.schema.names if name not in ROW_COLUMNS]
            self.columns[event.table] = names
            for row in self.rows.setdefault(event.table, {}).values():
                row.update(dict.fromkeys(set(names) - row.keys()))
        if isinstance(event, Truncate):
            self.rows[event.table] = {}
        if isinstance(event, SnapshotRows | Changes):
            for row in event.rows.to_pylist():
                self._apply(event.table, row)
        self.tokens[event.table] = event.token

    def _apply(self, table: str, row: Row) -> None:
        rows, key = self.rows[table], self.keys[table]
        place = json.dumps([row[name] for name in key], default=str)
        before = place
        if row["_old_key"] is not None:
            before = json.dumps([row["_old_key"][name] for name in key], default=str)
        old = rows.pop(before, {})
        if row["_op"] != "D":
            left = set(row["_unchanged"] or ())
            names = self.columns[table]
            rows[place] = {name: old[name] if name in left else row[name] for name in names}

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.seen if isinstance(event, kind)]

    def equal(self, source: Lake, table: str, columns: str = "*") -> bool:
        names = self.columns[table] if columns == "*" else columns.split(", ")
        there = source.execute(f"select {', '.join(names)} from {table}")
        mine = [tuple(row[name] for name in names) for row in self.rows[table].values()]
        return sorted(mine, key=repr) == sorted(there, key=repr)


def read(
    source: Lake,
    replica: Replica,
    group: str = "search",
    *,
    on_event: Callable[[Stream, Event], None] = lambda _stream, event: event.commit(),
    **how: Any,
) -> Replica:
    """Apply what there is, committing each event."""
    with follow(source.config, group, **{"wait": False, **how}) as stream:
        for event in stream:
            replica.apply(event)
            on_event(stream, event)
    return replica


def ends(replica: Replica) -> int:
    """How many snapshots were read to their ends."""
    return len(replica.of(SnapshotEnd))
