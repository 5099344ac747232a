"""Invariant 8: rows are followed from key to key, column by column; nothing is invented."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain, pairwise

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdc_assets.config.sections import S3Config
from cdc_assets.log.batch import Facts, Window, _relinked
from cdc_assets.log.staged.storage import Storage
from cdc_assets.materializer.events import Batch
from cdc_assets.materializer.fold import Event, Folded, fold_relinked
from cdc_assets.materializer.winners import winners
from cdc_assets.postgres.lsn import Lsn

_Action = tuple[str, int, int, bool, int]
KEYS = st.integers(1, 5)
ACTIONS = st.lists(
    st.tuples(st.sampled_from("IDUKt"), KEYS, KEYS, st.booleans(), st.integers(0, 10**6)),
    max_size=40,
)


MOVES = st.lists(
    st.tuples(st.sampled_from("SSSKUD"), st.just(1), st.integers(2, 3), st.just(True), st.just(0)),
    max_size=8,
)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _simulate(
    actions: list[_Action],
) -> tuple[dict[str, dict[str, str | None]], dict[str, dict[str, str | None]], list[Event]]:
    """A table before and after ``actions``, and the events the decoder stages for them."""
    before: dict[str, dict[str, str | None]] = {
        str(k): {"id": str(k), "v": f"v{k}", "doc": f"doc{k}"} for k in (1, 2, 3)
    }
    rows: dict[str, dict[str, str | None]] = {k: dict(v) for k, v in before.items()}
    events: list[Event] = []

    def stage(op: str, unchanged: str | None, data: dict[str, str | None]) -> None:
        events.append(Event(len(events), op, unchanged, _json(data)))

    for kind, first, second, keep, number in chain.from_iterable(map(_steps, actions)):
        key, other = str(first), str(second)
        if kind == "I" and key not in rows:
            rows[key] = {"id": key, "v": f"i{number}", "doc": None if keep else f"d{number}"}
            stage("I", None, dict(rows[key]))
        elif kind == "D" and key in rows:
            del rows[key]
            stage("D", None, {"id": key})
        elif kind in "Ut" and key in rows:
            rows[key]["v"] = f"u{number}"
            data = dict(rows[key])
            if keep:
                del data["doc"]
            else:
                data["doc"] = rows[key]["doc"] = f"n{number}"
            stage("U", '["doc"]' if keep else None, data)
        elif kind == "K" and key in rows and other not in rows:
            row = rows.pop(key)
            rows[other] = row | {"id": other, "v": f"k{number}"}
            stage("D", None, {"id": key})
            data = dict(rows[other])
            if keep:
                del data["doc"]
                data[""] = _json({"id": key})
            stage("U", '["doc"]' if keep else None, data)
    return {k: dict(v) for k, v in before.items()}, rows, events


def _steps(action: _Action) -> list[_Action]:
    """S: two rows exchange their keys."""
    kind, first, second, keep, number = action
    if kind != "S":
        return [action]
    steps = [(first, 0), (second, first), (0, second)]
    return [("K", one, to, keep, number) for one, to in steps]


def _apply(
    before: dict[str, dict[str, str | None]], folded: list[Folded]
) -> dict[str, dict[str, str | None]]:
    after = dict(before)
    for change in folded:
        after.pop(str(change.key[0]), None)
    for change in folded:
        if change.op == "U":
            source = {} if change.source is None else before[str(change.source[0])]
            after[str(change.key[0])] = source | change.values
    return after


@given(ACTIONS)
def test_invariant_8_folding_and_applying_gives_the_table_that_the_source_has(
    actions: list[_Action],
) -> None:
    before, after, events = _simulate(actions)
    assert _apply(before, fold_relinked(events, ["id"])) == after


def test_invariant_8_two_rows_that_swap_their_keys_keep_their_documents() -> None:
    before, after, events = _simulate(
        [("K", 1, 4, True, 0), ("K", 2, 1, True, 1), ("K", 4, 2, True, 2)]
    )
    folded = fold_relinked(events, ["id"])
    assert _apply(before, folded) == after
    assert after["1"]["doc"] == "doc2"
    assert after["2"]["doc"] == "doc1"


@settings(max_examples=300)
@given(MOVES, st.data())
def test_invariant_8_rows_of_several_moments_end_as_the_source_has_them(
    actions: list[_Action], data: st.DataObject
) -> None:
    """What was read late is of one moment a key; what is read again, of any from then on."""
    events = _simulate(actions)[2]
    moments = [(rows, len(log)) for _, rows, log in map(_simulate, _prefixes(actions))]
    late = st.integers(0, len(actions))
    read = {str(key): data.draw(late) for key in range(1, 6)}
    lake = {key: moments[at][0][key] for key, at in read.items() if key in moments[at][0]}
    whole_from = max(moments[at][1] for at in read.values())
    ends = sorted({len(actions), *data.draw(st.lists(late, max_size=3))})
    for first, end in pairwise([0, *ends]):
        batch = events[moments[first][1] : moments[end][1]]
        mixed, before = moments[first][1] < whole_from, dict(lake)
        for change in fold_relinked(batch, ["id"]):
            key, source = str(change.key[0]), change.source and str(change.source[0])
            lake.pop(key, None)
            if change.op == "D":
                continue
            if source is None or "doc" in change.values:
                lake[key] = change.values
            elif source in before and not (mixed and change.moved):
                lake[key] = before[source] | change.values
            else:
                rows, reached = moments[data.draw(st.integers(end, len(actions)))]
                whole_from = max(whole_from, reached)
                lake |= {key: rows[key]} if key in rows else {}
    assert lake == moments[-1][0]


def _prefixes(actions: list[_Action]) -> list[list[_Action]]:
    return [actions[:end] for end in range(len(actions) + 1)]


@dataclass(frozen=True)
class Held(Batch):
    """A batch of events that are here."""

    events: tuple[Event, ...] = ()

    def rows(self, most_bytes: int) -> pa.Table:
        assert most_bytes
        names = {"off": pa.int64(), "op": pa.string(), "unchanged": pa.string()}
        types = pa.schema(names | {"data": pa.large_string()})
        rows = [{name: getattr(event, name) for name in types.names} for event in self.events]
        return pa.Table.from_pylist(rows, types)


@given(ACTIONS)
@example([("U", 1, 1, False, 7), ("K", 1, 4, True, 8)])
@example([("K", 1, 4, True, 0), ("U", 2, 2, True, 1)])  # beside a change of a key, one of none
def test_invariant_8_what_a_batch_leaves_found_without_spark_gives_it_too(
    actions: list[_Action],
) -> None:
    before, rows, events = _simulate(actions)
    left_out = [event.data for event in events if event.unchanged is not None]
    unchanged = frozenset(["doc"] if left_out else [])
    linked = pa.chunked_array([[text for text in left_out if '"":' in text]], pa.string())
    facts = Facts(
        len(events), len(events), None, None, unchanged, frozenset(_relinked(linked, ["id"]))
    )
    batch = Held((), Window(0, Lsn.ZERO), Storage.of(S3Config()), tuple(events))
    won = winners(batch, facts, ["id"], ["id", "v", "doc"])
    assert won is not None
    after, deleted = dict(before), 0
    for key in won.keys["key"].to_pylist():
        after.pop(key["id"], None)
        deleted += key["id"] not in rows
    for row in won.rows["row"].to_pylist():
        after[row["id"]] = row
    for one in won.partial.to_pylist():
        old = before[one["source"]["id"]]
        assert one["row"]["id"] == one["key"]["id"]
        after[one["key"]["id"]] = one["row"] | {name: old[name] for name in one["unknown"]}
    assert (after, won.deleted) == (rows, deleted)
