"""The columnar decoder against the plain one: every stream, cut anywhere, gives the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.decode import changes
from cdc_assets.flusher.decode import decoder as decoder_module
from cdc_assets.flusher.decode import rows as staged_rows
from cdc_assets.flusher.decode.decoder import Decoder
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.waiting import Pending, decoded
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support import pgoutput_reference as ref
from cdc_assets_tests.support.pgoutput_reference import UNCHANGED, Reference, Spec, Value
from cdc_assets_tests.support.staged_rows import Row, parse_staged

KEYED, COMPOSITE, KEYLESS, FULL, UNKNOWN = 16401, 16402, 70_000, 3_000_000_000, 99
SPECS = {
    KEYED: Spec(("id",)),
    COMPOSITE: Spec(("id", 'b"\\\n'), frozenset({"x"})),
    KEYLESS: Spec(()),
    FULL: Spec(("id",)),
}
COLUMNS = ["id", 'b"\\\n', "é", "x"]


def decoder(specs: Mapping[int, Spec] = SPECS) -> Decoder:
    made = {
        oid: DecodeSpec(TableId("public", f"t{oid}"), spec.key_columns, spec.excluded)
        for oid, spec in specs.items()
    }
    return Decoder(made.get)


def feed(target: Decoder, frames: Sequence[bytes]) -> None:
    target.feed(b"".join(frames), np.array([len(f) for f in frames], np.int32))


def rows_of(taken: Iterable[Pending]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    pendings = list(taken)
    parts: list[list[Row]] = [[] for _ in pendings]
    for number, table in decoded(pendings):
        table.validate(full=True)
        oid = pendings[number].relation.oid
        parts[number] += parse_staged(oid, table.to_pylist())
    for pending, rows in zip(pendings, parts, strict=True):
        found.setdefault(pending.relation.oid, []).extend(rows)
    return found


def by_table(rows: Iterable[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row.oid, []).append(row)
    return found


# Everything JSON has to escape, everything UTF-8 has, and what SQL_ASCII databases may send.
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", '"', "\\", "\\n", 'a"b', "\x01\x1f", "\x7f", "🎉é", "{}", "null", "a" * 300]
    ),
    st.binary(max_size=6),
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Frames of whole transactions (the last may be open), several relations, columns changing."""
    width = draw(st.integers(1, 4))
    columns = {oid: COLUMNS[:width] if oid != COMPOSITE else COLUMNS for oid in [*SPECS, UNKNOWN]}
    told: set[int] = set()
    frames, lsn = list[bytes](), 1000

    def value(nullable: bool = True, unchanged: bool = False) -> Value:
        kinds: list[st.SearchStrategy[Value]] = [texts]
        kinds += [st.none()] if nullable else []
        kinds += [st.just(UNCHANGED)] if unchanged else []
        return draw(st.one_of(kinds))

    def tuple_of(oid: int, unchanged: bool = False) -> list[Value]:
        key = SPECS[oid].key_columns if oid in SPECS else ()
        return [value(c not in key, unchanged and c not in key) for c in columns[oid]]

    for number in range(draw(st.integers(1, 5))):
        commit_lsn, at = lsn + 500, lsn * 1000
        frames.append(ref.xlog(lsn, ref.begin(commit_lsn, at, number + 5)))
        for _ in range(draw(st.integers(0, 8))):
            oid = draw(st.sampled_from([*SPECS, UNKNOWN]))
            kind = draw(st.sampled_from("IIUUUDDTRMk"))
            lsn += draw(st.integers(0, 3))
            if kind == "k":
                frames.append(ref.keepalive(lsn))
                continue
            if kind == "M":
                frames.append(ref.xlog(lsn, b"M" + bytes(14)))
                continue
            if kind == "R" and oid != COMPOSITE:  # the columns change
                columns[oid] = COLUMNS[: draw(st.integers(1, 4))]
                told.discard(oid)
            if oid not in told or kind == "R":
                told.add(oid)
                key = SPECS[oid].key_columns if oid in SPECS else ()
                identity = "f" if oid in (FULL, KEYLESS) else "d"
                frames.append(ref.xlog(0, ref.relation(oid, columns[oid], key, identity)))
            key = SPECS[oid].key_columns if oid in SPECS else ()
            full = oid in (FULL, KEYLESS)
            old = tuple_of(oid)
            if not full:
                old = [v if c in key else None for c, v in zip(columns[oid], old, strict=True)]
            if kind == "I":
                message = ref.insert(oid, tuple_of(oid))
            elif kind == "D":
                message = ref.delete(oid, old, b"O" if full else b"K")
            elif kind == "T":
                others = draw(st.lists(st.sampled_from(sorted(told)), max_size=2, unique=True))
                message = ref.truncate(oid, *[o for o in others if o != oid])
            elif kind == "U":
                new = tuple_of(oid, unchanged=True)
                if full:  # an unchanged value is never null, and OLD has it
                    new = [
                        None if n is UNCHANGED and o is None else n
                        for n, o in zip(new, old, strict=True)
                    ]
                if full or draw(st.booleans()):
                    if draw(st.booleans()):
                        new = [
                            n if n is UNCHANGED or c not in key else o
                            for n, o, c in zip(new, old, columns[oid], strict=True)
                        ]
                    message = ref.update(oid, new, old, b"O" if full else b"K")
                else:
                    message = ref.update(oid, new)
            else:
                continue
            frames.append(ref.xlog(lsn, message))
        if number == 4 and draw(st.booleans()):
            break
        frames.append(ref.xlog(commit_lsn + 8, ref.commit(commit_lsn, commit_lsn + 8, at)))
        lsn = commit_lsn + 8
        if draw(st.booleans()):
            lsn += 8
            frames.append(ref.keepalive(lsn))
    return frames


@settings(max_examples=400, deadline=None)
@given(streams(), st.data())
def test_equals_the_plain_decoder(frames: list[bytes], data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        most = data.draw(st.sampled_from([0, 60, 200, decoder_module.DIVIDED_BYTES]))
        patch.setattr(decoder_module, "DIVIDED_BYTES", most)
        compare(frames, data)


def compare(frames: list[bytes], data: st.DataObject) -> None:
    plain, ours = Reference(SPECS), decoder()
    found: dict[int, list[Row]] = {}
    cuts = sorted(data.draw(st.lists(st.integers(0, len(frames)), max_size=4)))
    for low, high in zip([0, *cuts], [*cuts, len(frames)], strict=True):
        for frame in frames[low:high]:
            plain.feed(frame)
        feed(ours, frames[low:high])
        assert ours.position == plain.position
        assert ours.in_transaction == (plain.transaction is not None)
        if data.draw(st.booleans()):
            for oid, rows in rows_of(ours.take_committed()).items():
                found.setdefault(oid, []).extend(rows)
    for oid, rows in rows_of(ours.take_committed()).items():
        found.setdefault(oid, []).extend(rows)
    assert found == by_table(plain.rows)
    assert ours.committed_bytes == 0
    assert rows_of(ours.take_open()) == by_table(plain.transaction or [])


def test_what_committed_stays_before_what_was_divided_while_it_was_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decoder_module, "DIVIDED_BYTES", 0)
    relation = ref.xlog(0, ref.relation(KEYED, ["id"], ("id",), "d"))
    frames = [
        *(ref.xlog(100, ref.begin(200, 0, 1)), relation),
        *(ref.xlog(101, ref.insert(KEYED, [b"1"])), ref.xlog(208, ref.commit(200, 208, 0))),
        *(ref.xlog(300, ref.begin(400, 0, 2)), ref.xlog(301, ref.insert(KEYED, [b"2"]))),
        ref.xlog(302, ref.insert(KEYED, [b"3"])),
        ref.xlog(408, ref.commit(400, 408, 0)),
    ]
    ours = decoder()
    for low, high in ((0, 6), (6, 7), (7, 8)):
        feed(ours, frames[low:high])
    assert [row.data["id"] for row in rows_of(ours.take_committed())[KEYED]] == ["1", "2", "3"]


def one_transaction(*messages: bytes) -> list[bytes]:
    return [
        ref.xlog(100, ref.begin(900, 0, 7)),
        *[ref.xlog(101 + i, message) for i, message in enumerate(messages)],
        ref.xlog(908, ref.commit(900, 908, 0)),
    ]


def staged(specs: Mapping[int, Spec], *messages: bytes) -> list[Row]:
    ours = decoder(specs)
    feed(ours, one_transaction(*messages))
    return [row for rows in rows_of(ours.take_committed()).values() for row in rows]


def test_key_change_with_an_unchanged_column_carries_the_old_key() -> None:
    rows = staged(
        {1: Spec(("id",))},
        ref.relation(1, ["id", "v", "doc"], ["id"]),
        ref.update(1, ["2", "x", UNCHANGED], ['1"', None, None]),
    )
    assert [(r.op, r.data, r.unchanged) for r in rows] == [
        ("D", {"id": '1"'}, None),
        ("U", {"id": "2", "v": "x", "": {"id": '1"'}}, ("doc",)),
    ]


def test_every_control_character_and_empty_is_not_null() -> None:
    every = "".join(map(chr, range(1, 128)))
    rows = staged(
        {1: Spec(("id",))},
        ref.relation(1, ["id", "a"], ["id"]),
        ref.insert(1, [every, ""]),
        ref.insert(1, ["", None]),
    )
    assert [r.data for r in rows] == [{"id": every, "a": ""}, {"id": "", "a": None}]


def test_bytes_that_are_no_text_are_replaced_and_counted() -> None:
    ours = decoder({1: Spec(())})
    feed(
        ours,
        one_transaction(
            ref.relation(1, ["a"]), ref.insert(1, [b"\xff\xfe\xc3"]), ref.insert(1, ["fine"])
        ),
    )
    ((_, table),) = decoded(ours.take_committed())
    assert [json.loads(d) for d in table["_data"].to_pylist()] == [{"a": "���"}, {"a": "fine"}]
    assert staged_rows.invalid_text(table) == 1


def test_a_thousand_columns_and_no_columns() -> None:
    names = [f"c{i}" for i in range(1000)]
    values: list[Value] = [str(i) if i % 3 else None for i in range(1000)]
    rows = staged(
        {1: Spec(("c1",)), 2: Spec(())},
        ref.relation(1, names, ["c1"]),
        ref.relation(2, []),
        *[ref.insert(1, values)] * 700,
        ref.insert(2, []),
    )
    assert len(rows) == 701
    assert all(row.data == dict(zip(names, values, strict=True)) for row in rows[:700])
    assert rows[700].data == {}


def test_a_value_of_100_megabytes() -> None:
    big = '"' * 1000 + "x" * 100_000_000
    rows = staged(
        {1: Spec(("id",))},
        ref.relation(1, ["id", "v"], ["id"]),
        ref.insert(1, ["1", "a"]),
        ref.insert(1, ["2", big]),
        ref.insert(1, ["3", "b"]),
    )
    assert [r.data["id"] for r in rows] == ["1", "2", "3"]
    assert rows[1].data["v"] == big


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CELLS_PER_BATCH", 20)
    ours = decoder({1: Spec(("id",))})
    feed(
        ours,
        one_transaction(
            ref.relation(1, ["id", "v"], ["id"]), *[ref.insert(1, [str(i), "v"]) for i in range(95)]
        ),
    )
    tables = [table for _, table in decoded(ours.take_committed())]
    assert [t.num_rows for t in tables] == [10] * 9 + [5]
    data = [json.loads(d)["id"] for t in tables for d in t["_data"].to_pylist()]
    assert data == [str(i) for i in range(95)]


ALIKE = {oid: Spec(("id",)) for oid in (1, 2, 3)}


def test_tables_that_look_the_same_are_decoded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "CELLS_PER_BATCH", 100)  # of two tables, and of one
    plain, ours = Reference(ALIKE), decoder(ALIKE)
    messages = [ref.relation(oid, ["id", "v"], ["id"]) for oid in ALIKE]
    for number in range(10):
        for oid in ALIKE:
            key = f"{oid}.{number}"
            messages.append(ref.insert(oid, [key, "v"]))
            messages.append(ref.update(oid, [f"-{key}", UNCHANGED], [key, None]))
        if number == 5:
            messages.append(ref.truncate(2))
    frames = one_transaction(*messages)
    for frame in frames:
        plain.feed(frame)
    feed(ours, frames)
    taken = ours.take_committed()
    sizes = [table.num_rows for _, table in decoded(taken)]
    assert sum(sizes) == 91  # an update of the key is two rows
    assert len(sizes) <= 6
    assert rows_of(taken) == by_table(plain.rows)


def test_what_is_odd_is_told_of_the_right_one_among_many() -> None:
    good = [ref.relation(oid, ["id"], ["id"], name=f"t{oid}") for oid in ALIKE]
    good += [ref.insert(oid, ["x"]) for oid in (1, 2)]
    ours = decoder(ALIKE)
    feed(ours, one_transaction(*good, ref.insert(3, [b"\xff"])))
    invalid = {number: staged_rows.invalid_text(t) for number, t in decoded(ours.take_committed())}
    assert invalid == {0: 0, 1: 0, 2: 1}
    ours = decoder(ALIKE)
    feed(ours, one_transaction(*good, ref.insert(3, ["x", "y"])))
    with pytest.raises(
        ReplicationProblem,
        match=r"\(I\) of public\.t3 with another number of columns than 1 at LSN 0/6A ",
    ):
        list(decoded(ours.take_committed()))
    ours = decoder(ALIKE)
    feed(ours, one_transaction(*good, ref.insert(3, ["x"]) + b"x"))
    with pytest.raises(
        ReplicationProblem,
        match=r"a change \(I\) of public\.t3 with more bytes than columns at LSN",
    ):
        list(decoded(ours.take_committed()))


def test_nothing_in_nothing_out() -> None:
    ours = decoder()
    feed(ours, [])
    feed(ours, [ref.keepalive(5)])
    assert (ours.position, ours.take_committed(), ours.in_transaction) == (5, [], False)


@pytest.mark.parametrize(
    "frames",
    [
        [ref.xlog(1, ref.insert(1, ["a"]))],
        [ref.xlog(2, ref.commit(1, 2, 0))],
        [ref.xlog(1, ref.begin(1, 2, 0))] * 2,
        one_transaction(ref.insert(1, ["a"])),
        one_transaction(ref.relation(1, ["a"]), ref.insert(1, ["a", "b"])),
        one_transaction(ref.relation(1, ["a"]), ref.insert(1, ["a"])[:-1]),
        one_transaction(ref.relation(1, ["a"]), ref.insert(1, ["a"]) + b"x"),
        one_transaction(ref.relation(1, ["a"]), ref.insert(1, ["a"]).replace(b"t", b"b")),
        one_transaction(b"S" + bytes(30)),
    ],
)
def test_a_broken_stream_is_an_error(frames: list[bytes]) -> None:
    ours = decoder({1: Spec(("a",))})

    def read() -> None:
        feed(ours, frames)
        rows_of(ours.take_committed())

    with pytest.raises(ReplicationProblem, match="stream is broken"):
        read()
