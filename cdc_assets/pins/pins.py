"""Pinning tables: one consistent point for the copy and for the log.

Keeps invariant 5. The publication has a table before a slot's consistent point is taken, so every
change that commits from that point on is in the stream; the snapshot that the slot exports shows
every change that committed before it. Together they are the table, without a gap or an overlap. The
first pin comes from the main slot itself; later ones (a table added, a pin lost) come from a
temporary slot, which lives only until its snapshot is imported, or from a lock (``by_lock``).

A pin is taken and recorded by ``taking``, and held as long as copies need it (``held``). That of a
table which is copied in short transactions (``strategy``) has none: its point is a proven horizon,
below which everything is visible to whichever snapshot reads.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

from cdc_assets.errors import EnvironmentProblem
from cdc_assets.log.asked.wishes import refuse_if_dropped
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.locks import PINS_LOCK
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.log.tables import GIVEN_UP
from cdc_assets.messages.findings import Finding
from cdc_assets.pins.at_horizon import AtHorizon
from cdc_assets.pins.elsewhere.copies import begin_logs, pin_elsewhere, resumes
from cdc_assets.pins.elsewhere.looks import Looks, has_begun
from cdc_assets.pins.elsewhere.restored import pin_restored
from cdc_assets.pins.enrol import publish_tables, register_tables
from cdc_assets.pins.heap_facts import look_at_heaps
from cdc_assets.pins.held import HeldPins
from cdc_assets.pins.holders import hold
from cdc_assets.pins.on_standby import begin_stream, hurried, proven_by_slot
from cdc_assets.pins.streamed import begin_inserts, set_inserts_from, streamed_publications
from cdc_assets.pins.taking import log_pinned, take
from cdc_assets.pins.ways.by_lock import ByLock
from cdc_assets.pins.ways.queried import Queried
from cdc_assets.pins.ways.without_slot import begin_without_slot, relayed
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import publication_oid
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import (
    NewSlot,
    create_slot,
    export_snapshot,
    on_standby,
    slot_status,
)
from cdc_assets.readiness.admission import (
    make_slot_follow_failovers,
    refuse_or_park,
    settle,
)
from cdc_assets.readiness.copy_server import is_dump, unreachable
from cdc_assets.readiness.source.now import followed, remember
from cdc_assets.readiness.strategy import at_horizon

logger = logging.getLogger(__name__)

# A stream that can go on waits at most this long for another process's pin.
_PREPARE_SECONDS = 3.0
# How often a table that couldn't be registered is looked at again: a right may have been granted.
_REFUSED_SECONDS = 30.0


class Pins:
    """Makes and holds the pins of one source. Has connections of its own: usable in a thread."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = Pipeline.open(pipeline.config)
        self._config = pipeline.config
        self._store = self._pipeline.store
        self._held = HeldPins(self._pipeline)
        self._horizon = AtHorizon()
        self._queried = Queried()
        self._by_lock = ByLock(self._pipeline)
        self._refused_again_at = time.monotonic() + _REFUSED_SECONDS
        self._looks = Looks()

    @property
    def store(self) -> LogStore:
        """The session that holds the lock while pins are made."""
        return self._store

    @property
    def refused(self) -> Mapping[TableId, Finding]:
        """Why tables can't be copied from ``snapshot.from``, as of the last look."""
        return self._looks.refused

    def has_refused(self, table: TableId) -> bool:
        """Whether the table can't be copied from ``snapshot.from``, which only a person changes."""
        return (found := self.refused.get(table)) is not None and found.severity == "error"

    def prepare(self, *, patient: bool = True) -> None:
        """Register the tables, complete the publication, create the slot with the first pin.

        Idempotent, and safe when several processes start at once. Unless ``patient``, a log that
        has its beginning isn't held up by another process that waits for its pin. Raises
        PreflightError, SlotBusy or SourceMismatch; nothing is streamed or published then.
        """
        self._horizon.forget()
        if patient or self._store.flushed_lsn() is None:
            self._store.lock(PINS_LOCK)
        elif not self._store.lock_within(PINS_LOCK, _PREPARE_SECONDS):
            return  # the log has its beginning, and ticks do the rest
        try:
            refuse_if_dropped(self._store)
            with self._pipeline.connect_source("pins") as source:
                if not self._config.decodes:
                    begin_without_slot(source, self._config, self._store)
                    return
                found = settle(self._pipeline, source)
                look_at_heaps(source, self._store, followed(self._store))
                register_tables(source, self._config, self._store)
                if self._store.flushed_lsn() is None:
                    self._forget_unfollowed(source)
                waiting = publish_tables(source, self._config, self._store)
                slot = slot_status(source, self._config.slot)
                if slot is None and on_standby(source):
                    begin_stream(self._pipeline, source, waiting)
                elif slot is None:
                    made = create_slot(
                        self._pipeline.replication_dsn, self._config.slot, temporary=False
                    )
                    set_inserts_from(source, self._config, self._store, made.consistent_point)
                    later = at_horizon(source, self._config, waiting)
                    here = waiting if self._config.snapshot.from_ is None else []
                    pinned = [row for row in here if row.table not in later]
                    self._pin(source, made, pinned, first=True)
                elif self._store.flushed_lsn() is None:
                    # Made by hand, or by a process that died before it recorded the pin: the log
                    # starts at the slot's position, the tables get later pins of their own.
                    self._store.begin_at(slot.confirmed_flush or Lsn.ZERO)
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
            away = self._held.keep()  # the others' logs begin all the same
            try:
                if self._looks.wanted(self._waiting()) or self._refused():
                    with self._pipeline.connect_source("pins") as source:
                        self._pin_waiting(source)
            finally:
                self._held.release()
            if away is not None:
                told = unreachable(away)
                raise EnvironmentProblem(told.message, told.remedy) from away
        finally:
            self._store.unlock(PINS_LOCK)

    def close(self) -> None:
        """Let go of every snapshot and close the connections."""
        self._held.close()
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
        if self._config.decodes:
            # Before the publication is completed: a table missing there has to be noticed.
            refuse_or_park(source, self._config, self._store)
        register_tables(source, self._config, self._store)
        if self._config.query is not None:
            self._pin_queried(source, [row for row in self._waiting() if row.oid])
            return
        if not self._config.streams:
            for row in (row for row in self._waiting() if row.snapshot_lsn):
                restart_copy(self._store, row)  # no log evens out what was read of another moment
            if waiting := [row for row in self._waiting() if row.oid]:
                self._pin(source, export_snapshot(self._pipeline.source_dsn), waiting, first=False)
            return
        pinned = self._followed(source)
        if self._config.snapshot.from_ is not None or on_standby(source):
            self._pin_elsewhere(source, pinned)
        else:
            later = at_horizon(source, self._config, pinned)
            self._pin_at_horizon(source, [row for row in pinned if row.table in later])
            rest = [r for r in pinned if r.table not in later and resumes(self._pipeline, r)]
            locking = [row for row in rest if self._config.pin_by(row.table) == "lock"]
            for some, made in self._by_lock.pins(source, locking, self._held):
                self._pin(source, made, some, first=False)
            if rest := [row for row in rest if row not in locking]:
                self._pin(source, self._temporary_slot(), rest, first=False)
        if self._horizon.held_up is not None:
            raise self._horizon.held_up

    def _followed(self, source: Connection) -> list[TableRow]:
        """The waiting tables whose changes from now on are in the log, or will be."""
        if self._config.log is not None:
            return relayed(source, self._config, self._store, self._waiting())
        streaming = self._store.has_flusher()
        # A streaming flusher drops changes of tables that it doesn't know: it has to know a table
        # before the pin. A flusher that starts later reads the registered tables first.
        told = {*self._horizon.told, *self._by_lock.told, *self.refused}
        waiting = publish_tables(source, self._config, self._store, told)
        begin_inserts(source, self._config, self._store, waiting, self._temporary_slot)
        asked = streamed_publications(self._pipeline, self._store.flushed_lsn() or Lsn.ZERO)
        return [
            row
            for row in waiting
            if row.followed or not (streaming or (row.inserts_only and len(asked) == 1))
        ]

    def _pin_queried(self, source: Connection, waiting: list[TableRow]) -> None:
        point, tables = self._queried.pinnable(source, self._config, self._store, waiting)
        if tables:
            made = replace(export_snapshot(self._pipeline.source_dsn), consistent_point=point)
            self._pin(source, made, tables, first=False)

    def _pin_at_horizon(self, source: Connection, tables: list[TableRow]) -> None:
        """Pin tables whose changes the log has from a proven horizon on; a later tick the others.

        A transaction of before the tables were published, whose changes aren't streamed, is over by
        then, too.
        """
        proven = self._horizon.proven(source, self._config, self._store, tables)
        if proven is not None:
            point, same, seen = proven
            _, pinned = take(source, self._config, self._store, point, None, same, seen=seen)
            log_pinned(pinned, point)

    def _pin_elsewhere(self, source: Connection, tables: list[TableRow]) -> None:
        """Pin the tables whose logs have begun at another server; begin the logs of the others."""
        begun = [row for row in tables if has_begun(row)]
        others = [row for row in tables if row not in begun]
        proven = proven_by_slot(self._pipeline, source, others)
        proven = proven or self._horizon.proven(source, self._config, self._store, others)
        if proven:
            begin_logs(self._pipeline, source, proven)
        if not begun:
            self._looks.found({})
        elif self._looks.due():
            found = (
                pin_restored(self._pipeline, source, begun)
                if is_dump(self._config)
                else pin_elsewhere(self._pipeline, source, begun)
            )
            self._looks.found(found.refused)
            if found.holder is not None and found.point is not None:
                self._held.add(found.holder)
                log_pinned([*found.pinned], found.point)

    def _temporary_slot(self) -> NewSlot:
        name = f"{self._config.slot[:50]}_{uuid.uuid4().hex[:8]}"
        with hurried(self._config):
            return create_slot(self._pipeline.replication_dsn, name, temporary=True)

    def _waiting(self, state: TableState = TableState.WAITING) -> list[TableRow]:
        """Without tables that were taken out of the configuration: those wait for ever."""
        configured = {table.id for table in self._config.tables}
        return [row for row in self._store.tables(None, state) if row.table in configured]

    def _refused(self) -> bool:
        """Whether it is time to look again at tables that could never be registered, if any."""
        if time.monotonic() < self._refused_again_at:
            return False
        self._refused_again_at = time.monotonic() + _REFUSED_SECONDS
        rows = self._waiting(TableState.PARKED)
        return any(not row.oid and row.reason != GIVEN_UP for row in rows)

    def _pin(
        self, source: Connection, slot: NewSlot, tables: list[TableRow], *, first: bool
    ) -> None:
        """Record the pin with the frozen plans, then hold its snapshot."""
        try:
            point, name = slot.consistent_point, slot.snapshot_name
            pin, pinned = take(source, self._config, self._store, point, name, tables, first=first)
            if pinned:
                self._held.add(hold(self._store, self._pipeline.source_dsn, pin, name))
        finally:
            slot.connection.close()  # drops a temporary slot, so that it keeps no WAL any longer
        log_pinned(pinned, slot.consistent_point)
