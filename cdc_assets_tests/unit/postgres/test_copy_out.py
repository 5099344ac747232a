"""Rows of COPY read by columns: what a server sends, in any pieces, and what no server would."""

from __future__ import annotations

from decimal import Decimal

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_assets.postgres.copy_out.kinds import Kind
from cdc_assets_tests.support.copy_out import (
    DONE,
    Rows,
    field,
    message,
    read,
    reading,
    rows_of,
    stream_of,
    tables,
)

pytestmark = pytest.mark.usefixtures("small_batches")


@given(table=tables(), sizes=st.lists(st.integers(1, 300), max_size=10))
def test_rows_are_what_was_sent(table: tuple[list[Kind], Rows], sizes: list[int]) -> None:
    kinds, rows = table
    assert repr(read(stream_of(kinds, rows), kinds, sizes)) == repr(rows)


def test_every_row_has_bytes_that_look_like_another_one() -> None:
    kinds = [Kind("int4", pa.int32()), Kind("int2", pa.int16())]
    rows = [(100, 2)] * 300  # 00 64 00 00 00 02 00 02: kind, length and number of fields
    assert read(stream_of(kinds, rows), kinds) == rows


@pytest.mark.parametrize("size", [2**16, 2**24, 2**25])
def test_a_row_may_be_larger_than_what_is_read_at_a_time(size: int) -> None:
    kinds = [Kind("text", pa.string()), Kind("int4", pa.int32())]
    rows = [("a", 1), ("x" * size, 2), ("b", 3)]
    assert read(stream_of(kinds, rows), kinds) == rows


@pytest.mark.parametrize("size", [2**power * 5 // 4 for power in range(10, 20)])
def test_the_memory_of_large_rows_is_less_than_twice_the_largest(size: int) -> None:
    kinds = [Kind("text", pa.string())]
    with reading(stream_of(kinds, [("x" * size,)] * 8), []) as session:
        batches = [batch.nbytes for batch in session.read("select", kinds)]
    assert max(batches) < 2 * size


def test_notices_between_rows_are_none_of_them() -> None:
    kinds = [Kind("int4", pa.int32())]
    two = len(rows_of(kinds, [(1,), (2,)]))
    stream = stream_of(kinds, [(1,), (2,), (3,)])
    aside = message(b"N", b"SNOTICE\0Mwell\0\0") + message(b"S", b"TimeZone\0UTC\0")
    assert read(stream[:two] + aside + stream[two:], kinds) == [(1,), (2,), (3,)]


def test_decimals_that_are_none_come_as_text() -> None:
    kinds = [Kind("numeric", pa.decimal128(9, 2))]
    values = [Decimal("1.50"), Decimal("NaN"), None, Decimal("-Infinity"), Decimal("Infinity")]
    assert read(stream_of(kinds, [(v,) for v in values]), kinds) == [
        ("1.50",), ("NaN",), (None,), ("-Infinity",), ("Infinity",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "digits"),
    [
        (Decimal("1.234"), 9),
        (Decimal(10) ** 20, 9),
        (Decimal(10) ** 7, 9),
        (19 * Decimal(10) ** 16, 18),  # in 64 bits, 19 * 10**18 is less than 10**18
        (Decimal(2) ** 62, 18),
    ],
)
def test_a_decimal_with_more_digits_than_its_column_is_no_other_number(
    value: Decimal, digits: int
) -> None:
    kinds = [Kind("numeric", pa.decimal128(digits, 2))]
    with pytest.raises(psycopg.errors.DatatypeMismatch, match="more digits"):
        read(stream_of(kinds, [(value,)]), kinds)


def test_an_error_behind_rows_is_the_servers_and_the_session_goes_on() -> None:
    kinds = [Kind("int4", pa.int32())]
    rows = rows_of(kinds, [(1,)])
    error = message(b"E", b"SERROR\0C22P02\0Mno number\0Wrow 2\0\0") + b"Z\0\0\0\5E"
    with reading(rows + error, []) as session:
        batches = session.read("select", kinds)
        assert next(batches).to_pylist() == [{"0": 1}]
        with pytest.raises(psycopg.errors.InvalidTextRepresentation, match="no number\nCONTEXT"):
            next(batches)
        assert not session.closed


def test_an_error_before_the_server_hangs_up_is_what_is_told() -> None:
    kinds = [Kind("int4", pa.int32())]
    rows = rows_of(kinds, [(1,)])
    error = message(b"E", b"SFATAL\0C57P01\0Mit shuts down\0\0")
    with reading(rows + error, []) as session:
        with pytest.raises(psycopg.errors.AdminShutdown, match="it shuts down"):
            list(session.read("select", kinds))
        assert session.closed


def test_rows_that_end_without_their_end_are_an_error() -> None:
    kinds = [Kind("int4", pa.int32())]
    with reading(stream_of(kinds, [(1,)])[: -len(DONE)], []) as session:
        with pytest.raises(psycopg.OperationalError, match="the connection was lost"):
            list(session.read("select", kinds))
        assert session.closed


def test_a_session_that_was_not_read_to_its_end_is_closed() -> None:
    kinds = [Kind("int4", pa.int32())]
    with reading(stream_of(kinds, [(1,)] * 1_000), []) as session:
        batches = session.read("select", kinds)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert session.closed
        with pytest.raises(psycopg.OperationalError, match="the connection is closed"):
            session.execute("rollback")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(DONE[-6:], id="only ready"),
        pytest.param(rows_of([Kind("int4", pa.int32())], [(1,)]) + DONE[-6:], id="no trailer"),
        pytest.param(
            stream_of([Kind("int4", pa.int32())], [(1,)])[: -len(DONE)]
            + message(b"d", b"\0\1" + field("int4", 2))
            + DONE,
            id="a row behind the trailer",
        ),
    ],
)
def test_rows_without_their_end_are_none(answer: bytes) -> None:
    with reading(answer, []) as session:
        with pytest.raises(psycopg.errors.ProtocolViolation):
            list(session.read("select", [Kind("int4", pa.int32())]))
        assert session.closed


def test_notices_between_all_rows_are_none_of_them() -> None:
    kinds = [Kind("int4", pa.int32())]
    notice = message(b"N", b"SNOTICE\0Mwell\0\0")
    row = message(b"d", b"\0\1" + field("int4", 7))
    head, stream = len(rows_of(kinds, [(7,)])), stream_of(kinds, [(7,)])
    answer = stream[:head] + (notice + row) * 3_000 + stream[head:]
    assert read(answer, kinds) == [(7,)] * 3_001


def test_a_statement_that_is_interrupted_leaves_no_answer_to_the_next() -> None:
    with reading(b"C\0\0\0\x0bSELECT\0", []) as session:
        with pytest.raises(psycopg.OperationalError):
            session.execute("select 1")
        assert session.closed


def test_values_of_another_type_leave_no_rows_to_the_next_statement() -> None:
    stream = stream_of([Kind("int8", pa.int64())], [(1,)] * 1_000)
    with reading(stream, []) as session:
        with pytest.raises(psycopg.errors.DatatypeMismatch):
            list(session.read("select", [Kind("int4", pa.int32())]))
        assert session.closed
