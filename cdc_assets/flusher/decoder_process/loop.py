"""The process beside the receiver that decodes and stages; all heavy work of the flusher is here.

Two threads of one interpreter would fight over its lock and stall the server's sender (measured),
so the receiver pipes raw frames to this process and only ever waits for sockets.

The conversation, over one duplex pipe: the receiver sends :class:`Frames` (each followed by the
joined bytes), :class:`Specs`, :class:`Finish`; this process answers :class:`Consumed` after each
batch, :class:`Flushed` in the order of the log, :class:`Excluded` and :class:`Refused` before what
they are about, :class:`Retrying` whenever a file can't be stored and will be tried again, or
:class:`Failed` once, and then it ends. It never decides what is safe: ``Flushed`` means "these
files exist, and once they are registered everything below ``position`` is safe"; the receiver
registers and acknowledges (invariants 1 and 2).

Invariant 3: rows of an open transaction that outgrow ``flush_bytes`` are staged in parts as they
arrive. Everything committed is reported before the first part is staged, so the parts stand in
commit order; they are reported at the commit, or never.

The process ends when the pipe does, whatever it waits for: it can't outlive the receiver.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import tenacity

from cdc_assets.errors import CdcError, TableProblem, first_line
from cdc_assets.flusher.decode.attribute_numbers import key_of
from cdc_assets.flusher.decode.decoder import Decoder, frames_bytes
from cdc_assets.flusher.decode.excluded import Hidden, hidden
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.waiting import Pending
from cdc_assets.flusher.decoder_process.link import (
    Consumed,
    Excluded,
    Failed,
    Finish,
    Flushed,
    Frames,
    Refused,
    Retrying,
    Settings,
    Specs,
    received_blob,
)
from cdc_assets.flusher.stage.staging import Staging, WrittenRows
from cdc_assets.masks import Mask
from cdc_assets.messages.texts import command, one_line
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.pgoutput import Relation
from cdc_assets.process.traces import log_level, log_to_stderr, trace

if TYPE_CHECKING:
    from cdc_assets.postgres.catalog import Attribute

logger = logging.getLogger(__name__)

# The names and masks of columns whose values stay in the source.
_Covers = tuple[frozenset[str], tuple[tuple[str, Mask], ...]]

_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


# A flush costs some 60 µs for every table that has changes, however few. To make that little per
# change, changes gather between flushes: until the tables with changes have this much each …
WORTH_A_TURN_BYTES = 256 * 2**10
# … or this many times flush_bytes wait;
MOST_GATHERED = 1.5
# if fewer changes come: for at least this many times the duration of the last flush …
REST = 2.0
# … but never for longer than this.
LONGEST_REST_SECONDS = 10.0
# How long a transaction that alters a table is awaited; all that is streamed waits meanwhile. Once
# one was awaited in vain, no other is for some minutes.
ALTERED_SECONDS, _IMPATIENT_SECONDS = 10.0, 600.0
_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class _Worker:
    """The loop's state: what is decoded, staged of an open transaction, and reported."""

    pipe: Connection
    settings: Settings
    staging: Staging
    specs: dict[int, DecodeSpec] = field(default_factory=dict)
    decoder: Decoder = field(init=False)
    parts: list[WrittenRows] = field(default_factory=list)
    hidden: dict[tuple[int, _Covers], Hidden] = field(default_factory=dict)
    reported: int = field(init=False)
    due: float | None = None
    flush_seconds: float = 0.0
    impatient_until: float = 0.0

    def __post_init__(self) -> None:
        self.reported = self.settings.begin
        self.decoder = Decoder(self._spec_of, self._as_sent, self.reported, self.settings.markers)

    def _spec_of(self, oid: int) -> DecodeSpec | None:
        return self.specs.get(oid)

    def _as_sent(self, spec: DecodeSpec, relation: Relation) -> DecodeSpec:
        began = time.monotonic()
        patience = ALTERED_SECONDS if began >= self.impatient_until else 0.0
        now, listed = _attributes(self.settings, relation.oid, patience)
        if time.monotonic() - began >= ALTERED_SECONDS:  # many may be locked for a long time
            self.impatient_until = time.monotonic() + _IMPATIENT_SECONDS
        sent = spec
        if relation.replica_identity == "f":
            key, doubt = key_of(spec, relation, now, listed=listed)
            sent = replace(sent, key_columns=key, doubt=spec.doubt or doubt)
        if spec.excluded or spec.masks or spec.mask_numbers:
            found = self._hidden(spec, relation, now, listed=listed)
            sent = replace(sent, excluded=found.names, masks=found.masks)
        return sent

    def _hidden(
        self, spec: DecodeSpec, relation: Relation, now: Sequence[Attribute], *, listed: bool
    ) -> Hidden:
        covers = relation.oid, (spec.excluded, spec.masks)
        if (seen := self.hidden.get(covers)) is not None:
            numbers = {**dict(seen.mask_numbers), **dict(spec.mask_numbers)}
            spec = replace(
                spec,
                excluded_numbers=spec.excluded_numbers | seen.numbers,
                mask_numbers=tuple(numbers.items()),
            )
        found = hidden(spec, relation, now, listed=listed)
        is_new = found.numbers != spec.excluded_numbers or found.mask_numbers != spec.mask_numbers
        if is_new or found.doubtful:
            self.hidden[covers] = found
            masked = {number: mask.rule for number, mask in found.mask_numbers}
            self.pipe.send(Excluded(spec.table, found.numbers, found.doubtful, masked))
        told = {c.name for c in relation.columns}
        for names, what in (
            (found.names - spec.excluded, "not staged, as excluded"),
            (dict(found.masks).keys() - dict(spec.masks).keys(), "masked"),
        ):
            if renamed := told & names:
                said = f"{spec.table}: {what} under another name: {', '.join(sorted(renamed))}"
                logger.warning("%s", one_line(said))
        return found

    def run(self) -> None:
        """Serve until Finish, or until the receiver is gone."""
        while True:
            patience = None if self.due is None else max(0.0, self.due - time.monotonic())
            if self.pipe.poll(patience):
                command = self.pipe.recv()
                if isinstance(command, Finish):
                    self.flush(final=True)
                    return
                if isinstance(command, Specs):
                    self.decoder.divide()
                    self.specs = dict(command.by_oid)
                elif isinstance(command, Frames):
                    self.take_in(command)
            if self.is_due():
                self.flush()

    def is_due(self) -> bool:
        if self.due is None or (late := time.monotonic() - self.due) < 0:
            return False
        # While more frames wait, a flush doesn't make the log current.
        return late >= LONGEST_REST_SECONDS or not self.pipe.poll(0)

    def take_in(self, command: Frames) -> None:
        lengths = np.frombuffer(command.lengths, np.int32)
        size = frames_bytes(lengths, command.gap)
        blob = received_blob(self.pipe, size)
        commits = self.decoder.commit_end
        at = 0  # of the first frame that isn't taken in yet
        while len(lengths):
            taken = self.decoder.feed(blob[at:], lengths, command.gap)
            at += frames_bytes(lengths[:taken], command.gap)
            lengths = lengths[taken:]
            if self.decoder.markers.at_commit:
                self.flush()
        del blob  # waiting changes are copies, and a large value has copies enough
        self.say_consumed(size)
        committed = self.decoder.commit_end != commits
        if self.is_full() or (committed and self.parts) or self.is_over():
            self.flush()
        elif self.due is None and self.decoder.position > self.reported:
            rest = min(REST * self.flush_seconds, LONGEST_REST_SECONDS)
            self.due = time.monotonic() + max(self.settings.flush_interval_seconds, rest)
        if self.decoder.open_bytes >= self.settings.flush_bytes:
            if self.decoder.position > self.reported:
                self.flush()
            self.parts += self.stage(self.decoder.take_open())
            self.say_consumed(0)

    def is_full(self) -> bool:
        """Whether the committed changes are worth a flush, or no more may wait."""
        decoder, least = self.decoder, self.settings.flush_bytes
        worth = decoder.committed_tables * WORTH_A_TURN_BYTES
        waiting = decoder.committed_bytes + decoder.open_bytes
        return decoder.committed_bytes > 0 and waiting >= min(
            max(worth, least), MOST_GATHERED * least
        )

    def is_over(self) -> bool:
        """Whether all that somebody waits for has arrived now."""
        until = self.settings.until
        return until is not None and self.reported < until <= self.decoder.position

    def say_consumed(self, byte_size: int) -> None:
        waiting = self.decoder.committed_bytes + self.decoder.open_bytes
        self.pipe.send(Consumed(byte_size, waiting))

    def stage(self, taken: Sequence[Pending]) -> list[WrittenRows]:
        """Write the rows of each; a table whose rows can't be identified is refused."""
        staged = self.staging.write(taken)
        for pending in taken:
            if (unusable := pending.unusable) is not None:
                table = pending.spec.table
                problem = TableProblem(
                    table,
                    f"a change at LSN {Lsn(unusable.lsn)} {unusable.why}, so it isn't in the log.",
                    "See that each of its partitions has the table's own replica identity, then"
                    f" copy it anew: {command('resync', table)}",
                )
                self.pipe.send(Refused(table, unusable.commit_lsn, str(problem)))
        return staged

    def flush(self, *, final: bool = False) -> None:
        """Stage and report all that is committed."""
        began = time.monotonic()
        decoder = self.decoder
        staged: list[WrittenRows] = []
        if decoder.position > self.reported:
            # The position stays while a transaction is open, and all before it was reported when
            # its first part was staged: so any parts there are now are committed.
            staged = self.parts + self.stage(decoder.take_committed())
            self.parts = []
        self.due = None
        self.flush_seconds = time.monotonic() - began
        if decoder.position > self.reported or final:
            self.reported = decoder.position
            self.pipe.send(
                Flushed(
                    tuple(staged),
                    decoder.position,
                    decoder.commit_end,
                    _commit_time(decoder.commit_time),
                    self.flush_seconds,
                    final,
                    decoder.markers.take(),
                )
            )


def _attributes(
    settings: Settings, oid: int, patience: float
) -> tuple[tuple[Attribute, ...], bool]:
    """The source's catalog of one table, and whether the publication lists its columns.

    Waits for a source that is down; and for ``patience`` seconds for a transaction that may alter
    the table, as its COMMIT may wait for a standby: it is in the stream then, and its columns
    aren't in the catalog yet.
    """
    # Few decoders need this, and it takes 20 MB.
    import psycopg

    from cdc_assets.postgres.catalog import attributes
    from cdc_assets.postgres.horizon import is_being_altered
    from cdc_assets.postgres.publication.contents import listed_columns
    from cdc_assets.postgres.session.connect import connect

    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(psycopg.OperationalError),
        wait=tenacity.wait_random_exponential(multiplier=0.2, max=5.0),
        before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
    ):
        with attempt:
            name = f"cdc_assets {settings.source} decoder"
            with connect(settings.source_dsn, application_name=name) as connection:
                deadline = time.monotonic() + patience
                while is_being_altered(connection, oid) and time.monotonic() < deadline:
                    time.sleep(_LOOK_SECONDS)
                listed = listed_columns(connection, settings.publication, [oid])
                return attributes(connection, oid), oid in listed
    raise AssertionError  # it is tried again for ever


def _commit_time(microseconds: int | None) -> datetime | None:
    if microseconds is None:
        return None
    return _POSTGRES_EPOCH + timedelta(microseconds=microseconds)


def serve(pipe: Connection) -> int:
    """Serve to the end; returns the exit code. Errors are reported to the receiver."""
    settings: Settings = pipe.recv()
    staging = Staging(
        settings.staging_uri,
        settings.source,
        settings.storage,
        on_trouble=lambda reason: pipe.send(Retrying(reason)),  # the loop waits and sends nothing
    )
    try:
        _Worker(pipe, settings, staging).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 1  # the receiver is gone; nobody wants the answer
    except Exception as error:  # noqa: BLE001 - whatever it is, the receiver has to hear of it
        ours, told = isinstance(error, CdcError), first_line(error)
        pipe.send(Failed(told if ours else f"{type(error).__name__}: {told}", trace(error)))
        return 1
    finally:
        staging.close()
    return 0


def _end_with_receiver(pipe: Connection) -> None:
    """End this process, in the midst of an upload too, once the other end of the pipe is closed."""
    hung_up = select.poll()
    hung_up.register(pipe.fileno(), 0)  # nothing but the hang-up
    hung_up.poll()
    os._exit(1)


def main() -> None:
    """Serve the pipe whose descriptor is the only argument."""
    # Ctrl-C and a group's SIGTERM are the receiver's to handle: it still wants what is complete.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    log_to_stderr(log_level())
    pipe = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_receiver, args=(pipe,), daemon=True).start()
    sys.exit(serve(pipe))
