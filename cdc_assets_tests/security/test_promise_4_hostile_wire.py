"""A hostile or damaged wire ends in a named error: never in a signal, a hang or a silent skip."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from psycopg.conninfo import make_conninfo

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher import flusher as main
from cdc_assets.flusher import stream
from cdc_assets.flusher.decode.decoder import Decoder
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.waiting import decoded
from cdc_assets.flusher.line.frames import Received
from cdc_assets.flusher.stream import Stream
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.names import TableId
from cdc_assets.process.backoff import Backoff
from cdc_assets_tests.security.damaging_relay import SLOW_SECONDS
from cdc_assets_tests.security.hostile_streams import looping
from cdc_assets_tests.support import pgoutput_reference as ref
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.pgoutput_reference import UNCHANGED
from cdc_assets_tests.support.waiting import wait_for

OURS, OTHER, NOBODYS = 7, 8, 9
TOLD = (ref.relation(OURS, ["id", "v"], ["id"]), ref.relation(OTHER, ["id"], ["id"]))


def _fuzz(seed: int, minutes: float) -> None:
    program = [sys.executable, "-m", "cdc_assets_tests.security.fuzz_wire"]
    done = subprocess.run(
        [*program, "--seed", str(seed), "--minutes", str(minutes)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60 * minutes + 200,
    )
    last = "\n".join(done.stderr.splitlines()[-12:])
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{last}"


def test_a_damaged_stream_is_refused_by_name_or_read_as_it_is() -> None:
    _fuzz(1, 0.05)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_damaged_stream_is_refused_by_name_or_read_as_it_is_for_long() -> None:
    _fuzz(random.randrange(2**32), float(os.environ.get("CDC_ASSETS_SOAK_SECONDS", "60")) / 60)


def _read(frames: Sequence[bytes], position: int = 0) -> tuple[int, list[str]]:
    """How many rows there are in a stream, and why some aren't."""
    spec = DecodeSpec(TableId("public", "t"), ("id",))
    decoder = Decoder({OURS: spec}.get, position=position)
    decoder.feed(b"".join(frames), np.array([*map(len, frames)], np.int32))
    taken = decoder.take_committed()
    rows = sum(table.num_rows for _, table in decoded(taken))
    return rows, [pending.unusable.why for pending in taken if pending.unusable is not None]


def _transaction(*messages: bytes, at: int = 900, ends_at: int | None = None) -> list[bytes]:
    return [
        ref.xlog(at - 100, ref.begin(at, 5, 7)),
        *(ref.xlog(0, message) for message in TOLD),
        *(ref.xlog(at - 99, message) for message in messages),
        ref.xlog(at + 8, ref.commit(at if ends_at is None else ends_at, at + 8, 5)),
    ]


def _ends_elsewhere(frame: bytes) -> bytes:
    """All that is still to come would be skipped."""
    return frame[:37] + b"\x01" + frame[38:] if frame[25:26] == b"C" else frame


INSERT = ref.insert(OURS, ["1", "abc"])
ORIGIN = b"O" + struct.pack(">Q", 5) + b"elsewhere\0"


def test_what_is_in_order_is_read() -> None:
    bystanders = (
        b"M" + struct.pack(">BQ", 1, 5) + b"prefix\0" + struct.pack(">I", 4) + b"word",
        ORIGIN,
        b"O" + bytes(9),
        b"Y" + struct.pack(">I", 7) + b"public\0mood\0",
    )
    frames = [*_transaction(*bystanders, INSERT), ref.keepalive(950), *_transaction(INSERT, at=950)]
    assert _read(frames, position=900) == (2, [])


def test_origins_are_read_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one for each transaction of a source that subscribes: nine times the work, else."""
    monkeypatch.setattr(pgoutput, "check_bystander", lambda *_: pytest.fail("one by one"))
    assert _read([*_transaction(ORIGIN, INSERT), *_transaction(ORIGIN, at=1900)]) == (1, [])


REFUSED: dict[str, tuple[list[bytes], str]] = {
    "lengths that lead in circles": (looping(), "longer than its message"),
    "a row of a table of which nothing was told": (
        _transaction(ref.insert(NOBODYS, ["1", "abc"])),
        "relation 9, of which nothing was told, at LSN 0/321 ",
    ),
    "a row before its table is told": (
        [*(whole := _transaction(INSERT))[:1], whole[3], *whole[1:3], *whole[4:]],
        "relation 7, of which nothing was told, at LSN 0/321 ",
    ),
    "a row that became a message of others": (
        _transaction(b"M" + INSERT[1:]),
        "kind 'M' in .* at LSN 0/321 ",
    ),
    "a row that became the name of a type": (_transaction(b"Y" + INSERT[1:]), "kind 'Y'"),
    "a row that became an origin": (_transaction(b"O" + INSERT[1:]), "kind 'O'"),
    "an origin of two names": (
        _transaction(b"O" + struct.pack(">Q", 5) + b"else\0where\0"),
        "kind 'O' .* at LSN 0/321 ",
    ),
    "an origin whose name doesn't end": (
        [*_transaction(ORIGIN, INSERT), *_transaction(ORIGIN[:-1], INSERT, at=1900)],
        "kind 'O' .* at LSN 0/709 ",
    ),
    "two transactions that became one": (
        [*_transaction(INSERT)[:-1], *_transaction(INSERT, at=1900)[1:]],
        "a Commit that isn't its transaction's at LSN 0/774 ",
    ),
    "a commit of another transaction": (
        _transaction(INSERT, ends_at=901),
        "a Commit that isn't its transaction's",
    ),
    "a commit that ends in the future": (
        [*(whole := _transaction(INSERT))[:-1], _ends_elsewhere(whole[-1])],
        "a Commit that isn't its transaction's",
    ),
    "a transaction that came before": (
        [*_transaction(INSERT), *_transaction(INSERT)],
        "a transaction that came before",
    ),
    "a keepalive from the future": (
        [*_transaction(INSERT), ref.keepalive(2**40), *_transaction(INSERT, at=1900)],
        "a transaction that came before",
    ),
    "a row from behind its commit": (
        [frame.replace(b"\x03\x21", b"\x13\x21") for frame in _transaction(INSERT)],
        "a change behind its transaction's commit",
    ),
    "an LSN that can't be": (_transaction(INSERT, at=2**63), "an LSN beyond"),
    "a truncate of nothing": (_transaction(b"T" + bytes(5)), "Truncate"),
    "a truncate of too many": (
        _transaction(b"T" + struct.pack(">IBI", 2**32 - 1, 0, OURS)),
        "Truncate",
    ),
    "a column that is neither key nor not": (
        _transaction(TOLD[0].replace(b"d\0\2\1id", b"d\0\2\5id")),
        "a Relation message",
    ),
    "an unknown replica identity": (
        _transaction(TOLD[0].replace(b"d\0\2\1id", b"g\0\2\1id")),
        "a Relation message",
    ),
    "a part of a streamed transaction": (
        _transaction(b"S" + struct.pack(">IB", 7, 1)),
        "kind b'S' in",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_its_place(name: str) -> None:
    frames, why = REFUSED[name]
    with pytest.raises(ReplicationProblem, match=why) as raised:
        _read(frames)
    assert "can't be read as pgoutput protocol 1" in str(raised.value)


@pytest.mark.parametrize(
    "message",
    [ref.insert(OURS, ["1", UNCHANGED]), ref.delete(OURS, ["1", UNCHANGED], b"O")],
    ids=["inserted", "deleted"],
)
def test_a_value_that_is_nowhere_parks_its_table_alone(message: bytes) -> None:
    assert _read(_transaction(message)) == (0, ["leaves a value out that is nowhere else"])


# --- a real server, a real flusher, and something on the line between them ---


Damage = Callable[[bytes], bytes]


def _commit_elsewhere(frame: bytes) -> bytes:
    return frame[:33] + b"\x01" + frame[34:] if frame[25:26] == b"C" else frame


def _cut(frame: bytes) -> bytes:
    return frame[:-3] if frame[25:26] == b"I" else frame


def _another_kind(frame: bytes) -> bytes:
    return frame[:25] + b"M" + frame[26:] if frame[25:26] == b"I" else frame


@pytest.mark.parametrize("damage", [_commit_elsewhere, _ends_elsewhere, _cut, _another_kind])
def test_nothing_of_a_damaged_batch_is_registered_or_acknowledged(
    source: Bench, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("create table u (id int primary key)")
    config = source.config("public.t", "public.u")
    source.flush(config)
    source.execute("insert into t values (0, 'before')")
    source.flush(config)
    flushed, confirmed = source.flushed(), source.confirmed()
    source.execute("insert into u values (1); insert into t values (1, 'damaged'), (2, 'too')")
    receive = Stream.receive

    def damaged(line: Stream, limit_bytes: int) -> Received:
        frames = receive(line, limit_bytes).frames
        return Received.of([damage(bytes(frame)) for frame in frames])

    with monkeypatch.context() as wire:
        wire.setattr(Stream, "receive", damaged)
        with pytest.raises(ReplicationProblem, match="can't be read as pgoutput protocol 1"):
            source.flush(config)
    assert (source.flushed(), source.confirmed()) == (flushed, confirmed)
    assert source.ids() == ["0"]
    assert source.entries("public.u") == []
    source.flush(config)  # over a line that is sound everything is there, once
    assert source.ids() == ["0", "1", "2"]
    assert len(source.log("public.u")) == 1


@contextmanager
def _line(source: Bench, more: str) -> Iterator[subprocess.Popen[str]]:
    """The source is reached by a ``damaging_relay`` for the length of the block."""
    info, dsn = source.connection.info, source.dsn
    program = [sys.executable, "-m", "cdc_assets_tests.security.damaging_relay"]
    relay = subprocess.Popen(
        [*program, info.host, str(info.port), more], stdout=subprocess.PIPE, text=True
    )
    assert relay.stdout is not None
    try:
        port = int(relay.stdout.readline())
        source.dsn = make_conninfo(dsn, port=port, sslmode="disable", gssencmode="disable")
        yield relay
    finally:
        source.dsn = dsn
        relay.kill()
        relay.wait()


@pytest.mark.parametrize("damage", [-7, 0, 3, 2**20], ids="{:+}".format)
def test_a_message_of_a_damaged_length_is_sent_again(
    source: Bench, monkeypatch: pytest.MonkeyPatch, damage: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Below pgoutput, where libpq finds messages: the line is opened anew, or the decoder says."""
    monkeypatch.setattr(stream, "ENDLESS_SECONDS", 2.0)
    source.execute("create table t (id int primary key, v text)")
    source.flush(source.config("public.t"))
    source.execute("insert into t values (1, 'damaged'), (2, 'too')")
    with _line(source, str(damage)) as relay:
        config = source.config("public.t")
        with suppress(ReplicationProblem):
            source.flush(config)
        source.flush(config)
    assert relay.stdout is not None
    assert relay.stdout.readline() == "damaged\n"
    assert source.ids() == ["1", "2"]
    said = ("hasn't ended in 2 s", "connection was lost", "can't be read as pgoutput protocol 1")
    assert any(each in caplog.text for each in said)


def test_a_row_that_takes_a_slow_line_longer_than_that_arrives_in_the_end(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "ENDLESS_SECONDS", SLOW_SECONDS / 3)
    monkeypatch.setattr(main, "BACKOFF", Backoff(first_seconds=0.01))
    source.execute("create table t (id int primary key, v text)")
    source.flush(source.config("public.t"))
    source.execute("insert into t values (1, 'slow')")
    with _line(source, "slow"), flushing(source.config("public.t")) as progress:
        wait_for(lambda: source.log("public.t"), 30)
    assert (
        progress.sessions > 1
    )  # it took too long at least once; how often, a busy machine decides
