"""Every staged change says which row it is of, or nothing of its table is staged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_assets.flusher.decode.attribute_numbers import key_of
from cdc_assets.flusher.decode.decoder import Decoder
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.waiting import decoded
from cdc_assets.postgres.catalog import Attribute
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation, RelationColumn
from cdc_assets_tests.support import pgoutput_reference as ref
from cdc_assets_tests.support.pgoutput_reference import UNCHANGED, Value
from cdc_assets_tests.support.staged_rows import Row, parse_staged

# Of tables with the same columns, so that they are decoded together.
ODD, GOOD = 1, 2


def staged(
    identity: str, key: Sequence[str], *messages: bytes, spec: DecodeSpec | None = None
) -> tuple[dict[str, list[Row]], dict[str, tuple[str, int, int]]]:
    """The staged rows of each table, and what was refused of it: why, LSN, commit LSN."""
    specs = {
        oid: spec
        or DecodeSpec(
            TableId("public", name), tuple(key), columns=((1, "id", 25, -1), (2, "v", 25, -1))
        )
        for oid, name in ((ODD, "odd"), (GOOD, "good"))
    }

    def as_sent(spec: DecodeSpec, relation: Relation) -> DecodeSpec:
        names, doubt = key_of(spec, relation, TURNED.attributes(), listed=False)
        return DecodeSpec(spec.table, names, doubt=doubt)

    ours = Decoder(specs.get, as_sent)
    flagged = ["id", "v"] if identity == "f" else key
    told = [ref.relation(oid, ["id", "v"], flagged, identity) for oid in specs]
    frames = [
        ref.xlog(100, ref.begin(900, 0, 7)),
        *(ref.xlog(101 + i, message) for i, message in enumerate((*told, *messages))),
        ref.xlog(908, ref.commit(900, 908, 0)),
    ]
    ours.feed(b"".join(frames), np.array([len(f) for f in frames], np.int32))
    taken = ours.take_committed()
    rows: dict[str, list[Row]] = {"odd": [], "good": []}
    for number, table in decoded(taken):
        name = taken[number].spec.table.name
        rows["good" if taken[number].relation.oid == GOOD else name] += parse_staged(
            taken[number].relation.oid, table.to_pylist()
        )
    refused = {
        p.spec.table.name: (p.unusable.why, p.unusable.lsn, p.unusable.commit_lsn)
        for p in taken
        if p.unusable is not None
    }
    return rows, refused


NO_KEY = "doesn't say the value of its key (id)"
PARTLY = "doesn't say all of the old row, and the table has no key"


@pytest.mark.parametrize(
    ("identity", "key", "odd", "why"),
    [
        # A partition with an identity of its own sends the key's columns as NULL …
        ("d", ["id"], ref.delete(ODD, [None, "x"]), NO_KEY),
        ("d", ["id"], ref.update(ODD, ["1", "y"], [None, "x"]), NO_KEY),
        # … and one whose root has FULL sends its own key alone.
        ("f", ["v"], ref.delete(ODD, ["1", None]), "doesn't say the value of its key (v)"),
        ("f", [], ref.delete(ODD, ["1", None]), PARTLY),
        ("f", [], ref.update(ODD, ["1", "y"]), PARTLY),
        ("d", ["id"], ref.insert(ODD, [None, "x"]), NO_KEY),
        ("f", ["id"], ref.insert(ODD, [None, "x"]), NO_KEY),
        ("d", ["id"], ref.update(ODD, [UNCHANGED, "x"]), NO_KEY),
    ],
)
def test_a_change_of_no_row_is_refused_and_others_are_staged(
    identity: str, key: list[str], odd: bytes, why: str
) -> None:
    fine = ref.insert(GOOD, ["1", "x"])
    rows, refused = staged(identity, key, fine, odd, fine)
    assert refused == {"odd": (why, 104, 900)}
    assert rows["odd"] == []
    assert [row.data for row in rows["good"]] == [{"id": "1", "v": "x"}] * 2


@pytest.mark.parametrize(
    ("identity", "key", "odd"),
    [
        ("d", ["id"], ref.delete(ODD, ["1", None])),
        ("d", ["id"], ref.update(ODD, [UNCHANGED, "y"], ["1", None])),  # a key kept out of line
        ("f", [], ref.delete(ODD, [None, "x"], b"O")),
        ("f", [], ref.update(ODD, [None, "x"], [None, None], b"O")),
        ("f", ["id"], ref.delete(ODD, ["1", None])),  # a partition that has the key alone
        ("d", [], ref.insert(ODD, [None, "x"])),
    ],
)
def test_what_says_its_row_is_staged(identity: str, key: list[str], odd: bytes) -> None:
    rows, refused = staged(identity, key, odd)
    assert refused == {}
    assert len(rows["odd"]) in (1, 2)


# --- FULL: which columns are the key isn't said, and a name may have become another column's ---


class Catalog:
    """A table whose columns are all of one type; None: dropped."""

    def __init__(self, *names: str | None) -> None:
        self.names = names

    def live(self) -> list[tuple[int, str]]:
        return [(i, name) for i, name in enumerate(self.names, 1) if name is not None]

    def relation(self) -> Relation:
        columns = tuple(RelationColumn(name, 25, -1, True) for _, name in self.live())
        return Relation(1, "public", "t", "f", columns)

    def attributes(self) -> list[Attribute]:
        return [
            Attribute(i, name or "........", name is None, 25 if name else 0, -1, "", False, None)
            for i, name in enumerate(self.names, 1)
        ]

    def spec(self, *key: str) -> DecodeSpec:
        columns = tuple((i, name, 25, -1) for i, name in self.live())
        return DecodeSpec(TableId("public", "odd"), key, columns=columns)


BEFORE, TURNED = Catalog("v", "id"), Catalog("id", "v")
"""Their names were swapped: the key is what is called ``v`` now."""


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (ref.delete(ODD, ["a", "1"], b"O"), [("D", {"v": "1"})]),
        (ref.update(ODD, ["b", "1"], ["a", "1"], b"O"), [("U", {"id": "b", "v": "1"})]),
        (
            ref.update(ODD, ["a", "2"], ["a", "1"], b"O"),
            [("D", {"v": "1"}), ("U", {"id": "a", "v": "2"})],
        ),
    ],
)
def test_the_key_is_the_column_that_it_was_whatever_it_is_called(
    message: bytes, wanted: list[tuple[str, dict[str, Value]]]
) -> None:
    rows, refused = staged("f", [], message, spec=BEFORE.spec("id"))
    assert refused == {}
    assert [(row.op, row.data) for row in rows["odd"]] == wanted


@pytest.mark.parametrize(
    ("then", "now", "key", "doubt"),
    [
        (Catalog("id_old", "id", "v"), None, ("id_old",), False),
        (Catalog("id_old", "id", "v"), Catalog("a", "b", "c"), ("id_old",), False),
        (Catalog("k", "id", None), Catalog(None, "id", None), (), True),  # one of three, or two
        (Catalog(None, "id", "v"), None, (), False),  # the key is gone
        (Catalog("x", "y"), Catalog(), (), True),
    ],
)
def test_the_key_of_a_relation(
    then: Catalog, now: Catalog | None, key: tuple[str, ...], doubt: bool
) -> None:
    spec = Catalog("id", "new_id", "v").spec("id")
    found, why = key_of(spec, then.relation(), (now or then).attributes(), listed=False)
    assert (found, bool(why)) == (key, doubt)


@st.composite
def histories(draw: st.DrawFn) -> list[Catalog]:
    names: list[str | None] = ["a", "b", "c"]
    states = [Catalog(*names)]
    for _ in range(draw(st.integers(0, 6))):
        live = [i for i, name in enumerate(names) if name is not None]
        what = draw(st.sampled_from(("add", "drop", "rename", "swap")))
        free = draw(st.sampled_from([n for n in "abcdefghij" if n not in names]))
        at = draw(st.sampled_from(live))
        if what == "add":
            names.append(free)
        elif what == "drop" and len(live) > 1:
            names[at] = None
        elif what == "rename":
            names[at] = free
        elif what == "swap":
            other = draw(st.sampled_from(live))
            names[at], names[other] = names[other], names[at]
        states.append(Catalog(*names))
    return states


@settings(max_examples=500, deadline=None)
@given(histories(), st.data())
def test_the_key_is_found_or_doubted(states: list[Catalog], data: st.DataObject) -> None:
    """The plain answer is known here: an attribute is the same one whatever it is called."""
    known = data.draw(st.integers(0, len(states) - 1))
    at = data.draw(st.integers(known, len(states) - 1))
    number, name = data.draw(st.sampled_from(states[known].live()))
    then, now = states[at], states[-1]
    found, doubt = key_of(states[known].spec(name), then.relation(), now.attributes(), listed=False)
    told = [name for _, name in then.live()]
    for other in (states[known], now):
        if [name for _, name in other.live()] == told and other.live() != then.live():
            return  # it looks the same and is another one: nobody can tell
    right = tuple(name for i, name in then.live() if i == number)
    assert doubt or found == right
    if at == len(states) - 1 or None not in now.names:
        assert not doubt
