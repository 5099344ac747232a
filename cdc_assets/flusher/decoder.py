"""The stream's memory: which transaction is open, what each relation looks like, which rows wait.

:class:`Decoder` is fed batches of raw frames. It looks at each batch once, by columns, and keeps
the changes *undecoded* until they are taken; it divides them by table only when many have gathered.
So what has a fixed cost, however few the changes of a table, is paid a flush or so and not a batch,
and what waits is as small as it came.

Keeps invariant 3: changes are kept in the order of the frames, and those of the transaction that is
still open apart from the committed ones. ``position`` is the LSN below which every commit of ours
is among the committed changes (or was taken before): it moves with commits, and with keepalives
while no transaction is open; registering what was taken and then acknowledging ``position`` loses
nothing.

What does not belong: files (``staging``), when to flush (``decoder_process``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc_assets.flusher import staged_rows
from cdc_assets.flusher.attribute_numbers import is_as_known
from cdc_assets.flusher.changes import Changes, by_relation
from cdc_assets.flusher.json_text import parts_of, ranges
from cdc_assets.flusher.staged_rows import DecodeSpec
from cdc_assets.flusher.waiting import Pending
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import (
    BEGIN,
    COMMIT,
    DELETE,
    INSERT,
    KEEPALIVE,
    RELATION,
    TRUNCATE,
    UPDATE,
    XLOG_HEADER_BYTES,
    Ints,
    Relation,
    Scan,
)

logger = logging.getLogger(__name__)

# Where fields stand in a frame, behind the XLogData header and the kind of the message.
_BODY = XLOG_HEADER_BYTES + 1
_CHANGE = _BODY + 4  # behind the relation's oid
# The LSN of the record that a frame comes from, in the XLogData header.
_LSN = 1
# What a waiting change costs beyond its message: six numbers of 8 bytes, roughly.
_CHANGE_BYTES = 48
# Changes of many tables are kept as they arrive, and given to the tables when there is so much of
# them: each time costs some 10 µs a table, however few are its changes.
DIVIDED_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Transaction:
    """An open transaction, from its Begin: its commit record's LSN, microseconds since 2000."""

    commit_lsn: int
    commit_time: int
    xid: int


@dataclass(slots=True)
class _Shelf:
    """What waits, of the tables with the oids ``tables``, in so many ``bytes``.

    ``pending``: by table, in the order of first appearance; ``mixed``: what arrived after that, not
    divided yet, with messages of ``mixed_bytes``.
    """

    pending: dict[int, list[Pending]] = field(default_factory=dict)
    mixed: list[Changes] = field(default_factory=list)
    mixed_bytes: int = 0
    tables: set[int] = field(default_factory=set)
    bytes: int = 0

    def run(self, spec: DecodeSpec, relation: Relation) -> Pending:
        """Where the next change of ``relation`` goes: a new one where the relation has changed."""
        runs = self.pending.setdefault(relation.oid, [])
        if not runs or runs[-1].relation is not relation or runs[-1].spec != spec:
            runs.append(Pending(spec, relation))
        return runs[-1]

    def append(self, other: _Shelf) -> None:
        """Put everything of ``other`` behind what is here, and empty it.

        Nothing may be ``mixed`` here where there is something by table in the other.
        """
        for oid, runs in other.pending.items():
            mine = self.pending.setdefault(oid, [])
            for run in runs:
                if mine and mine[-1].relation is run.relation and mine[-1].spec == run.spec:
                    mine[-1].parts += run.parts
                else:
                    mine.append(run)
        self.mixed += other.mixed
        self.mixed_bytes += other.mixed_bytes
        self.tables |= other.tables
        self.bytes += other.bytes
        other.empty()

    def take_mixed(self) -> list[Changes]:
        mixed, self.mixed, self.mixed_bytes = self.mixed, [], 0
        return mixed

    def empty(self) -> None:
        self.pending, self.mixed, self.tables = {}, [], set()
        self.bytes = self.mixed_bytes = 0


class Decoder:
    """Frames in, waiting changes out.

    ``spec_of`` says how a relation is staged; None: not ours. ``as_sent`` says it with the names
    that the columns have in this relation. It is called for each Relation message whose names may
    be those of other columns than the spec means.
    """

    def __init__(
        self,
        spec_of: Callable[[int], DecodeSpec | None],
        as_sent: Callable[[DecodeSpec, Relation], DecodeSpec] = lambda spec, _: spec,
    ) -> None:
        self.spec_of = spec_of
        self._as_sent = as_sent
        self._staged_as: dict[int, tuple[DecodeSpec, DecodeSpec]] = {}
        self._relations: dict[int, Relation] = {}
        self._open: _Transaction | None = None
        self._committed = _Shelf()
        self._uncommitted = _Shelf()
        self._skipped: set[int] = set()
        self.position = 0
        self.commit_end = 0
        """End LSN of the last commit seen, empty transactions included; 0 before the first one."""
        self.commit_time: int | None = None
        """Of the last commit, in microseconds since 2000."""

    @property
    def in_transaction(self) -> bool:
        return self._open is not None

    @property
    def committed_bytes(self) -> int:
        return self._committed.bytes

    @property
    def committed_tables(self) -> int:
        return len(self._committed.tables)

    @property
    def open_bytes(self) -> int:
        return self._uncommitted.bytes

    def take_committed(self) -> list[Pending]:
        """Everything that committed and wasn't taken; of one table in commit order."""
        return self._take(self._committed)

    def take_open(self) -> list[Pending]:
        """What arrived of the open transaction; worthless if its commit never arrives."""
        return self._take(self._uncommitted)

    def _take(self, shelf: _Shelf) -> list[Pending]:
        self._divide(shelf)
        taken = [run for runs in shelf.pending.values() for run in runs if run.parts]
        shelf.empty()
        return taken

    def feed(self, blob: bytes | bytearray | memoryview, lengths: npt.NDArray[np.int32]) -> None:
        """Take in a batch of frames. Raises ReplicationProblem if the stream is broken."""
        if len(lengths) == 0:
            return
        batch = _Batch.read(pgoutput.scan(blob, lengths), self._open)
        frames = len(lengths)
        cut = int(batch.commits[-1]) + 1 if len(batch.commits) else 0
        if cut:
            if self._uncommitted.pending:
                self._divide(self._committed)
            self._committed.append(self._uncommitted)
            self._distribute(batch, 0, cut, self._committed)
            self.commit_end = int(batch.scan.lsn(batch.commits[-1:], _BODY + 9)[0])
            self.commit_time = int(batch.scan.time(batch.commits[-1:], _BODY + 17)[0])
            self.position = max(self.position, self.commit_end)
        if cut < frames:
            self._distribute(batch, cut, frames, self._uncommitted)
        self._open = batch.left_open
        idle = batch.idle_keepalives
        if len(idle):
            end = batch.scan.lsn(idle[-1:], 1)[0]
            self.position = max(self.position, int(end))

    def _distribute(self, batch: _Batch, low: int, high: int, shelf: _Shelf) -> None:
        """Put the changes of the frames ``low`` to ``high`` (excluded) on the shelf."""
        first, last = np.searchsorted(batch.events, [low, high])
        for frame in batch.events[first:last].tolist():
            relation = None
            if batch.scan.kind[frame] != TRUNCATE:
                relation = Relation.parse(batch.scan.message(frame))
            if relation is None or self._is_news(relation):
                self._collect(batch, low, frame, shelf)
                self.divide()
                low = frame
            if relation is None:
                self._empty_tables(batch, frame, shelf)
            else:
                self._learn(relation)
        self._collect(batch, low, high, shelf)

    def _collect(self, batch: _Batch, low: int, high: int, shelf: _Shelf) -> None:
        """Put the changes of these frames on the shelf, undivided."""
        first, last = np.searchsorted(batch.changes, [low, high])
        frames, oids = batch.changes[first:last], batch.change_oid[first:last]
        if len(frames) == 0:
            return
        alone = bool((oids == oids[0]).all())
        found = oids[:1].tolist() if alone else np.unique(oids).tolist()
        ours = [oid for oid in found if self._is_ours(oid)]
        if not ours:
            return
        if len(ours) < len(found):
            mine = np.isin(oids, ours)
            frames, oids = frames[mine], oids[mine]
        changes = batch.copied(frames, oids)
        if shelf.mixed_bytes + changes.nbytes > DIVIDED_BYTES:
            self._divide(shelf)
        shelf.mixed.append(changes)
        shelf.tables.update(ours)
        shelf.mixed_bytes += changes.nbytes
        shelf.bytes += changes.nbytes + _CHANGE_BYTES * len(frames)

    def _is_ours(self, oid: int) -> bool:
        """Whether its changes are staged; if so, it is known what they look like."""
        spec = self.spec_of(oid)
        if spec is None:
            return False
        relation = self._relations.get(oid)
        if relation is None:
            raise pgoutput.broken(f"a change of relation {oid}, of which nothing was told,")
        self._resolved(spec, relation)  # while the catalog is as little ahead as can be
        return True

    def divide(self) -> None:
        """Divide what waits by table, as relations and specs are now: they are about to change."""
        self._divide(self._committed)
        self._divide(self._uncommitted)

    def _divide(self, shelf: _Shelf) -> None:
        for oid, changes in by_relation(shelf.take_mixed()):
            spec, relation = self.spec_of(oid), self._relations[oid]
            if spec is not None:
                shelf.run(self._resolved(spec, relation), relation).parts.append(changes)

    def _is_news(self, relation: Relation) -> bool:
        """Whether what waits of it may be staged otherwise than what comes now."""
        known, spec = self._relations.get(relation.oid), self.spec_of(relation.oid)
        return known is not None and (
            relation != known or (spec is not None and _names_may_differ(spec, relation))
        )

    def _learn(self, relation: Relation) -> None:
        # Told again, it may look the same and be another one.
        self._staged_as.pop(relation.oid, None)
        if relation != self._relations.get(relation.oid):
            self._relations[relation.oid] = relation
        if self.spec_of(relation.oid) is None and relation.oid not in self._skipped:
            self._skipped.add(relation.oid)
            name = TableId(relation.schema, relation.name)
            logger.info("changes of %s are skipped: it is not followed", name)

    def _empty_tables(self, batch: _Batch, frame: int, shelf: _Shelf) -> None:
        """Put a Truncate behind what its tables have on the shelf."""
        for oid in pgoutput.truncated_relations(batch.scan.message(frame)):
            spec = self.spec_of(oid)
            if spec is not None and self._is_ours(oid):
                known = self._relations[oid]
                shelf.run(self._resolved(spec, known), known).parts.append(batch.truncate(frame))
                shelf.tables.add(oid)
                shelf.bytes += _CHANGE_BYTES

    def _resolved(self, spec: DecodeSpec, relation: Relation) -> DecodeSpec:
        """How changes of this relation are staged: with the names that its columns have in it."""
        known = self._staged_as.get(relation.oid)
        if known is None or known[0] != spec:
            sent = self._as_sent(spec, relation) if _names_may_differ(spec, relation) else spec
            known = spec, replace(sent, excluded_numbers=frozenset(), columns=())
            self._staged_as[relation.oid] = known
        return known[1]


def _names_may_differ(spec: DecodeSpec, relation: Relation) -> bool:
    """Whether the spec's names may be those of other columns in this relation.

    Under FULL a relation doesn't say which columns are the key, so that they are found by name.
    """
    if spec.excluded:
        return True
    full = relation.replica_identity == "f" and bool(spec.key_columns)
    return full and not is_as_known(spec, relation)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A scanned batch with its transactions found.

    ``changes``: frames that are I, U or D; ``events``: those that are R or T; ``idle_keepalives``:
    those between transactions. ``transaction``: for each frame, which one it is in, where 0 is
    the one that was open before the batch.
    """

    scan: Scan
    changes: Ints
    change_oid: Ints
    events: Ints
    commits: Ints
    idle_keepalives: Ints
    transaction: Ints
    commit_lsn: Ints
    commit_time: Ints
    xid: Ints
    left_open: _Transaction | None

    @classmethod
    def read(cls, scan: Scan, opened: _Transaction | None) -> _Batch:
        """Find transactions and check that they follow each other; ReplicationProblem if not."""
        begins, commits = scan.of(BEGIN), scan.of(COMMIT)
        borders = scan.kind[scan.of(BEGIN, COMMIT)]
        expected = np.resize([BEGIN, COMMIT] if opened is None else [COMMIT, BEGIN], len(borders))
        if not bool((borders == expected).all()):
            raise pgoutput.broken("a transaction inside another")
        before = opened or _Transaction(0, 0, 0)
        commit_lsn = np.concatenate(([before.commit_lsn], scan.lsn(begins, _BODY)))
        commit_time = np.concatenate(([before.commit_time], scan.time(begins, _BODY + 8)))
        xid = np.concatenate(([before.xid], scan.uint32(begins, _BODY + 16)))
        transaction = np.cumsum(scan.kind == BEGIN)
        inside = transaction + (opened is not None) > np.cumsum(scan.kind == COMMIT)
        changes = scan.of(INSERT, UPDATE, DELETE)
        events = scan.of(RELATION, TRUNCATE)
        if not bool(inside[changes].all()) or not bool(inside[events].all()):
            raise pgoutput.broken("a change outside of a transaction")
        keepalives = scan.of(KEEPALIVE)
        is_open = len(begins) + (opened is not None) > len(commits)
        left = _Transaction(int(commit_lsn[-1]), int(commit_time[-1]), int(xid[-1]))
        return cls(
            scan=scan,
            changes=changes,
            change_oid=scan.uint32(changes, _BODY),
            events=events,
            commits=commits,
            idle_keepalives=keepalives[~inside[keepalives]],
            transaction=transaction,
            commit_lsn=commit_lsn,
            commit_time=commit_time,
            xid=xid,
            left_open=left if is_open else None,
        )

    def copied(self, frames: Ints, oids: Ints) -> Changes:
        """The changes of these frames, which are in order, of these relations."""
        messages = ranges(
            self.scan.buffer, self.scan.start[frames] + _CHANGE, self.scan.stop[frames]
        )
        offsets, data = parts_of(messages)
        transaction = self.transaction[frames]
        about = (
            oids,
            self.scan.int64(frames, _LSN),
            self.commit_lsn[transaction],
            self.commit_time[transaction],
            self.xid[transaction],
        )
        return Changes(data[: offsets[-1]], offsets[1:], self.scan.kind[frames], np.stack(about))

    def truncate(self, frame: int) -> pa.Table:
        """The row of a Truncate message."""
        transaction = int(self.transaction[frame])
        return staged_rows.truncated(
            int(self.scan.int64(np.array([frame]), _LSN)[0]),
            int(self.commit_lsn[transaction]),
            int(self.commit_time[transaction]),
            int(self.xid[transaction]),
        )
