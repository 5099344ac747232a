"""What a broken or hostile server may send: every message with its lengths and counts forged.

``python -m cdc_assets_tests.hostile_wire SEED SECONDS`` feeds forged streams to the columnar
decoder for so long. It is a program because what it looks for may end the interpreter; the last
line on standard error is the stream that did.
Each stream is refused by name or read as the plain decoder reads it; anything else is an exit of 1.
"""

from __future__ import annotations

import random
import struct
import sys
import time
from collections.abc import Sequence

import numpy as np

from cdc_assets.errors import ReplicationProblem
from cdc_assets.flusher.decoder import Decoder
from cdc_assets.flusher.staged_rows import DecodeSpec
from cdc_assets.flusher.waiting import decoded
from cdc_assets.postgres.names import TableId
from cdc_assets_tests import pgoutput_reference as ref
from cdc_assets_tests.pgoutput_reference import UNCHANGED, Reference, Row, Spec

KEYED, FULL = 1, 2
SPECS = {KEYED: Spec(("id",)), FULL: Spec(())}
COLUMNS = ["id", "v"]

# A length or a count, of 16 or 32 bits: none, few, the sign's bit, all bits, far too many.
FORGED = [
    *(struct.pack(">H", n) for n in (0, 1, 2, 3, 0x7FFF, 0x8000, 0xFFFF)),
    *(struct.pack(">I", n) for n in (0, 1, 2, 5, 60, 4096, 2**20, 2**27)),
    *(struct.pack(">i", n) for n in (2**31 - 1, -(2**31), -1, -2, -5, -9, -20, -40)),
]

MESSAGES = [
    ref.relation(KEYED, COLUMNS, ["id"]),
    ref.relation(FULL, COLUMNS, COLUMNS, "f"),
    ref.insert(KEYED, ["1", "abc"]),
    ref.insert(FULL, ["2", None]),
    ref.update(KEYED, ["1", UNCHANGED]),
    ref.update(KEYED, ["2", "x"], ["1", None]),
    ref.update(FULL, ["3", "y"], ["2", "z"], b"O"),
    ref.delete(KEYED, ["2", None]),
    ref.delete(FULL, ["3", "y"], b"O"),
    ref.truncate(KEYED, FULL),
    b"M" + struct.pack(">BQ", 1, 5) + b"prefix\0" + struct.pack(">I", 4) + b"word",
    b"O" + struct.pack(">Q", 5) + b"elsewhere\0",
    b"Y" + struct.pack(">I", 7) + b"public\0mood\0",
    ref.insert(KEYED, ["5", "last"]),
]


def transaction() -> list[bytes]:
    return [
        ref.xlog(100, ref.begin(900, 0, 7)),
        *(ref.xlog(101 + number, message) for number, message in enumerate(MESSAGES)),
        ref.keepalive(300),
        ref.xlog(900, ref.commit(900, 908, 0)),
        ref.keepalive(910),
    ]


def looping() -> list[bytes]:
    """Inserts whose second value has a negative length, which leads back into the first one.

    There another length leads to the end, so that the message is as long as it says.
    """
    back, forth = b"t" + struct.pack(">i", -15), b"t" + struct.pack(">i", 10)
    body = b"N" + struct.pack(">H", 3) + b"t" + struct.pack(">i", 10) + forth + b"-----" + back
    wide = ref.relation(KEYED, ["id", "v", "w"], ["id"])
    row = b"I" + struct.pack(">I", KEYED) + body
    frames = transaction()
    frames[1:-3] = [ref.xlog(101, message) for message in (wide, row, row)]
    return frames


def forged(chance: random.Random) -> list[bytes]:
    """A transaction in which some frames are overwritten, cut, lengthened or doubled."""
    frames = transaction()
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        number = chance.randrange(len(frames))
        frame = bytearray(frames[number])
        place = (
            chance.randrange(25, len(frame))
            if len(frame) > 25
            else chance.randrange(len(frame) + 1)
        )
        how = chance.randrange(8)
        if how < 5:
            word = chance.choice(FORGED)
            frame[place : place + len(word)] = word
        elif how == 5 and place < len(frame):
            frame[place] = chance.randrange(256)
        elif how == 6:
            del frame[place:]
        else:
            frame[place:place] = chance.choice(FORGED)
        frames[number] = bytes(frame)
    return frames


def ours(frames: Sequence[bytes]) -> dict[int, list[Row]] | str:
    """The rows of each table, or why there are none."""
    decoder = Decoder(
        {
            oid: DecodeSpec(TableId("public", "t"), spec.key_columns) for oid, spec in SPECS.items()
        }.get
    )
    found: dict[int, list[Row]] = {oid: [] for oid in SPECS}
    try:
        decoder.feed(b"".join(frames), np.array([len(frame) for frame in frames], np.int32))
        taken = decoder.take_committed()
        for number, table in decoded(taken):
            table.validate(full=True)
            oid = taken[number].relation.oid
            found[oid] += ref.parse_staged(oid, table.to_pylist())
    except ReplicationProblem as problem:
        return str(problem)
    refused = [pending.unusable.why for pending in taken if pending.unusable is not None]
    return "; ".join(refused) or found


def plain(frames: Sequence[bytes]) -> dict[int, list[Row]]:
    decoder = Reference(SPECS)
    for frame in frames:
        decoder.feed(frame)
    return {oid: [row for row in decoder.rows if row.oid == oid] for oid in SPECS}


def main() -> int:
    chance, until = random.Random(int(sys.argv[1])), time.monotonic() + float(sys.argv[2])
    assert ours(transaction()) == plain(transaction())
    assert "longer than its message" in ours(looping())
    read = refused = 0
    while time.monotonic() < until or not (read and refused):  # on a busy machine, for longer
        frames = forged(chance)
        sys.stderr.write(f"{[frame.hex() for frame in frames]}\n")
        found = ours(frames)
        if isinstance(found, str):
            refused += 1
            continue
        read += 1
        if found != plain(frames):
            sys.stderr.write(f"not read as it was sent: {found}\n")
            return 1
    sys.stdout.write(f"{read} read, {refused} refused\n")
    return 0 if read and refused else 1


if __name__ == "__main__":
    sys.exit(main())
