"""Rows of COPY that no server would send: an error, and nothing is read where nothing is."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.postgres.copy_out import loops, tuples, values
from cdc_assets.postgres.copy_out import session as session_module
from cdc_assets.postgres.copy_out.kinds import MAX_DIGITS, Kind
from cdc_assets.postgres.session.messages import COPY_DATA
from cdc_assets_tests.support.copy_out import (
    BEGUN,
    DONE,
    HEADER,
    TRAILER,
    Rows,
    field,
    message,
    read,
    stream_of,
    tables,
)

pytestmark = pytest.mark.usefixtures("small_batches")

# Lengths of fields, and what takes a loop astray.
_LENGTHS = st.integers(-3, 40).map(lambda n: n.to_bytes(4, signed=True)) | st.sampled_from(
    [b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\1\0"]
)


@given(table=tables(), data=st.data())
def test_damaged_bytes_are_an_error_or_other_values(
    table: tuple[list[Kind], Rows], data: st.DataObject
) -> None:
    kinds, rows = table
    stream = bytearray(stream_of(kinds, rows))
    for place in data.draw(st.lists(st.integers(0, len(stream) - 1), min_size=1, max_size=4)):
        stream[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stream)) | st.just(len(stream)))
    with suppress(psycopg.Error, UnicodeDecodeError):
        read(bytes(stream[:cut]), kinds)


@given(table=tables(), data=st.data())
def test_no_loop_reads_outside_of_what_has_arrived(
    table: tuple[list[Kind], Rows], data: st.DataObject
) -> None:
    kinds, rows = table
    stream = bytearray(stream_of(kinds, rows))
    for place in data.draw(st.lists(st.integers(0, len(stream) - 4), max_size=8)):
        stream[place : place + 4] = data.draw(_LENGTHS)
    with _watching(), suppress(psycopg.Error, UnicodeDecodeError):
        found = read(bytes(stream), kinds)
        if stream == stream_of(kinds, rows):
            assert repr(found) == repr(rows)


_HUGE, _LESS_THAN_NULL = (2**30).to_bytes(4), b"\xff\xff\xff\xfe"
_ARRAY = struct.pack(">iiIii", 1, 0, 25, 2, 1)
_TYPES = {
    "text": pa.string(),
    "int4": pa.int32(),
    "numeric": pa.decimal128(9, 2),
    "text[]": pa.list_(pa.string()),
    "int4[]": pa.list_(pa.int32()),
}


def _numeric(groups: int, weight: int, sign: int, scale: int, *digits: int) -> bytes:
    body = struct.pack(f">HhHH{len(digits)}H", groups, weight, sign, scale, *digits)
    return field("bytea", body)


def _message(kinds: list[str], fields: bytes) -> bytes:
    return message(b"d", HEADER + len(kinds).to_bytes(2) + fields)


@pytest.mark.parametrize(
    ("kinds", "fields", "why"),
    [
        pytest.param(kinds.split(), fields, why, id=name)
        for name, kinds, fields, why in [
            ("a field", "text text", _HUGE + b"a" + field("text", "b"), "fill"),
            ("a byte behind the last field", "text", field("text", "a") + b"b", "fill"),
            ("no second field", "text text", field("text", "abc"), "fill"),
            ("less than NULL", "text", _LESS_THAN_NULL, "less than no bytes"),
            ("a wide integer", "int4", field("int8", 1), "has 8 bytes"),
            (
                *("an element", "text[]"),
                *(field("bytea", _ARRAY + _HUGE + b"a" + field("text", "b")), "fill"),
            ),
            (
                *("a byte behind the last element", "text[]"),
                *(field("bytea", _ARRAY + 2 * field("text", "a") + b"b"), "fill"),
            ),
            (
                *("an element less than NULL", "text[]"),
                *(field("bytea", _ARRAY + 2 * _LESS_THAN_NULL), "less than no bytes"),
            ),
            (
                *("a wide element", "int4[]"),
                *(field("bytea", _ARRAY + 2 * field("int8", 1)), "has 8 bytes"),
            ),
            (
                *("many elements", "text[]"),
                *(field("bytea", struct.pack(">iiIii", 1, 0, 25, 2**31 - 1, 1)), "bytes for"),
            ),
            ("half an array", "text[]", field("bytea", _ARRAY[:8]), "bytes for"),
            ("many groups", "numeric", _numeric(65_535, 0, 0, 0, 1), "fill"),
            ("a numeric without a head", "numeric", field("bytea", b"\0\1"), "fill"),
            ("a large numeric", "numeric", _numeric(1, 30_000, 0, 0, 1), "more digits"),
            ("a small numeric", "numeric", _numeric(1, -30_000, 0, 0, 1), "more digits"),
            ("digits behind the scale", "numeric", _numeric(1, -1, 0, 2, 123), "more digits"),
            ("five digits", "numeric", _numeric(1, 0, 0, 0, 10_000), "more digits"),
            ("no sign", "numeric", _numeric(1, 0, 1, 0, 1), "more digits"),
            ("no special value", "numeric", _numeric(0, 0, 0xC500, 0), "more digits"),
        ]
    ],
)
def test_a_length_that_is_wrong_is_refused_before_anything_is_read_by_it(
    kinds: list[str], fields: bytes, why: str
) -> None:
    answer = BEGUN + _message(kinds, fields) + TRAILER + DONE
    for watch in (_watching, nullcontext):
        with watch(), pytest.raises(psycopg.Error, match=why):
            read(answer, [Kind(kind, _TYPES[kind]) for kind in kinds])


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(message(b"d", HEADER[:15]), id="half a header"),
        pytest.param(message(b"d", HEADER[:-4] + _HUGE + b"\0\1"), id="a header's extension"),
        pytest.param(message(b"d", HEADER) + message(b"d", b""), id="no row"),
        pytest.param(message(b"d", HEADER) + message(b"d", b"\0"), id="half a row's head"),
    ],
)
def test_a_message_that_is_torn_is_no_row(torn: bytes) -> None:
    for watch in (_watching, nullcontext):
        with watch(), pytest.raises(psycopg.errors.ProtocolViolation):
            read(BEGUN + torn + TRAILER + DONE, [Kind("text", pa.string())])


@pytest.mark.parametrize("length", [0, 3])
def test_a_message_that_is_shorter_than_its_length_is_no_row(length: int) -> None:
    row = _message(["text"], field("text", "a"))
    short = b"d" + length.to_bytes(4) + b"\0\1"
    for watch in (_watching, nullcontext):
        with watch(), pytest.raises(psycopg.errors.ProtocolViolation, match="out of place"):
            read(BEGUN + row + short + TRAILER + DONE, [Kind("text", pa.string())])


def test_the_loops_have_the_constants_of_others() -> None:
    assert (loops.COPY_DATA, loops.MAX_DIGITS) == (COPY_DATA, MAX_DIGITS)


@contextmanager
def _watching() -> Iterator[None]:
    """While it lasts, Python runs the loops, and each index is looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "copy_bytes", _copy_bytes)
        for module, names in (
            (session_module, ["rows_at"]),
            (tuples, ["fields_at", "elements_at"]),
            (values, ["decimals", "texts", "integers"]),
        ):
            for name in names:
                patch.setattr(module, name, _watched(getattr(loops, name).py_func))
        yield


class _Watched:
    """A buffer that is read within its bounds."""

    def __init__(self, buffer: Any, end: int) -> None:
        self._buffer, self._end = buffer, end

    def __getitem__(self, at: int) -> int:
        assert 0 <= at < self._end
        return int(self._buffer[at])


def _watched(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The loop as Python runs it, with a buffer that looks at each index."""

    def run(buffer: Any, *arguments: Any) -> Any:
        end = arguments[1] if loop.__name__ == "rows_at" else len(buffer)
        return loop(_Watched(buffer, end), *arguments)

    return run


def _copy_bytes(target: Any, to: int, source: Any, begin: int, count: int) -> None:
    assert 0 <= to <= to + count <= len(target)
    target[to : to + count] = [source[n] for n in range(begin, begin + count)]
