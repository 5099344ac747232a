"""Streams of frames as a broken or hostile server may send them.

A stream that a real server sent (``record_wire``) is damaged: bits, bytes and lengths, frames cut,
lost, doubled and moved, messages that nobody asked for, rows whose columns are of another kind.
Pure functions of a random generator: the same seed gives the same streams.
"""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass

from cdc_assets_tests.security.record_wire import RECORDED
from cdc_assets_tests.support import pgoutput_reference as ref
from cdc_assets_tests.support.pgoutput_reference import UNCHANGED, Spec, Value

HEADER = 25
# A length or a count, of 16 or 32 bits: none, few, the sign's bit, all bits, far too many.
FORGED = [
    *(struct.pack(">H", n) for n in (0, 1, 2, 3, 1600, 0x7FFF, 0x8000, 0xFFFF)),
    *(struct.pack(">I", n) for n in (0, 1, 2, 5, 60, 4096, 2**20, 2**27)),
    *(struct.pack(">i", n) for n in (2**31 - 1, -(2**31), -1, -2, -5, -9, -15, -20, -40)),
    *(struct.pack(">Q", n) for n in (0, 1, 2**32, 2**62, 2**63, 2**64 - 1)),
]


@dataclass(frozen=True, slots=True)
class Recorded:
    """``tables``: of each followed one its oid, name, key and columns, as the catalog has them."""

    tables: tuple[tuple[int, str, tuple[str, ...], tuple[tuple[int, str, int, int], ...]], ...]
    frames: tuple[bytes, ...]

    @property
    def begin(self) -> int:
        """The LSN that it was streamed from."""
        return int.from_bytes(self.frames[0][1:9])

    @property
    def specs(self) -> dict[int, Spec]:
        return {oid: Spec(key) for oid, _, key, _ in self.tables}

    @classmethod
    def read(cls) -> Recorded:
        found = json.loads(RECORDED.read_text())
        tables = tuple(
            (t["oid"], t["name"], (*t["key"],), tuple((*column,) for column in t["columns"]))
            for t in found["tables"]
        )
        return cls(tables, tuple(map(bytes.fromhex, found["frames"])))


def damaged(chance: random.Random, recorded: Recorded) -> list[bytes]:
    """Some transactions in a row, with a few things wrong."""
    begins = [i for i, frame in enumerate(recorded.frames) if frame[HEADER:26] == b"B"]
    relations = [frame for frame in recorded.frames if frame[HEADER:26] == b"R"]
    first = chance.choice([0, 0, 0, *begins])
    last = min([*(i for i in begins if i > first + chance.choice([5, 20, 200]))], default=None)
    frames = [*recorded.frames[first:last]]
    if first:  # what was told before the first of them
        frames[1:1] = [*dict.fromkeys(relations)][: chance.choice([3, 9])]
    frames = _with_keepalives(chance, frames)
    if chance.random() < 0.05:
        return frames  # as it was sent
    for _ in range(chance.choice([1, 1, 1, 1, 2, 5])):
        chance.choice(_DAMAGES)(chance, frames)
    return frames


def looping() -> list[bytes]:
    """Inserts whose second value has a negative length, which leads back into the first one.

    There another length leads to the end, so that the message is as long as it says.
    """
    back, forth = b"t" + struct.pack(">i", -15), b"t" + struct.pack(">i", 10)
    body = b"N" + struct.pack(">H", 3) + b"t" + struct.pack(">i", 10) + forth + b"-----" + back
    row = ref.xlog(101, b"I" + struct.pack(">I", 7) + body)
    told = ref.xlog(0, ref.relation(7, ["id", "v", "w"], ["id"]))
    first, last = ref.xlog(100, ref.begin(900, 0, 7)), ref.xlog(908, ref.commit(900, 908, 0))
    return [first, told, row, row, last]


def batches(chance: random.Random, frames: list[bytes]) -> list[list[bytes]]:
    """The frames as they may arrive: one by one, all at once, or cut anywhere."""
    how = chance.random()
    if how < 0.4:
        return [frames]
    if how < 0.5:
        return [[frame] for frame in frames]
    cuts = sorted(chance.randrange(len(frames) + 1) for _ in range(chance.choice([1, 2, 5])))
    parts = [frames[i:j] for i, j in zip([0, *cuts], [*cuts, len(frames)], strict=True)]
    return [part for part in parts if part]


def _with_keepalives(chance: random.Random, frames: list[bytes]) -> list[bytes]:
    if chance.random() < 0.5:
        return frames
    kept = list[bytes]()
    for frame in frames:
        kept.append(frame)
        if frame[HEADER:26] == b"C":
            kept.append(ref.keepalive(struct.unpack_from(">Q", frame, HEADER + 10)[0]))
        elif chance.random() < 0.02:
            kept.append(ref.keepalive(struct.unpack_from(">Q", frame, 1)[0], reply=True))
    return kept


# --- damages: each changes ``frames``, which may be empty by then ---


def _one(chance: random.Random, frames: list[bytes]) -> tuple[int, bytearray]:
    if not frames:
        frames.append(ref.keepalive(1))
    number = chance.randrange(len(frames))
    return number, bytearray(frames[number])


def _place(chance: random.Random, frame: bytearray) -> int:
    """Mostly behind the header, which few things read."""
    if len(frame) > HEADER and chance.random() < 0.85:
        return chance.randrange(HEADER, len(frame))
    return chance.randrange(len(frame)) if frame else 0


def _flip(chance: random.Random, frames: list[bytes]) -> None:
    number, frame = _one(chance, frames)
    if frame:
        frame[_place(chance, frame)] ^= 1 << chance.randrange(8)
    frames[number] = bytes(frame)


def _kind(chance: random.Random, frames: list[bytes]) -> None:
    number, frame = _one(chance, frames)
    if len(frame) > HEADER:
        frame[chance.choice([0, HEADER, HEADER])] = chance.choice(
            [*b"BCORYIUDTMSEcAbPKrpwk\0", chance.randrange(256)]
        )
    frames[number] = bytes(frame)


def _overwrite(chance: random.Random, frames: list[bytes]) -> None:
    number, frame = _one(chance, frames)
    word, place = chance.choice(FORGED), _place(chance, frame)
    frame[place : place + len(word)] = word
    frames[number] = bytes(frame)


def _insert(chance: random.Random, frames: list[bytes]) -> None:
    number, frame = _one(chance, frames)
    place = chance.choice([_place(chance, frame), len(frame)])
    frame[place:place] = chance.choice([*FORGED, b"\0", b"x", b"t", chance.randbytes(9)])
    frames[number] = bytes(frame)


def _cut(chance: random.Random, frames: list[bytes]) -> None:
    number, frame = _one(chance, frames)
    place = _place(chance, frame)
    del frame[place : chance.choice([len(frame), place + 1, place + 4])]
    frames[number] = bytes(frame)


def _lengthen(chance: random.Random, frames: list[bytes]) -> None:
    """A number that is somewhere becomes a little more or less."""
    number, frame = _one(chance, frames)
    size = chance.choice([2, 4, 8])
    if len(frame) > HEADER + size:
        place = chance.randrange(1, len(frame) - size + 1)
        found = int.from_bytes(frame[place : place + size]) + chance.choice([-2, -1, 1, 2, 2**15])
        frame[place : place + size] = (found % 2 ** (8 * size)).to_bytes(size)
    frames[number] = bytes(frame)


def _lose(chance: random.Random, frames: list[bytes]) -> None:
    number, _ = _one(chance, frames)
    del frames[number : number + chance.choice([1, 1, 3, 10])]


def _double(chance: random.Random, frames: list[bytes]) -> None:
    number, _ = _one(chance, frames)
    run = frames[number : number + chance.choice([1, 1, 3, 10])]
    place = chance.choice([number, len(frames), chance.randrange(len(frames) + 1)])
    frames[place:place] = run * chance.choice([1, 1, 3])


def _swap(chance: random.Random, frames: list[bytes]) -> None:
    one, _ = _one(chance, frames)
    other, _ = _one(chance, frames)
    frames[one], frames[other] = frames[other], frames[one]


def _foreign(chance: random.Random, frames: list[bytes]) -> None:
    """A message that is well-formed, but not here, or was never asked for."""
    number, frame = _one(chance, frames)
    oids = {int.from_bytes(f[26:30]) for f in frames if f[HEADER:26] == b"R"}
    lsn, oid = int.from_bytes(frame[1:9]), chance.choice([*sorted(oids), 99, 0])
    name = chance.choice(["v", "id", "id", "", "b", "a" * 70])
    columns = chance.choice([["id", "v"], ["id", name, name], [], [f"c{i}" for i in range(1700)]])
    message = chance.choice(
        [
            b"M" + struct.pack(">BQ", 1, 5) + b"prefix\0" + struct.pack(">I", 4) + b"word",
            b"M" + struct.pack(">BQ", 0, 5) + b"p\0" + struct.pack(">I", 2**31),
            b"O" + struct.pack(">Q", 5) + b"elsewhere\0",
            b"Y" + struct.pack(">I", oid) + b"public\0mood\0",
            b"S" + struct.pack(">IB", 7, 1),
            b"E",
            b"c" + struct.pack(">IBQQq", 7, 0, lsn, lsn, 0),
            b"A" + struct.pack(">II", 7, 7),
            b"P" + struct.pack(">BQQqI", 0, lsn, lsn, 0, 7) + b"gid\0",
            ref.begin(chance.choice([lsn, 1, 2**62]), 0, 7),
            ref.commit(lsn, lsn + 8, 0),
            ref.relation(oid, columns, columns[:1], chance.choice("dfinx")),
            ref.truncate(*[oid] * chance.choice([0, 1, 2, 500])),
            b"T" + struct.pack(">IB", chance.choice([2, 2**28, 2**32 - 1]), 0) + bytes(4),
            ref.insert(oid, ["1"] * chance.choice([1, 2, 4, 1700])),
            ref.delete(oid, ["1", None], b"O"),
        ]
    )
    frames.insert(number, ref.xlog(lsn, message))


def _values(chance: random.Random, frames: list[bytes]) -> None:
    """A row whose columns are of other kinds, contents or number; its lengths are right."""
    rows = [i for i, frame in enumerate(frames) if frame[HEADER:26] in (b"I", b"U", b"D")]
    if not rows:
        return
    number = chance.choice(rows)
    frame = frames[number]
    out, at = frame[: HEADER + 5], HEADER + 5
    try:
        while at < len(frame):
            mark, (values, after) = frame[at : at + 1], _row(frame, at + 1)
            if values and chance.random() < 0.7:
                values[chance.randrange(len(values))] = _value(chance)
            if chance.random() < 0.1:
                values = chance.choice([values[:-1], [*values, b"more"]])
            if chance.random() < 0.1:
                mark = chance.choice([b"N", b"K", b"O", b"x"])
            out, at = out + mark + ref.tuple_(values), after
    except (struct.error, IndexError):
        return  # it was damaged before
    frames[number] = out


def _row(frame: bytes, at: int) -> tuple[list[Value], int]:
    (count,) = struct.unpack_from(">H", frame, at)
    values, at = list[Value](), at + 2
    for _ in range(count):
        kind, at = frame[at], at + 1
        if kind != ord("t"):
            values.append(None if kind == ord("n") else UNCHANGED)
            continue
        (size,) = struct.unpack_from(">I", frame, at)
        values.append(frame[at + 4 : at + 4 + size])
        at += 4 + size
    return values, at


def _value(chance: random.Random) -> Value:
    return chance.choice(
        [
            *(None, UNCHANGED, UNCHANGED, b"", b"\0", b"a\0b", b"\xff\xfe", b"\xed\xa0\x80"),
            *(b'"\\\x01\x1f\x7f', "🎉é\u2028".encode(), b"{}", b"\xf4\x90\x80\x80", b"1"),
            *(chance.randbytes(chance.randrange(40)), b'"' * 70_000, b"x" * 300_000),
        ]
    )


_DAMAGES = (
    *(_flip, _flip, _kind, _overwrite, _overwrite, _insert, _cut, _lengthen),
    *(_lose, _double, _swap, _foreign, _foreign, *[_values] * 6),
)
