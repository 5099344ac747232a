"""Wherever a stream is cut, a flush ends with the commit of a transaction that has markers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.decode.decoder import Decoder, frames_bytes
from cdc_assets.flusher.decode.markers import MOST, Marker
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support import pgoutput_reference as ref

MARKERS, OURS = 7, 8
TABLE = TableId("public", "cdc_markers")
TOLD = ref.relation(MARKERS, ["marker", "name"], ["marker"], name="cdc_markers")
END = 50  # of a commit, behind its record


def transactions(*bodies: Sequence[bytes]) -> list[bytes]:
    """Frames, with those of a quiet server between transactions."""
    frames = list[bytes]()
    for number, body in enumerate(bodies):
        begun = 1_000 * (number + 1)
        record = begun + 500
        frames.append(ref.xlog(begun, ref.begin(record, 0, number + 5)))
        frames += [ref.xlog(begun + place, message) for place, message in enumerate(body)]
        frames.append(ref.xlog(record + END, ref.commit(record, record + END, 0)))
        frames.append(ref.keepalive(record + END + 100))
    return frames


def marker(text: str, name: str | None = "m") -> bytes:
    return ref.insert(MARKERS, [text.encode(), None if name is None else name.encode()])


def row(value: bytes) -> bytes:
    return ref.insert(OURS, [value])


def flushes(frames: Sequence[bytes], cuts: Sequence[int]) -> list[tuple[int, int, list[Marker]]]:
    """Position, rows of ours, and markers of each flush that markers make."""
    decoder = Decoder({OURS: DecodeSpec(TableId("public", "t"), ())}.get, markers=TABLE)
    found = list[tuple[int, int, list[Marker]]]()
    borders = [0, *sorted(cuts), len(frames)]
    for low, high in pairwise(borders):
        batch = frames[low:high]
        lengths, blob = np.array([*map(len, batch)], np.int32), b"".join(batch)
        while len(lengths):
            taken = decoder.feed(blob, lengths)
            blob = blob[frames_bytes(lengths[:taken], 0) :]
            lengths = lengths[taken:]
            if decoder.markers.at_commit:
                rows = sum(len(part) for p in decoder.take_committed() for part in sizes(p.parts))
                found.append((decoder.position, rows, [*decoder.markers.take()]))
            elif not decoder.in_transaction:
                assert decoder.markers.take() == ()
    return found


def sizes(parts: Sequence[object]) -> list[Sequence[int]]:
    return [part.stop for part in parts]  # type: ignore[attr-defined]


OUR_TABLE = ref.relation(OURS, ["id"], ["id"])
STREAM = transactions(
    [OUR_TABLE, row(b"1")],
    [row(b"2"), TOLD, marker("a", "first"), row(b"3"), marker("b", "second")],
    [row(b"4")],
    [ref.update(MARKERS, [b"a", b"other"]), ref.delete(MARKERS, [b"a", None])],
    [ref.truncate(MARKERS)],
    [marker("c", None)],
    [row(b"5")],
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_wherever_batches_end_a_flush_ends_at_the_commit_and_has_what_was_before(
    cuts: list[int],
) -> None:
    assert flushes(STREAM, cuts) == [
        (2_500 + END, 3, [("a", "first"), ("b", "second")]),
        (6_500 + END, 1, [("c", "")]),
    ]


def test_a_table_of_another_name_has_no_markers_and_one_that_gets_the_name_has() -> None:
    other = ref.relation(MARKERS, ["marker", "name"], ["marker"], name="others")
    stream = transactions(
        [other, marker("a")], [TOLD, marker("b")], [other, marker("c")], [TOLD, marker("d")]
    )
    for cuts in ([], [*range(len(stream))]):
        found = [rows for _, _, rows in flushes(stream, cuts) if rows]
        assert found == [[("b", "m")], [("d", "m")]]


def test_a_table_that_is_renamed_has_no_markers_from_there_on_wherever_batches_end() -> None:
    other, third = (
        ref.relation(MARKERS, ["marker", "name"], ["marker"], name=name) for name in "bc"
    )
    change = ref.update(MARKERS, [b"a", b"m"])
    stream = transactions(
        [TOLD, marker("a"), other, marker("no")],
        [marker("nor this")],
        [TOLD, marker("b")],
        [other, change, third, change],
        [TOLD, marker("c")],
    )
    for cuts in ([], [*range(len(stream))]):
        found = [rows for _, _, rows in flushes(stream, cuts) if rows]
        assert found == [[(text, "m")] for text in "abc"]


def test_columns_are_found_by_name_and_no_more_than_some_are_taken() -> None:
    told = ref.relation(MARKERS, ["name", "by", "marker"], ["marker"], name="cdc_markers")
    many = [ref.insert(MARKERS, [b"n" * 9_999, b"x", b"%d" % n]) for n in range(3 * MOST)]
    [(_, _, found)] = flushes(transactions([told, *many]), [])
    assert len(found) == MOST + 1
    assert found[0] == ("0", "n" * 500)


def test_a_marker_that_is_torn_ends_the_stream() -> None:
    for torn in (marker("a")[:-1], marker("a") + b"x", ref.insert(MARKERS, [b"a"])):
        with pytest.raises(ReplicationProblem):
            flushes(transactions([TOLD, torn]), [])
