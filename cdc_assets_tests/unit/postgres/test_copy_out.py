"""Rows of COPY read by columns: what a server sends, in any pieces, and what no server would."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.types.numeric import DecimalBinaryDumper

from cdc_assets.postgres.copy_out import session as session_module
from cdc_assets.postgres.copy_out.session import DirectSession
from cdc_assets.postgres.copy_out.values import Kind
from cdc_assets.postgres.session.wires import SocketWire

Rows = list[tuple[Any, ...]]

_FIXED: dict[str, tuple[str, pa.DataType, st.SearchStrategy[Any]]] = {
    "bool": ("?", pa.bool_(), st.booleans()),
    "int2": (">h", pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int4": (">i", pa.int32(), st.integers(-(2**31), 2**31 - 1) | st.just(100)),
    "int8": (">q", pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.just(100)),
    "float4": (">f", pa.float32(), st.floats(width=32, allow_nan=False)),
    "float8": (">d", pa.float64(), st.floats(allow_nan=False)),
}
# Texts that look like the beginning of a message of a row with two fields.
_TEXTS = st.text(max_size=20).filter(lambda t: "\0" not in t)
_BYTES = st.binary(max_size=20) | st.just(b"d\0\0\0\x0f\0\2")
_SCALES = st.sampled_from([(18, 0), (18, 18), (18, 9), (15, 2), (4, 4), (5, 3), (1, 0)])
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_DONE = b"c\0\0\0\4" + b"C\0\0\0\x0bCOPY 1\0" + b"Z\0\0\0\5T"
_BEGUN = b"H\0\0\0\7\1\0\0"
_WIDTH = 10**9


def _value(sent: str, value: Any) -> bytes:
    """A value as Postgres sends it."""
    if sent in _FIXED:
        return struct.pack(_FIXED[sent][0], value)
    if sent == "numeric":
        dumped = DecimalBinaryDumper(Decimal).dump(value)
        assert dumped is not None
        return bytes(dumped)
    return value.encode() if sent == "text" else bytes(value)


def _field(sent: str, value: Any) -> bytes:
    if value is None:
        return b"\xff\xff\xff\xff"
    if sent.endswith("[]"):
        parts = [_field(sent[:-2], element) for element in value]
        body = struct.pack(">iiI", bool(parts), None in value, 25)
        if parts:
            body += struct.pack(">ii", len(parts), 1) + b"".join(parts)
    else:
        body = _value(sent, value)
    return struct.pack(">i", len(body)) + body


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", 4 + len(body)) + body


def _stream(kinds: Sequence[Kind], rows: Rows) -> bytes:
    """All that a server answers; the header is in the first row's message, as Postgres has it."""
    parts, lead = [_BEGUN], _HEADER
    for row in rows:
        fields = b"".join(_field(k.sent, v) for k, v in zip(kinds, row, strict=True))
        parts.append(_message(b"d", lead + len(kinds).to_bytes(2) + fields))
        lead = b""
    return b"".join([*parts, _message(b"d", lead + b"\xff\xff"), _DONE])


def _rows_of(kinds: Sequence[Kind], rows: Rows) -> bytes:
    """The answer up to behind the last row."""
    trailer = 7
    return _stream(kinds, rows)[: -len(_DONE) - trailer]


class _Connection:
    """What a session closes besides its wire."""

    def close(self) -> None:
        pass


@contextmanager
def _reading(stream: bytes, sizes: Sequence[int]) -> Iterator[DirectSession]:
    """A session that is answered by ``stream``, in pieces of these sizes, and hung up on."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs, suppress(OSError):
            theirs.recv(2**16)
            at = 0
            for size in [*sizes, len(stream)]:
                theirs.sendall(stream[at : at + size])
                at += size

    server = threading.Thread(target=serve)
    server.start()
    session = DirectSession(_Connection(), SocketWire(ours))  # type: ignore[arg-type]
    try:
        with closing(session):
            yield session
    finally:
        server.join()


def _read(stream: bytes, kinds: Sequence[Kind], sizes: Sequence[int] = ()) -> Rows:
    with _reading(stream, sizes) as session:
        batches = list(session.read("select", kinds))
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


@pytest.fixture(autouse=True, scope="module")
def _small_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "BATCH_BYTES", 256)
        yield


def _scaled(scale: int) -> Callable[[int], Decimal]:
    return lambda units: Decimal(units).scaleb(-scale)


@st.composite
def _columns(draw: st.DrawFn) -> tuple[Kind, st.SearchStrategy[Any]]:
    sent = draw(st.sampled_from([*_FIXED, "text", "bytea", "numeric"]))
    arrow: pa.DataType
    values: st.SearchStrategy[Any]
    if sent in _FIXED:
        arrow, values = _FIXED[sent][1:]
    elif sent == "numeric":
        precision, scale = draw(_SCALES)
        most = 10**precision - 1
        arrow = pa.decimal128(precision, scale)
        values = st.integers(-most, most).map(_scaled(scale))
    else:
        arrow = pa.string() if sent == "text" else pa.binary()
        values = _TEXTS if sent == "text" else _BYTES
    if draw(st.booleans()):
        sent, arrow = f"{sent}[]", pa.list_(arrow)
        values = st.lists(values | st.none(), max_size=draw(st.sampled_from([2, 30])))
    if draw(st.booleans()):
        values |= st.none()
    return Kind(sent, arrow), values


@st.composite
def _tables(draw: st.DrawFn) -> tuple[list[Kind], Rows]:
    columns = draw(st.lists(_columns(), min_size=1, max_size=6))
    rows = draw(st.lists(st.tuples(*(values for _, values in columns)), max_size=40))
    return [kind for kind, _ in columns], rows


@given(table=_tables(), sizes=st.lists(st.integers(1, 300), max_size=10))
def test_rows_are_what_was_sent(table: tuple[list[Kind], Rows], sizes: list[int]) -> None:
    kinds, rows = table
    assert repr(_read(_stream(kinds, rows), kinds, sizes)) == repr(rows)


@given(table=_tables(), data=st.data())
def test_damaged_bytes_are_an_error_or_other_values(
    table: tuple[list[Kind], Rows], data: st.DataObject
) -> None:
    kinds, rows = table
    stream = bytearray(_stream(kinds, rows))
    for place in data.draw(st.lists(st.integers(0, len(stream) - 1), min_size=1, max_size=4)):
        stream[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stream)) | st.just(len(stream)))
    with suppress(psycopg.Error, UnicodeDecodeError):
        _read(bytes(stream[:cut]), kinds)


def test_every_row_has_bytes_that_look_like_another_one() -> None:
    kinds = [Kind("int4", pa.int32()), Kind("int2", pa.int16())]
    rows = [(100, 2)] * 300  # 00 64 00 00 00 02 00 02: kind, length and number of fields
    assert _read(_stream(kinds, rows), kinds) == rows


@pytest.mark.parametrize("size", [2**16, 2**24, 2**25])
def test_a_row_may_be_larger_than_what_is_read_at_a_time(size: int) -> None:
    kinds = [Kind("text", pa.string()), Kind("int4", pa.int32())]
    rows = [("a", 1), ("x" * size, 2), ("b", 3)]
    assert _read(_stream(kinds, rows), kinds) == rows


@pytest.mark.parametrize("size", [2**power * 5 // 4 for power in range(10, 20)])
def test_the_memory_of_large_rows_is_less_than_twice_the_largest(size: int) -> None:
    kinds = [Kind("text", pa.string())]
    with _reading(_stream(kinds, [("x" * size,)] * 8), []) as session:
        batches = [batch.nbytes for batch in session.read("select", kinds)]
    assert max(batches) < 2 * size


def test_notices_between_rows_are_none_of_them() -> None:
    kinds = [Kind("int4", pa.int32())]
    two = len(_rows_of(kinds, [(1,), (2,)]))
    stream = _stream(kinds, [(1,), (2,), (3,)])
    aside = _message(b"N", b"SNOTICE\0Mwell\0\0") + _message(b"S", b"TimeZone\0UTC\0")
    assert _read(stream[:two] + aside + stream[two:], kinds) == [(1,), (2,), (3,)]


def test_decimals_that_are_none_come_as_text() -> None:
    kinds = [Kind("numeric", pa.decimal128(9, 2))]
    values = [Decimal("1.50"), Decimal("NaN"), None, Decimal("-Infinity"), Decimal("Infinity")]
    assert _read(_stream(kinds, [(v,) for v in values]), kinds) == [
        ("1.50",), ("NaN",), (None,), ("-Infinity",), ("Infinity",),
    ]  # fmt: skip


@pytest.mark.parametrize("value", [Decimal("1.234"), Decimal(10) ** 20, Decimal(10) ** 7])
def test_a_decimal_with_more_digits_than_its_column_is_no_other_number(value: Decimal) -> None:
    kinds = [Kind("numeric", pa.decimal128(9, 2))]
    with pytest.raises(psycopg.errors.DatatypeMismatch, match="more digits"):
        _read(_stream(kinds, [(value,)]), kinds)


def test_an_error_behind_rows_is_the_servers_and_the_session_goes_on() -> None:
    kinds = [Kind("int4", pa.int32())]
    rows = _rows_of(kinds, [(1,)])
    error = _message(b"E", b"SERROR\0C22P02\0Mno number\0Wrow 2\0\0") + b"Z\0\0\0\5E"
    with _reading(rows + error, []) as session:
        batches = session.read("select", kinds)
        assert next(batches).to_pylist() == [{"0": 1}]
        with pytest.raises(psycopg.errors.InvalidTextRepresentation, match="no number\nCONTEXT"):
            next(batches)
        assert not session.closed


def test_an_error_before_the_server_hangs_up_is_what_is_told() -> None:
    kinds = [Kind("int4", pa.int32())]
    rows = _rows_of(kinds, [(1,)])
    error = _message(b"E", b"SFATAL\0C57P01\0Mit shuts down\0\0")
    with _reading(rows + error, []) as session:
        with pytest.raises(psycopg.errors.AdminShutdown, match="it shuts down"):
            list(session.read("select", kinds))
        assert session.closed


def test_rows_that_end_without_their_end_are_an_error() -> None:
    kinds = [Kind("int4", pa.int32())]
    with _reading(_stream(kinds, [(1,)])[: -len(_DONE)], []) as session:
        with pytest.raises(psycopg.OperationalError, match="the connection was lost"):
            list(session.read("select", kinds))
        assert session.closed


def test_a_session_that_was_not_read_to_its_end_is_closed() -> None:
    kinds = [Kind("int4", pa.int32())]
    with _reading(_stream(kinds, [(1,)] * 1_000), []) as session:
        batches = session.read("select", kinds)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert session.closed
        with pytest.raises(psycopg.OperationalError, match="the connection is closed"):
            session.execute("rollback")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(_DONE[-6:], id="only ready"),
        pytest.param(_rows_of([Kind("int4", pa.int32())], [(1,)]) + _DONE[-6:], id="no trailer"),
        pytest.param(
            _stream([Kind("int4", pa.int32())], [(1,)])[: -len(_DONE)]
            + _message(b"d", b"\0\1" + _field("int4", 2))
            + _DONE,
            id="a row behind the trailer",
        ),
    ],
)
def test_rows_without_their_end_are_none(answer: bytes) -> None:
    with _reading(answer, []) as session:
        with pytest.raises(psycopg.errors.ProtocolViolation):
            list(session.read("select", [Kind("int4", pa.int32())]))
        assert session.closed


def test_notices_between_all_rows_are_none_of_them() -> None:
    kinds = [Kind("int4", pa.int32())]
    notice = _message(b"N", b"SNOTICE\0Mwell\0\0")
    row = _message(b"d", b"\0\1" + _field("int4", 7))
    head, stream = len(_rows_of(kinds, [(7,)])), _stream(kinds, [(7,)])
    answer = stream[:head] + (notice + row) * 3_000 + stream[head:]
    assert _read(answer, kinds) == [(7,)] * 3_001


def test_a_statement_that_is_interrupted_leaves_no_answer_to_the_next() -> None:
    with _reading(b"C\0\0\0\x0bSELECT\0", []) as session:
        with pytest.raises(psycopg.OperationalError):
            session.execute("select 1")
        assert session.closed


def test_values_of_another_type_leave_no_rows_to_the_next_statement() -> None:
    stream = _stream([Kind("int8", pa.int64())], [(1,)] * 1_000)
    with _reading(stream, []) as session:
        with pytest.raises(psycopg.errors.DatatypeMismatch):
            list(session.read("select", [Kind("int4", pa.int32())]))
        assert session.closed
