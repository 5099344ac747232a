"""Hostile streams, through all that the decoder process does with them, held against a plain one.

``python -m cdc_assets_tests.security.fuzz_wire --seed 1 --minutes 30``. Each stream is refused with
the decoder's own error, or what is staged of it equals what the plain, strict decoder reads; where
it is refused, no more than whole transactions before that were staged. Anything else ends the
program with the case's seed, which ``--only`` runs again. It is a program, because
what it looks for may end the interpreter: a signal, more time or more memory than a case may take.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from pyarrow import fs  # noqa: F401 - loaded before memory is bounded

from cdc_assets.flusher.decode import decoder
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decoder_process import link
from cdc_assets.flusher.decoder_process import loop as decoder_process
from cdc_assets.flusher.decoder_process.link import (
    Failed,
    Flushed,
    Refused,
    Settings,
    Specs,
)
from cdc_assets.flusher.stage.staging import WrittenRows
from cdc_assets.log.staged.storage import Storage
from cdc_assets.postgres.catalog import Attribute
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.security import hostile_streams
from cdc_assets_tests.security.hostile_streams import Recorded
from cdc_assets_tests.support import pgoutput_reference as ref
from cdc_assets_tests.support.pgoutput_reference import Reference
from cdc_assets_tests.support.staged_rows import Row, parse_staged

# What one case may take: of the processor, in all (the machine is shared), of memory besides what
# the program has anyway.
CPU_SECONDS, SECONDS, MEMORY_BYTES = 20, 300, 2**30
OUTCOMES = ("read", "refused", "parked")
NAMED = "can't be read as pgoutput protocol 1"


@dataclass(slots=True)
class Told:
    """What the decoder process answered; ``rows`` of each table, in the order of the files."""

    rows: dict[int, list[Row]] = field(default_factory=dict)
    position: int = 0
    commit_end: int = 0
    refused: set[int] = field(default_factory=set)
    failure: str | None = None


class Bench:
    """A decoder process's work in this process, for one case after the other."""

    def __init__(self, recorded: Recorded, folder: Path) -> None:
        self.recorded, self.folder = recorded, folder
        self.oids = {TableId.parse(name): oid for oid, name, *_ in recorded.tables}
        self.specs = {
            oid: DecodeSpec(TableId.parse(name), key, columns=columns)
            for oid, name, key, columns in recorded.tables
        }
        known = {
            oid: tuple(
                Attribute(number, column, False, kind, modifier, "", False, None)
                for number, column, kind, modifier in columns
            )
            for oid, _, _, columns in recorded.tables
        }
        decoder_process._attributes = lambda settings, oid, patience: (known[oid], False)

    def told(self, batches: Sequence[Sequence[bytes]], flush_bytes: int) -> Told:
        ours, theirs = Pipe()
        replies = list[object]()
        sends = threading.Thread(target=self._send, args=(ours, batches, flush_bytes), daemon=True)
        takes = threading.Thread(target=_take, args=(ours, replies), daemon=True)
        sends.start()
        takes.start()
        decoder_process.serve(theirs)
        theirs.close()
        takes.join()
        sends.join()
        ours.close()
        found = Told()
        for reply in replies:
            if isinstance(reply, Flushed):
                found.position, found.commit_end = reply.position, reply.commit_end
                for file in reply.staged:
                    rows = self._read(file)
                    found.rows.setdefault(rows[0].oid, []).extend(rows)
            elif isinstance(reply, Refused):
                found.refused.add(self.oids[reply.table])
            elif isinstance(reply, Failed):
                found.failure = reply.summary
        shutil.rmtree(self.folder / "staging", ignore_errors=True)
        return found

    def _send(self, pipe: Connection, batches: Sequence[Sequence[bytes]], flush: int) -> None:
        staging = (self.folder / "staging").as_uri()
        try:
            pipe.send(
                Settings("src", "", "cdc_src", staging, Storage(), flush, 0.0, self.recorded.begin)
            )
            pipe.send(Specs(self.specs))
            for frames in batches:
                link.send_frames(pipe, np.array([*map(len, frames)], np.int32), b"".join(frames))
            pipe.send(link.Finish())
        except OSError:
            return  # it has refused what came before

    def _read(self, file: WrittenRows) -> list[Row]:
        return parse_staged(self.oids[file.table], file.read(Storage()).to_pylist())


def _take(pipe: Connection, replies: list[object]) -> None:
    try:
        while True:
            replies.append(pipe.recv())
    except (EOFError, OSError):
        return


def judged(told: Told, frames: Sequence[bytes], recorded: Recorded) -> str:
    """What became of the stream; AssertionError if it is neither refused nor read as it is."""
    plain, refusal = Reference(recorded.specs, recorded.begin), ""
    otherwise = set[int]()  # whose columns are others than the catalog's: that is hidden.py's work
    try:
        for frame in frames:
            plain.feed(frame)
            otherwise |= _told_otherwise(plain, recorded)
    except ref.Refused as error:
        refusal = str(error)
    torn = str(plain.torn or "") if plain.transaction is not None else ""
    staged = dict[int, list[Row]]()
    until = 0 if told.failure and not told.commit_end else None
    if told.failure:
        assert NAMED in told.failure, told.failure
        assert refusal or torn, f"refused, and nothing is wrong: {told.failure}"
        until = max((n for end, n in plain.ends if end <= told.commit_end), default=0)
        ends = {0, *(end for end, _ in plain.ends)}
        assert told.commit_end in ends, f"staged up to {told.commit_end}, where nothing ends"
    else:
        assert not refusal, f"not refused: {refusal}"
        assert told.position == plain.position, (told.position, plain.position)
        assert told.refused - otherwise <= plain.unusable, (told.refused, plain.unusable)
        if plain.transaction is None:
            assert plain.unusable - otherwise <= told.refused, (told.refused, plain.unusable)
    for row in plain.rows[:until]:
        staged.setdefault(row.oid, []).append(row)
    for oid in {*staged, *told.rows} - otherwise - told.refused - plain.unusable:
        assert told.rows.get(oid, []) == staged.get(oid, []), f"rows of {oid} aren't what was sent"
    return "refused" if told.failure else "parked" if told.refused else "read"


def _told_otherwise(plain: Reference, recorded: Recorded) -> set[int]:
    return {
        oid
        for oid, _, _, columns in recorded.tables
        if (told := plain.relations.get(oid)) is not None
        and told.identity == "f"
        and told.columns != tuple((*rest,) for _, *rest in columns)
    }


def run(bench: Bench, seed: int) -> str:
    """One case. Raises AssertionError for a finding."""
    chance = random.Random(seed)
    frames = hostile_streams.damaged(chance, bench.recorded)
    batches = hostile_streams.batches(chance, frames)
    decoder.DIVIDED_BYTES = chance.choice([0, 200, 16 * 2**20])
    flush_bytes = chance.choice([1, 500, 5000, 64 * 2**20])
    return judged(bench.told(batches, flush_bytes), frames, bench.recorded)


def bounded() -> None:
    """From now on this process ends by a signal, or fails, where a case takes too much."""
    faulthandler.enable()
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + MEMORY_BYTES, has + MEMORY_BYTES))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", type=int, metavar="CASE", help="one case, and its frames")
    parser.add_argument("--go-on", action="store_true", help="past findings")
    options = parser.parse_args(arguments)
    recorded = Recorded.read()
    room = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=room if room.is_dir() else None) as folder:
        bench = Bench(recorded, Path(folder))
        plain = bench.told([recorded.frames], 64 * 2**20)  # loads whatever is loaded late
        assert judged(plain, recorded.frames, recorded) == "read"
        bounded()
        if options.only is not None:
            for frame in hostile_streams.damaged(random.Random(options.only), recorded):
                sys.stdout.write(f"{frame[:25].hex()} {frame[25:][:200]!r}\n")
            sys.stdout.write(f"{run(bench, options.only)}\n")
            return 0
        return _many(bench, options.seed, 60 * options.minutes, go_on=options.go_on)


def _many(bench: Bench, seed: int, seconds: float, *, go_on: bool) -> int:
    counts, began, said = Counter[str](), time.monotonic(), 0.0
    for case in itertools.count(seed * 10**9):
        passed = time.monotonic() - began
        if passed >= seconds and min(counts[outcome] for outcome in OUTCOMES) > 0:
            break  # on a busy machine it goes on until there was one of each
        if passed - said >= 60:
            said = passed
            sys.stdout.write(f"{passed:.0f} s: {json.dumps(counts)}\n")
            sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.alarm(SECONDS)
        sys.stderr.write(f"case {case}\n")
        try:
            outcome = run(bench, case)
        except AssertionError as finding:
            if not go_on:
                raise
            outcome = str(finding)[:150]
            sys.stdout.write(f"case {case}: {outcome}\n")
        counts[outcome] += 1
    sys.stdout.write(f"{sum(counts.values())} streams: {json.dumps(counts)}\n")
    return 0 if set(counts) == {*OUTCOMES} else 1


if __name__ == "__main__":
    sys.exit(main())
