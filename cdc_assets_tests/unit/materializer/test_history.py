"""Invariant 8 in mode append: each change has its row's values, whatever was left out."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.materializer.actions.history import linked_values
from cdc_assets.materializer.fold import Event

KEYS = st.integers(1, 4)
ACTIONS = st.lists(
    st.tuples(st.sampled_from("IDUK"), KEYS, KEYS, st.booleans(), st.integers(0, 10**6)),
    max_size=30,
)
Row = dict[str, str | None]


@given(ACTIONS)
def test_invariant_8_every_change_is_followed_from_key_to_key(
    actions: list[tuple[str, int, int, bool, int]],
) -> None:
    lake: dict[str, Row] = {str(k): {"id": str(k), "doc": f"doc{k}"} for k in (1, 2)}
    rows = {key: dict(row) for key, row in lake.items()}
    events: list[Event] = []
    truth: list[Row] = []

    def change(op: str, row: Row, keep: bool, old: str | None = None) -> None:
        data = {name: value for name, value in row.items() if not keep or name == "id"}
        if keep and old is not None:
            data[""] = json.dumps({"id": old})
        events.append(Event(len(events), op, '["doc"]' if keep else None, json.dumps(data)))
        truth.append(dict(row))

    for kind, first, second, keep, number in actions:
        key, other = str(first), str(second)
        if kind == "I" and key not in rows:
            rows[key] = {"id": key, "doc": f"i{number}"}
            change("I", rows[key], keep=False)
        elif kind == "D" and key in rows:
            del rows[key]
            change("D", {"id": key}, keep=False)
        elif kind == "U" and key in rows:
            if not keep:
                rows[key]["doc"] = f"u{number}"
            change("U", rows[key], keep)
        elif kind == "K" and key in rows and other not in rows:
            row = rows.pop(key)
            change("D", {"id": key}, keep=False)
            rows[other] = {"id": other, "doc": row["doc"] if keep else f"k{number}"}
            change("U", rows[other], keep, key)

    found = {
        off: (lake[str(source[0])] if source is not None and "doc" not in values else {}) | values
        for off, values, source in linked_values(events, ["id"])
    }
    assert [found[off] for off in range(len(events))] == truth
