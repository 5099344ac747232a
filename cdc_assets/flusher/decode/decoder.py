"""The stream's state: the open transaction, the known relations, and the waiting changes.

:class:`Decoder` is fed batches of raw frames. It looks at each batch once, by columns, and keeps
the changes *undecoded* until they are taken; it divides them by table only when many have gathered.
So the fixed cost of a table, however few its changes, is paid about once a flush and not once a
batch, and waiting changes stay as small as they came.

Keeps invariant 3: changes are kept in the order of the frames, and those of the transaction that is
still open apart from the committed ones. ``position`` is the LSN below which every commit of ours
is among the committed changes (or was taken before). It moves with commits, and with keepalives
while no transaction is open. Registering what was taken and then acknowledging ``position`` loses
nothing.

Elsewhere: files (``stage.staging``), when to flush (``decoder_process.loop``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from cdc_assets.flusher.decode.attribute_numbers import is_as_known
from cdc_assets.flusher.decode.changes import Changes, by_relation
from cdc_assets.flusher.decode.markers import Markers
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.transactions import Batch, Transaction
from cdc_assets.flusher.decode.waiting import Pending
from cdc_assets.messages.texts import one_line
from cdc_assets.postgres import pgoutput
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import TRUNCATE, Relation

logger = logging.getLogger(__name__)

# What a waiting change costs beyond its message: six numbers of 8 bytes, roughly.
_CHANGE_BYTES = 48
# Changes of many tables are kept as they arrive, and divided by table once there are this many
# bytes: dividing costs some 10 µs a table, however few its changes.
DIVIDED_BYTES = 16 * 2**20


@dataclass(slots=True)
class _Shelf:
    """Waiting changes of the tables with the oids ``tables``, in so many ``bytes``.

    ``pending``: by table, in the order of first appearance. ``mixed``: later ones, not divided yet,
    whose messages have ``mixed_bytes``.
    """

    pending: dict[int, list[Pending]] = field(default_factory=dict)
    mixed: list[Changes] = field(default_factory=list)
    mixed_bytes: int = 0
    tables: set[int] = field(default_factory=set)
    bytes: int = 0

    def run(self, spec: DecodeSpec, relation: Relation) -> Pending:
        """The Pending for ``relation``'s next change; a new one if relation or spec changed."""
        runs = self.pending.setdefault(relation.oid, [])
        if not runs or runs[-1].relation is not relation or runs[-1].spec != spec:
            runs.append(Pending(spec, relation))
        return runs[-1]

    def append(self, other: _Shelf) -> None:
        """Append everything of ``other``, and empty it.

        Nothing may be ``mixed`` here if ``other`` has anything by table.
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

    ``spec_of`` returns how a relation is staged; None: not ours. ``as_sent`` returns a spec with
    the names that the columns have in a relation; it is called for each Relation message in which
    the spec's names may be other columns. ``position``: where the stream begins. ``markers``: the
    table of markers.
    """

    def __init__(
        self,
        spec_of: Callable[[int], DecodeSpec | None],
        as_sent: Callable[[DecodeSpec, Relation], DecodeSpec] = lambda spec, _: spec,
        position: int = 0,
        markers: TableId | None = None,
    ) -> None:
        self.spec_of = spec_of
        self.markers = Markers(markers)
        self._as_sent = as_sent
        self._staged_as: dict[int, tuple[DecodeSpec, DecodeSpec]] = {}
        self._relations: dict[int, Relation] = {}
        self._open: Transaction | None = None
        self._committed = _Shelf()
        self._uncommitted = _Shelf()
        self._skipped: set[int] = set()
        self.position = position
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
        """Take everything that committed; each table's changes are in commit order."""
        return self._take(self._committed)

    def take_open(self) -> list[Pending]:
        """Take what arrived of the open transaction; worthless if its commit never arrives."""
        return self._take(self._uncommitted)

    def _take(self, shelf: _Shelf) -> list[Pending]:
        self._divide(shelf)
        taken = [run for runs in shelf.pending.values() for run in runs if run.parts]
        shelf.empty()
        return taken

    def feed(
        self, blob: bytes | bytearray | memoryview, lengths: npt.NDArray[np.int32], gap: int = 0
    ) -> int:
        """Take in a batch of frames, how many it says: no more than up to a marker's commit.

        Raises ReplicationProblem if the stream is broken.
        """
        if len(lengths) == 0:
            return 0
        batch = Batch.read(pgoutput.scan(blob, lengths, gap), self._open, self.position)
        frames = self.markers.end_of(batch)
        if frames < len(lengths):
            part = memoryview(blob)[: frames_bytes(lengths[:frames], gap)]
            scan = pgoutput.scan(part, lengths[:frames], gap)
            batch = Batch.read(scan, self._open, self.position)
        cut = int(batch.commits[-1]) + 1 if len(batch.commits) else 0
        if cut:
            if self._uncommitted.pending:
                self._divide(self._committed)
            self._committed.append(self._uncommitted)
            self._distribute(batch, 0, cut, self._committed)
            self.commit_end = batch.commit_end
            self.commit_time = batch.last_commit_time
        if cut < frames:
            self._distribute(batch, cut, frames, self._uncommitted)
        self._open = batch.left_open
        self.position = batch.position
        return frames

    def _distribute(self, batch: Batch, low: int, high: int, shelf: _Shelf) -> None:
        """Put the changes of the frames ``low`` to ``high`` (excluded) on the shelf."""
        first, last = np.searchsorted(batch.events, [low, high])
        for frame in batch.events[first:last].tolist():
            relation = None
            if batch.scan.kind[frame] != TRUNCATE:
                relation = Relation.parse(batch.scan.message(frame))
            if relation is None or self._is_first(relation) or self._is_news(relation):
                self._collect(batch, low, frame, shelf)
                low = frame
            if relation is None or self._is_news(relation):
                self.divide()
            if relation is None:
                self._empty_tables(batch, frame, shelf)
            else:
                self._learn(relation)
        self._collect(batch, low, high, shelf)

    def _collect(self, batch: Batch, low: int, high: int, shelf: _Shelf) -> None:
        """Put the changes of these frames on the shelf, undivided."""
        first, last = np.searchsorted(batch.changes, [low, high])
        frames, oids = batch.changes[first:last], batch.change_oid[first:last]
        if len(frames) == 0:
            return
        alone = bool((oids == oids[0]).all())
        different, places = (oids[:1], [0]) if alone else np.unique(oids, return_index=True)
        found: list[int] = different.tolist()
        for oid, place in zip(found, places, strict=True):
            self._must_be_told(oid, batch, int(frames[place]))
        ours = [oid for oid in found if self._is_ours(oid)]
        if len(ours) < len(found):
            for oid in set(found).difference(ours):
                self._skip(oid)
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

    def _must_be_told(self, oid: int, batch: Batch, frame: int) -> None:
        """Raise ReplicationProblem if no Relation message described the relation.

        A damaged oid would else look like a table that isn't staged, and its changes be skipped.
        """
        if oid not in self._relations:
            what = f"a change of relation {oid}, of which nothing was told,"
            raise pgoutput.broken(what, batch.scan.frame_lsn(frame))

    def _is_ours(self, oid: int) -> bool:
        """Whether the changes of a relation that is known are staged."""
        spec = self.spec_of(oid)
        if spec is None:
            return False
        self._resolved(spec, self._relations[oid])  # now: later the catalog is further ahead
        return True

    def divide(self) -> None:
        """Divide the waiting changes by table, before relations or specs change."""
        self._divide(self._committed)
        self._divide(self._uncommitted)

    def _divide(self, shelf: _Shelf) -> None:
        for oid, changes in by_relation(shelf.take_mixed()):
            spec, relation = self.spec_of(oid), self._relations[oid]
            if spec is not None:
                shelf.run(self._resolved(spec, relation), relation).parts.append(changes)

    def _is_first(self, relation: Relation) -> bool:
        """Whether it is the relation's first message: no change of it came before."""
        return relation.oid not in self._relations

    def _is_news(self, relation: Relation) -> bool:
        """Whether its waiting changes may be staged otherwise than those that come now."""
        known, spec = self._relations.get(relation.oid), self.spec_of(relation.oid)
        return known is not None and (
            relation != known or (spec is not None and _names_may_differ(spec, relation))
        )

    def _learn(self, relation: Relation) -> None:
        # A repeated message may look the same and mean other columns.
        self._staged_as.pop(relation.oid, None)
        if relation != self._relations.get(relation.oid):
            self._relations[relation.oid] = relation

    def _skip(self, oid: int) -> None:
        """Say once that a relation's changes are skipped.

        A Relation message is no change: each partition has one, but the changes are its root's.
        """
        if oid not in self._skipped and not self.markers.has(oid):
            self._skipped.add(oid)
            name = TableId(self._relations[oid].schema, self._relations[oid].name)
            logger.info("changes of %s are skipped: it is not followed", one_line(str(name)))

    def _empty_tables(self, batch: Batch, frame: int, shelf: _Shelf) -> None:
        """Append a Truncate to the changes of each of its tables on the shelf."""
        for oid in pgoutput.truncated_relations(batch.scan.message(frame)):
            self._must_be_told(oid, batch, frame)
            spec = self.spec_of(oid)
            if spec is not None and self._is_ours(oid):
                known = self._relations[oid]
                shelf.run(self._resolved(spec, known), known).parts.append(batch.truncate(frame))
                shelf.tables.add(oid)
                shelf.bytes += _CHANGE_BYTES

    def _resolved(self, spec: DecodeSpec, relation: Relation) -> DecodeSpec:
        """The spec with the names that the columns have in this relation."""
        known = self._staged_as.get(relation.oid)
        if known is None or known[0] != spec:
            sent = self._as_sent(spec, relation) if _names_may_differ(spec, relation) else spec
            known = (
                spec,
                replace(sent, excluded_numbers=frozenset(), mask_numbers=(), columns=()),
            )
            self._staged_as[relation.oid] = known
        return known[1]


def frames_bytes(lengths: npt.NDArray[np.int32], gap: int) -> int:
    """The bytes of frames of these lengths, with ``gap`` other bytes before each."""
    return int(lengths.sum()) + gap * len(lengths)


def _names_may_differ(spec: DecodeSpec, relation: Relation) -> bool:
    """Whether the spec's names may be other columns in this relation.

    Under FULL a relation doesn't say which columns are the key, so they are found by name.
    """
    if spec.excluded or spec.masks or spec.mask_numbers:
        return True
    full = relation.replica_identity == "f" and bool(spec.key_columns)
    return full and not is_as_known(spec, relation)
