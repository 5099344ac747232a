"""Pinning tables: one consistent point for the copy and for the log.

Keeps invariant 5. The publication has a table before a slot's consistent point is taken, so every
change that commits from that point on is in the stream; the snapshot that the slot exports shows
every change that committed before it. Together they are the table, without a gap or an overlap. The
first pin comes from the main slot itself; later ones (a table added, a pin lost) come from a
temporary slot, which lives only until its snapshot is imported, or from a lock (``by_lock``).

A pin is taken and recorded by ``taking``, and kept alive by its holders (``holders``). That of a
table which is copied in short transactions (``strategy``) has none: its point is a proven horizon,
below which everything is visible to whichever snapshot reads.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import psycopg

from cdc_assets.errors import SlotBusy, SnapshotLost, TableProblem
from cdc_assets.log.copies.chunks import await_another_pin, planned_files, restart_copy, unread
from cdc_assets.log.locks import PINS_LOCK
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.log.wishes import refuse_if_dropped
from cdc_assets.pins.by_lock import ByLock
from cdc_assets.pins.enrol import publish_tables, register_tables
from cdc_assets.pins.heap_facts import look_at_heaps
from cdc_assets.pins.holders import Holder, held_pins, hold, join_pin
from cdc_assets.pins.streamed import inserts_from, set_inserts_from, streamed_publications
from cdc_assets.pins.taking import Seen, look_at, take
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe, heaps
from cdc_assets.postgres.horizon import Horizon
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import publication_oid
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.waits import writers
from cdc_assets.postgres.slots import (
    SLOT_PATIENCE_SECONDS,
    NewSlot,
    create_slot,
    export_snapshot,
    slot_status,
)
from cdc_assets.readiness.admission import (
    make_slot_follow_failovers,
    refuse_or_park,
    refuse_other_cluster,
    settle,
)
from cdc_assets.readiness.source.now import followed, remember
from cdc_assets.readiness.strategy import incremental

logger = logging.getLogger(__name__)

# A stream that can go on waits at most this long for another process's pin.
_PREPARE_SECONDS = 3.0
# How often a table that couldn't be registered is looked at again: a right may have been granted.
_REFUSED_SECONDS = 30.0
# A copy in short transactions that can't begin for longer than this says why.
_NOTED_SECONDS = 4.0


class _Candidate(NamedTuple):
    """A horizon, with the tables that may begin at it, and what they were like before it."""

    horizon: Horizon
    tables: Mapping[TableId, tuple[object, ...]]
    seen: Seen
    since: float
    told: frozenset[TableId] = frozenset()  # those whose rows say who holds them up


def _told(pinned: list[TableRow], point: Lsn) -> None:
    names = ", ".join(str(row.table) for row in pinned)
    logger.info("pinned %d tables at %s: %s", len(pinned), point, names)


class Pins:
    """Makes and holds the pins of one source. Has connections of its own: usable in a thread."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = Pipeline.open(pipeline.config)
        self._config = pipeline.config
        self._store = self._pipeline.store
        self._held: dict[str, Holder] = {}
        self._candidate: _Candidate | None = None
        self._by_lock = ByLock(self._pipeline)
        self._refused_again_at = time.monotonic() + _REFUSED_SECONDS

    @property
    def store(self) -> LogStore:
        """The session that holds the lock while pins are made."""
        return self._store

    def prepare(self, *, patient: bool = True) -> None:
        """Register the tables, complete the publication, create the slot with the first pin.

        Idempotent, and safe when several processes start at once. Unless ``patient``, a log that
        has its beginning isn't held up by another process that waits for its pin. Raises
        PreflightError, SlotBusy or SourceMismatch; nothing is streamed or published then.
        """
        self._candidate = None
        if patient or self._store.flushed_lsn() is None:
            self._store.lock(PINS_LOCK)
        elif not self._store.lock_within(PINS_LOCK, _PREPARE_SECONDS):
            return  # the log has its beginning, and ticks do the rest
        try:
            refuse_if_dropped(self._store)
            with self._pipeline.connect_source("pins") as source:
                if not self._config.streams:
                    refuse_other_cluster(source, self._store)
                    register_tables(source, self._config, self._store)
                    return
                found = settle(self._pipeline, source)
                look_at_heaps(source, self._store, followed(self._store))
                register_tables(source, self._config, self._store)
                if self._store.flushed_lsn() is None:
                    self._forget_unfollowed(source)
                waiting = publish_tables(source, self._config, self._store)
                slot = slot_status(source, self._config.slot)
                if slot is None:
                    made = create_slot(
                        self._pipeline.replication_dsn, self._config.slot, temporary=False
                    )
                    set_inserts_from(source, self._config, self._store, made.consistent_point)
                    later = incremental(source, self._config, waiting)
                    pinned = [row for row in waiting if row.table not in later]
                    self._pin(source, made, pinned, first=True)
                elif self._store.flushed_lsn() is None:
                    # Made by hand, or by a process that died before it recorded the pin: the log
                    # starts at the slot's position, the tables get later pins of their own.
                    self._store.advance(slot.confirmed_flush or Lsn.ZERO)
                make_slot_follow_failovers(source, self._config)
                published = publication_oid(source, self._config.publication)
                remember(self._store, replace(found, publication=published))
        finally:
            self._store.unlock(PINS_LOCK)

    def tick(self) -> None:
        """Hold copies' pins, restart copies that lost theirs, pin waiting tables, release the rest.

        May block for as long as slot creation does. Raises like :meth:`prepare`.
        """
        if not self._store.try_lock(PINS_LOCK):
            return  # another process is at it; the next tick looks again
        try:
            refuse_if_dropped(self._store)
            alive = set[str]()  # pins, which tables share
            copying = unread(self._store, self._store.tables(None, TableState.COPYING))
            held = held_pins(self._store, {row.pin for row in copying if row.pin})
            for row in (row for row in copying if row.pin in held):
                with suppress(psycopg.errors.LockNotAvailable):  # the next tick looks again
                    self._keep(row, alive)
            try:
                if self._waiting() or self._refused():
                    with self._pipeline.connect_source("pins") as source:
                        self._pin_waiting(source)
            finally:
                self._release()
        finally:
            self._store.unlock(PINS_LOCK)

    def close(self) -> None:
        """Let go of every snapshot and close the connections."""
        for holder in self._held.values():
            holder.close()
        self._held.clear()
        self._pipeline.close()

    # --- parts ---

    def _forget_unfollowed(self, source: Connection) -> None:
        """Restart copies made before there was a log (mode snapshot_only): they have a gap."""
        unfollowed = [row for row in self._store.tables() if row.snapshot_lsn is not None]
        for row in unfollowed:
            restart_copy(self._store, row)
        if unfollowed:  # describing a table takes 10 ms
            register_tables(source, self._config, self._store)

    def _pin_waiting(self, source: Connection) -> None:
        """Take one pin for all tables that wait and that the stream follows already."""
        if self._config.streams:
            # Before the publication is completed: a table missing there has to be noticed.
            refuse_or_park(source, self._config, self._store)
        register_tables(source, self._config, self._store)
        if not self._config.streams:
            if waiting := [row for row in self._waiting() if row.oid]:
                self._pin(source, export_snapshot(self._pipeline.source_dsn), waiting, first=False)
            return
        streaming = self._store.has_flusher()
        # A streaming flusher drops changes of tables that it doesn't know: it has to know a table
        # before the pin. A flusher that starts later reads the registered tables first.
        told = self._by_lock.told | (self._candidate.told if self._candidate else frozenset())
        waiting = publish_tables(source, self._config, self._store, told)
        self._begin_inserts(source, waiting)
        asked = streamed_publications(self._pipeline, self._store.flushed_lsn() or Lsn.ZERO)
        pinned = [
            row
            for row in waiting
            if row.followed or not (streaming or (row.inserts_only and len(asked) == 1))
        ]
        at_horizon = incremental(source, self._config, pinned)
        held_up = self._pin_at_horizon(source, [row for row in pinned if row.table in at_horizon])
        rest = [row for row in pinned if row.table not in at_horizon]
        locking = [row for row in rest if self._config.pin_by(row.table) == "lock"]
        for some, made in self._by_lock.pins(source, locking, self._held):
            self._pin(source, made, some, first=False)
        if rest := [row for row in rest if row not in locking]:
            self._pin(source, self._temporary_slot(), rest, first=False)
        if held_up is not None:
            raise held_up

    def _pin_at_horizon(self, source: Connection, tables: list[TableRow]) -> SlotBusy | None:
        """Pin tables whose changes the log has from a proven horizon on; a later tick the others.

        A transaction of before the tables were published, whose changes aren't streamed, is over by
        then, too. A table that came, was altered, or was published anew meanwhile begins with a
        new candidate: the log would have its changes as of before, or not at all.
        Returns what is to be raised of one that waits for longer than slot creation would.
        """
        if not tables:
            self._candidate = None
            return None
        described = {
            row.table: (row.epoch, row.oid, row.columns, row.key_columns, row.masks, row.excluded)
            for row in tables
        }
        if self._candidate is None:
            seen = look_at(source, self._config, tables)
            self._candidate = _Candidate(Horizon.observe(source), described, seen, time.monotonic())
        horizon, before, seen, since, told = self._candidate
        among = {table: then for table, then in before.items() if described.get(table) == then}
        self._candidate = _Candidate(horizon, among, seen, since, told) if among else None
        if among and horizon.is_proven(source):
            self._candidate = None
            same = [row for row in tables if row.table in among]
            _, pinned = take(source, self._config, self._store, horizon.lsn, None, same, seen=seen)
            _told(pinned, horizon.lsn)
        elif among and (waited := time.monotonic() - since) > _NOTED_SECONDS:
            oldest = f"The oldest: {'; '.join(writers(source))}."
            for table in among.keys() - told:
                why = f"it waits for transactions that had written before it. {oldest}"
                self._store.note_waiting(table, why)
            self._candidate = _Candidate(horizon, among, seen, since, frozenset(among))
            if waited > SLOT_PATIENCE_SECONDS:
                names = ", ".join(sorted(map(str, among)))
                return SlotBusy(
                    f"for {waited:.0f} s transactions that had written by then keep from copying"
                    f" {names}. {oldest}",
                    "End them, or wait: their copies begin by themselves.",
                )
        return None

    def _temporary_slot(self) -> NewSlot:
        name = f"{self._config.slot[:50]}_{uuid.uuid4().hex[:8]}"
        return create_slot(self._pipeline.replication_dsn, name, temporary=True)

    def _begin_inserts(self, source: Connection, waiting: list[TableRow]) -> None:
        """Find the LSN from which the publication of inserts may be used, if it came late."""
        if (
            any(row.inserts_only for row in waiting)
            and inserts_from(source, self._config, self._store) is None
        ):
            made = self._temporary_slot()
            made.connection.close()
            set_inserts_from(source, self._config, self._store, made.consistent_point)

    def _waiting(self, state: TableState = TableState.WAITING) -> list[TableRow]:
        """Without tables that were taken out of the configuration: those wait for ever."""
        configured = {table.id for table in self._config.tables}
        return [row for row in self._store.tables(None, state) if row.table in configured]

    def _refused(self) -> bool:
        """Whether it is time to look again at tables that could never be registered, if any."""
        if time.monotonic() < self._refused_again_at:
            return False
        self._refused_again_at = time.monotonic() + _REFUSED_SECONDS
        return any(not row.oid for row in self._waiting(TableState.PARKED))

    def _pin(
        self, source: Connection, slot: NewSlot, tables: list[TableRow], *, first: bool
    ) -> None:
        """Record the pin with the frozen plans, then hold its snapshot."""
        try:
            pin, pinned = take(
                source,
                self._config,
                self._store,
                slot.consistent_point,
                slot.snapshot_name,
                tables,
                first=first,
            )
            self._held[pin] = hold(self._store, self._pipeline.source_dsn, pin, slot.snapshot_name)
        finally:
            slot.connection.close()  # drops a temporary slot, so that it keeps no WAL any longer
        _told(pinned, slot.consistent_point)

    def _keep(self, row: TableRow, alive: set[str]) -> None:
        """Hold the pin that ``row`` is copied under, or have the rest copied under another one.

        ``alive``: the pins that are held, as is known by now.

        Rows that moved between the two snapshots may show up twice or not at all: in a mirror with
        a key their changes since the first pin, which the log has, put that right. The planned
        pages have to be in the same files. The copy begins anew without a key, with other files, or
        where the lake table shows each change: none may be both copied and logged, or missed.
        """
        assert row.pin is not None
        if row.pin in alive:
            return
        if row.pin in self._held:
            if self._held[row.pin].alive():
                alive.add(row.pin)
                return
            self._held.pop(row.pin).close()
        try:
            self._held[row.pin] = join_pin(self._store, self._pipeline.source_dsn, row.pin)
        except SnapshotLost:
            if not unread(self._store, [row]):
                return  # all was read meanwhile
            resumes = row.mode == "mirror" and self._config.snapshot.mode == "initial"
            if resumes and row.key_columns and self._unmoved(row):
                logger.warning("%s: its pin was lost; the rest is read under another", row.table)
                await_another_pin(self._store, row)
            else:
                logger.warning("%s: its pin was lost while it was copied; copying again", row.table)
                restart_copy(self._store, row, of_pin=row.pin)

    def _unmoved(self, row: TableRow) -> bool:
        """Whether the heaps of the plan are those that the table has, with the same files."""
        with self._pipeline.connect_source("pins") as source:
            try:
                found = heaps(source, row.table, describe(source, row.table).oid)
            except TableProblem:
                return False
        return {heap.oid: heap.filenode for heap in found} == planned_files(self._store, row)

    def _release(self) -> None:
        needed = {row.pin for row in self._store.tables(None, TableState.COPYING)}
        for pin in [pin for pin in self._held if pin not in needed]:
            self._held.pop(pin).close()
            self._store.connection.execute(
                "update pins set released_at = now() where pin = %s", (pin,)
            )
            self._store.connection.execute("delete from pin_holders where pin = %s", (pin,))
