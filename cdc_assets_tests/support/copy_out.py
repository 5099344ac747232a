"""What a server sends of COPY in binary, and a session that it is sent to."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from psycopg.types.numeric import DecimalBinaryDumper

from cdc_assets.postgres.copy_out.kinds import Kind
from cdc_assets.postgres.copy_out.session import DirectSession
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
HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"d\0\0\0\6\xff\xff"
DONE = b"c\0\0\0\4" + b"C\0\0\0\x0bCOPY 1\0" + b"Z\0\0\0\5T"
BEGUN = b"H\0\0\0\7\1\0\0"


def value_sent(sent: str, value: Any) -> bytes:
    """A value as Postgres sends it."""
    if sent in _FIXED:
        return struct.pack(_FIXED[sent][0], value)
    if sent == "numeric":
        dumped = DecimalBinaryDumper(Decimal).dump(value)
        assert dumped is not None
        return bytes(dumped)
    return value.encode() if sent == "text" else bytes(value)


def field(sent: str, value: Any) -> bytes:
    if value is None:
        return b"\xff\xff\xff\xff"
    if sent.endswith("[]"):
        parts = [field(sent[:-2], element) for element in value]
        body = struct.pack(">iiI", bool(parts), None in value, 25)
        if parts:
            body += struct.pack(">ii", len(parts), 1) + b"".join(parts)
    else:
        body = value_sent(sent, value)
    return struct.pack(">i", len(body)) + body


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", 4 + len(body)) + body


def stream_of(kinds: Sequence[Kind], rows: Rows) -> bytes:
    """All that a server answers; the header is in the first row's message, as Postgres has it."""
    parts, lead = [BEGUN], HEADER
    for row in rows:
        fields = b"".join(field(k.sent, v) for k, v in zip(kinds, row, strict=True))
        parts.append(message(b"d", lead + len(kinds).to_bytes(2) + fields))
        lead = b""
    return b"".join([*parts, message(b"d", lead + b"\xff\xff"), DONE])


def rows_of(kinds: Sequence[Kind], rows: Rows) -> bytes:
    """The answer up to behind the last row."""
    return stream_of(kinds, rows)[: -len(TRAILER) - len(DONE)]


class _Connection:
    """What a session closes besides its wire."""

    def close(self) -> None:
        pass


@contextmanager
def reading(stream: bytes, sizes: Sequence[int]) -> Iterator[DirectSession]:
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


def read(stream: bytes, kinds: Sequence[Kind], sizes: Sequence[int] = ()) -> Rows:
    with reading(stream, sizes) as session:
        batches = list(session.read("select", kinds))
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def _scaled(scale: int) -> Callable[[int], Decimal]:
    return lambda units: Decimal(units).scaleb(-scale)


@st.composite
def a_column(draw: st.DrawFn) -> tuple[Kind, st.SearchStrategy[Any]]:
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
def tables(draw: st.DrawFn) -> tuple[list[Kind], Rows]:
    columns = draw(st.lists(a_column(), min_size=1, max_size=6))
    rows = draw(st.lists(st.tuples(*(values for _, values in columns)), max_size=40))
    return [kind for kind, _ in columns], rows
