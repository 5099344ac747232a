"""A line that is read past libpq: whole frames, whatever lies between them, and how it ends."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.pq.abc import PGconn

from cdc_assets.flusher.line.direct import BUFFER_BYTES, DirectLine
from cdc_assets.flusher.line.ends import Ended
from cdc_assets.flusher.line.frames import Received, frames
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.wires import SocketWire

Pair = tuple[DirectLine, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    near, far = socket.socketpair()
    with far:
        line = DirectLine(SocketWire(near))
        yield line, far
        line.close()


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", 4 + len(body)) + body


def _received(line: DirectLine) -> list[bytes]:
    received = line.receive(BUFFER_BYTES)
    return [] if received is None else [bytes(frame) for frame in received.frames]


FRAMES = [b"w" + b"x" * 30, b"k" + bytes(17), b"wd\0\0\0\x09w123d\0\0\0\x09k", b"w"]


@given(st.lists(st.sampled_from([*FRAMES, b"?", b"w" + b"d\0\0\0w" * 9]), max_size=9), st.data())
def test_frames_are_found_as_far_as_they_surely_are(sent: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(_message(b"d", frame) for frame in sent)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    ends = np.cumsum([5 + len(frame) for frame in sent]).tolist()
    found = frames(np.frombuffer(cut, np.uint8)).tolist()
    assert found == ends[: len(found)]
    assert all(end <= len(cut) for end in found)


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_frames_arrive_whole_however_they_are_cut(pair: Pair, step: int) -> None:
    line, far = pair
    aside = _message(b"N", b"Mx\0\0") + _message(b"S", b"a\0b\0") + _message(b"A", b"pid!c\0\0")
    sent = [*FRAMES, b"w" + b"d" * 300, *FRAMES] * 3
    stream = aside.join([b"", *(_message(b"d", frame) for frame in sent)])
    found = list[bytes]()
    for at in range(0, len(stream), step):
        far.sendall(stream[at : at + step])
        found += _received(line)
    assert found == sent


def test_a_frame_that_is_larger_than_the_buffer_and_those_behind_it(pair: Pair) -> None:
    line, far = pair
    huge = b"w" + b"d\0\0\0\x09w" * BUFFER_BYTES
    stream = b"".join(_message(b"d", frame) for frame in (*FRAMES, huge, *FRAMES))
    far.setblocking(False)
    found, at = list[bytes](), 0
    while at < len(stream):
        at += far.send(stream[at : at + 2**16])
        found += _received(line)
    assert found == [*FRAMES, huge, *FRAMES]
    assert len(line._buffer) == BUFFER_BYTES


def test_an_error_ends_it_with_its_state(pair: Pair) -> None:
    line, far = pair
    fields = b"SERROR\0VERROR\0C22P03\0Mit can't be sent\0DA detail.\0Wslot\0\0"
    far.sendall(_message(b"d", FRAMES[0]) + _message(b"E", fields))
    assert _received(line) == FRAMES[:1]
    with pytest.raises(Ended) as ended:
        _received(line)
    assert ended.value.state == b"22P03"
    assert ended.value.message == "ERROR:  it can't be sent\nDETAIL:  A detail.\nCONTEXT:  slot"


@pytest.mark.parametrize("kind", [b"c", b"C", b"Z"])
def test_an_orderly_end_has_no_state(pair: Pair, kind: bytes) -> None:
    line, far = pair
    far.sendall(_message(kind, b"COPY 0\0"))
    with pytest.raises(Ended) as ended:
        _received(line)
    assert (ended.value.state, ended.value.message) == (None, "")


@pytest.mark.parametrize("kind", [b"N", b"S", b"A"])
def test_a_frame_whose_kind_was_damaged_is_not_skipped(pair: Pair, kind: bytes) -> None:
    line, far = pair
    frame = b"w" + struct.pack(">QQQ", 1, 1, 1) + b"I" + b"\0\0\1\2N\0\1t\0\0\0\3abc"
    far.sendall(_message(b"d", frame) + _message(kind, frame) + _message(b"d", frame))
    assert _received(line) == [frame]
    with pytest.raises(ConnectionError, match="lost synchronization"):
        _received(line)


def test_large_frames_keep_about_their_size(pair: Pair) -> None:
    line, far = pair
    far.setblocking(False)
    stream, kept, at = _message(b"d", b"w" + bytes(4_200_000)) * 5, list[Received](), 0
    while at < len(stream):
        at += far.send(stream[at : at + 2**16])
        received = line.receive(BUFFER_BYTES)
        if received is not None and len(received.lengths):
            kept.append(received)
    assert len(kept) == 5
    held = 0
    for part in kept:
        assert isinstance(part.blob, memoryview)
        assert isinstance(part.blob.obj, bytearray)
        held += len(part.blob.obj)
    assert held < 2 * len(stream)


@dataclass
class Connection:
    """As much of a libpq connection as a line takes over."""

    near: socket.socket
    ssl_in_use: bool = False
    nonblocking: int = 0
    pgconn_ptr: int | None = None

    @property
    def socket(self) -> int:
        return self.near.fileno()


COPY_BOTH = _message(b"W", b"\0\0\0")


@pytest.mark.parametrize(
    ("answer", "ssl", "taken"),
    [
        (COPY_BOTH, False, True),
        (COPY_BOTH, True, False),
        (COPY_BOTH[:3], False, False),
        (_message(b"E", b"Mno\0\0"), False, False),
        (b"", False, False),
    ],
)
def test_only_a_whole_answer_is_taken_over(answer: bytes, ssl: bool, taken: bool) -> None:
    near, far = socket.socketpair()
    with near, far:
        connection, before = Connection(near, ssl), psutil.Process().num_fds()
        far.sendall(answer)
        far.close()
        line = DirectLine.take_over(cast(PGconn, connection))
        assert (line is not None) == taken == bool(connection.nonblocking)
        left = b"" if line is not None else answer
        near.setblocking(False)
        assert near.recv(99) == left
        if line is not None:
            line.close()
        assert psutil.Process().num_fds() == before - 1


@pytest.mark.parametrize(
    "sent",
    [
        b"d\0\0\0\3",
        b"d\0\0\0\3w123",
        b"Z\0\1\0\0",
        b"d\xff\xff\xff\xff",
        b"d\x40\0\0\5",
        b"?\0\0\0\4",
    ],
)
def test_what_no_server_sends_loses_the_line(pair: Pair, sent: bytes) -> None:
    line, far = pair
    far.sendall(sent)
    with pytest.raises(ConnectionError, match="lost synchronization"):
        _received(line)


def test_a_closed_connection_loses_the_line(pair: Pair) -> None:
    line, far = pair
    assert line.receive(BUFFER_BYTES) is None
    far.sendall(_message(b"d", FRAMES[0])[:-3])
    assert _received(line) == []
    far.close()
    with pytest.raises(ConnectionError, match="closed"):
        _received(line)


def test_feedback_that_does_not_fit_is_sent_later_and_whole(pair: Pair) -> None:
    line, far = pair
    count = 20_000
    for number in range(count):
        line.send(struct.pack(">Q", number))
    far.settimeout(5)
    got = b""
    while len(got) < 13 * count:
        got += far.recv(2**20)
        _received(line)
    assert got == b"".join(_message(b"d", struct.pack(">Q", n)) for n in range(count))
    line.end(b"last", 5)
    assert far.recv(99) == _message(b"d", b"last") + b"c\0\0\0\4"


def test_what_a_look_brought(pair: Pair) -> None:
    line, far = pair
    asks, quiet = b"k" + bytes(7) + b"\7" + bytes(8) + b"\1", b"k" + bytes(7) + b"\5" + bytes(9)
    for sent, wanted, lsn in (([asks, FRAMES[0]], True, 0), ([FRAMES[0], quiet], False, 5)):
        far.sendall(b"".join(_message(b"d", frame) for frame in sent))
        received = line.receive(BUFFER_BYTES)
        assert received is not None
        for same in (received, Received.of(sent), Received.joined([received])):
            assert [bytes(frame) for frame in same.frames] == sent
            assert same.reply_wanted is wanted
        assert Received.of([quiet]).lsn == Lsn(5)
        assert received.lsn == Lsn(lsn or int.from_bytes(FRAMES[0][1:9]))
        twice = Received.joined([received, received])
        assert [bytes(frame) for frame in twice.frames] == sent * 2
