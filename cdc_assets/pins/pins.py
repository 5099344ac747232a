"""Pinning tables: one consistent point for the copy and for the log.

Keeps invariant 5. The publication has a table before a slot's consistent point is taken, so every
change that commits from that point on is in the stream; the snapshot that the slot exports shows
every change that committed before it. Together they are the table, without a gap or an overlap. The
first pin comes from the main slot itself; later ones (a table added, a pin lost) come from a
temporary slot, which lives only until its snapshot is imported.

Each pin is kept alive by its holders (``holders``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.errors import SnapshotLost, SourceMismatch, TableProblem
from cdc_assets.log.copies.chunks import (
    await_another_pin,
    plan_copy,
    planned_files,
    restart_copy,
    unread,
)
from cdc_assets.log.heap_files import remember_heaps
from cdc_assets.log.heap_record import Moment
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import TableRow
from cdc_assets.log.wishes import refuse_if_dropped
from cdc_assets.pins.enrol import (
    described,
    inserts_from,
    publish_tables,
    register_tables,
    set_inserts_from,
    streamed_publications,
)
from cdc_assets.pins.heap_facts import heap_files, look_at_heaps, moment
from cdc_assets.pins.holders import Holder, hold, join_pin
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import Heap, describe, heaps
from cdc_assets.postgres.ctid import MAX_CHUNKS, TID_RANGE_SCANS, CtidRange, plan_chunks
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.publications import publication_oid
from cdc_assets.postgres.session.waits import locked
from cdc_assets.postgres.slots import (
    NewSlot,
    create_slot,
    export_snapshot,
    slot_status,
    system_identifier,
)
from cdc_assets.readiness.admission import make_slot_follow_failovers, refuse_or_park, settle
from cdc_assets.readiness.source.now import followed, look_at_tables, remember

logger = logging.getLogger(__name__)

# A stream that can go on waits at most this long for another process's pin.
_PREPARE_SECONDS = 3.0


@contextmanager
def under(source: psycopg.Connection[Any], snapshot_name: str) -> Iterator[None]:
    """A transaction that reads under the snapshot, the catalog too."""
    with source.transaction():
        source.execute("set transaction isolation level repeatable read read only")
        source.execute(sql.SQL("set transaction snapshot {}").format(sql.Literal(snapshot_name)))
        yield


class Pins:
    """Makes and holds the pins of one source. Has connections of its own: usable in a thread."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = Pipeline.open(pipeline.config)
        self._config = pipeline.config
        self._store = self._pipeline.store
        self._held: dict[str, Holder] = {}

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
        if patient or self._store.flushed_lsn() is None:
            self._store.lock("pins")
        elif not self._store.lock_within("pins", _PREPARE_SECONDS):
            return  # the log has its beginning, and ticks do the rest
        try:
            refuse_if_dropped(self._store)
            with self._pipeline.connect_source("pins") as source:
                if self._config.snapshot.mode == "snapshot_only":
                    self._check_identity(source)
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
                    self._pin(source, made, waiting, first=True)
                elif self._store.flushed_lsn() is None:
                    # Made by hand, or by a process that died before it recorded the pin: the log
                    # starts at the slot's position, the tables get later pins of their own.
                    self._store.advance(slot.confirmed_flush or Lsn.ZERO)
                make_slot_follow_failovers(self._pipeline, source)
                published = publication_oid(source, self._config.publication)
                remember(self._store, replace(found, publication=published))
        finally:
            self._store.unlock("pins")

    def tick(self) -> None:
        """Hold copies' pins, restart copies that lost theirs, pin waiting tables, release the rest.

        May block for as long as slot creation does. Raises like :meth:`prepare`.
        """
        if not self._store.try_lock("pins"):
            return  # another process is at it; the next tick looks again
        try:
            refuse_if_dropped(self._store)
            for row in self._store.tables():
                if row.state == "copying" and unread(self._store, row):
                    with suppress(psycopg.errors.LockNotAvailable):  # the next tick looks again
                        self._keep(row)
            # A table that was taken out of the configuration waits for ever.
            configured = {table.id for table in self._config.tables}
            rows = self._store.tables()
            if any(row.state == "waiting" and row.table in configured for row in rows):
                with self._pipeline.connect_source("pins") as source:
                    self._pin_waiting(source)
            self._release()
        finally:
            self._store.unlock("pins")

    def close(self) -> None:
        """Let go of every snapshot and close the connections."""
        for holder in self._held.values():
            holder.close()
        self._held.clear()
        self._pipeline.close()

    # --- parts ---

    def _check_identity(self, source: psycopg.Connection[Any]) -> None:
        """Without a stream only the cluster has to be the same (``source.restart_record``)."""
        known, found = self._store.meta("system_identifier"), system_identifier(source)
        if known is None:
            self._store.set_meta("system_identifier", found)
        elif known != found:
            raise SourceMismatch(
                ["other_cluster"],
                f"source {self._config.name} is another Postgres cluster (system identifier"
                f" {found}) than the one that was copied ({known}).",
                "Correct postgres.dsn, or give the new cluster a source name of its own.",
            )

    def _forget_unfollowed(self, source: psycopg.Connection[Any]) -> None:
        """Restart copies made before there was a log (mode snapshot_only): they have a gap."""
        for row in self._store.tables():
            if row.snapshot_lsn is not None:
                restart_copy(self._store, row)
        register_tables(source, self._config, self._store)

    def _pin_waiting(self, source: psycopg.Connection[Any]) -> None:
        """Take one pin for all tables that wait and that the stream follows already."""
        if self._config.snapshot.mode != "snapshot_only":
            # Before the publication is completed: a table missing there has to be noticed.
            refuse_or_park(self._pipeline, source)
        register_tables(source, self._config, self._store)
        if self._config.snapshot.mode == "snapshot_only":
            waiting = self._waiting()
            if waiting:
                self._pin(source, export_snapshot(self._pipeline.source_dsn), waiting, first=False)
            return
        streaming = self._store.is_locked(f"flusher:{self._config.name}")
        # A streaming flusher drops changes of tables that it doesn't know: it has to know a table
        # before the pin. A flusher that starts later reads the registered tables first.
        waiting = publish_tables(source, self._config, self._store)
        self._begin_inserts(source, waiting)
        asked = streamed_publications(self._pipeline, self._store.flushed_lsn() or Lsn.ZERO)
        pinned = [
            row
            for row in waiting
            if row.followed or not (streaming or (row.inserts_only and len(asked) == 1))
        ]
        if pinned:
            self._pin(source, self._temporary_slot(), pinned, first=False)

    def _temporary_slot(self) -> NewSlot:
        name = f"{self._config.slot[:50]}_{uuid.uuid4().hex[:8]}"
        return create_slot(self._pipeline.replication_dsn, name, temporary=True)

    def _begin_inserts(self, source: psycopg.Connection[Any], waiting: list[TableRow]) -> None:
        """Find the LSN from which the publication of inserts may be used, if it came late."""
        if (
            any(row.inserts_only for row in waiting)
            and inserts_from(source, self._config, self._store) is None
        ):
            made = self._temporary_slot()
            made.connection.finish()
            set_inserts_from(source, self._config, self._store, made.consistent_point)

    def _waiting(self) -> list[TableRow]:
        configured = {table.id for table in self._config.tables}
        return [
            row
            for row in self._store.tables()
            if row.table in configured and row.state == "waiting" and row.oid
        ]

    def _pin(
        self,
        source: psycopg.Connection[Any],
        slot: NewSlot,
        tables: list[TableRow],
        *,
        first: bool,
    ) -> None:
        """Record the pin with the frozen plans, then hold its snapshot."""
        pin = str(uuid.uuid4())
        try:
            with self._store.connection.transaction():
                self._store.connection.execute(
                    "insert into pins (pin, source, consistent_point) values (%s, %s, %s)",
                    (pin, self._config.name, str(slot.consistent_point)),
                )
                if first:
                    self._store.advance(slot.consistent_point)
                with under(source, slot.snapshot_name):
                    busy = locked(source, [row.table for row in tables])
                    free = [row for row in tables if row.table not in busy]
                    plans = [(row, self._planned(source, row)) for row in free]
                    pinned = [row for row, chunks in plans if chunks is not None]
                    if self._config.snapshot.mode != "snapshot_only":
                        self._remember_entries(source, pinned)
                        self._remember_heaps(source, pinned, slot.consistent_point)
                    for row, chunks in plans:
                        if chunks is None:
                            continue
                        only = self._config.snapshot.mode == "snapshot_only"
                        plan_copy(
                            self._store,
                            row,
                            pin,
                            slot.consistent_point,
                            chunks,
                            resumes=row.snapshot_lsn is not None,
                            state_without="copied" if only else "streaming",
                        )
            self._held[pin] = hold(self._store, self._pipeline.source_dsn, pin, slot.snapshot_name)
        finally:
            slot.connection.finish()  # drops a temporary slot, so that it keeps no WAL any longer
        logger.info(
            "pinned %d tables at %s: %s",
            len(pinned),
            slot.consistent_point,
            ", ".join(str(row.table) for row in pinned),
        )

    def _remember_entries(self, source: psycopg.Connection[Any], pinned: list[TableRow]) -> None:
        now = look_at_tables(source, self._config.publication, pinned)
        for row in pinned:
            if row.snapshot_lsn is None:  # else its log goes on with its known entry
                entry = now[row.table].published_as
                self._store.set_published_as(row.table, str(entry) if entry else None, row.epoch)

    def _remember_heaps(
        self, source: psycopg.Connection[Any], pinned: list[TableRow], point: Lsn
    ) -> None:
        fresh = [row for row in pinned if row.snapshot_lsn is None]
        seen = Moment(moment(source).horizon, point)  # under the snapshot, whose horizon it is
        files = heap_files(source, [row.oid for row in fresh])
        for row in fresh:
            remember_heaps(self._store, row, files.get(row.oid, {}), own=seen)

    def _planned(
        self, source: psycopg.Connection[Any], row: TableRow
    ) -> list[tuple[Heap, CtidRange]] | None:
        """The chunks of the table that are to be copied; None if it can't be pinned now.

        The queries lock the table's heaps until the subtransaction ends: an ALTER of one table
        doesn't wait until all are planned.
        """
        try:
            with source.transaction(force_rollback=True):
                if not self._as_registered(source, row):
                    return None
                return [] if row.snapshot_lsn is not None else self._plan(source, row)
        except psycopg.errors.LockNotAvailable:
            return None

    def _as_registered(self, source: psycopg.Connection[Any], row: TableRow) -> bool:
        """Whether the snapshot shows the table as it was registered.

        Slot creation waits for running transactions, and one of them may have altered the table.
        The table goes on waiting then, and is described anew before the next pin.
        """
        if row.snapshot_lsn is not None:
            return True  # its plan stays; the copy notices a file or a column that is gone
        try:
            found = described(source, self._config, row.table).table
        except TableProblem:
            return False
        return (found.oid, found.columns, found.key_columns) == (
            row.oid,
            row.columns,
            row.key_columns,
        )

    def _plan(self, source: psycopg.Connection[Any], row: TableRow) -> list[tuple[Heap, CtidRange]]:
        """The chunks of every heap of the table; none if it isn't to be copied."""
        if self._config.snapshot.mode == "never":
            return []
        found = heaps(source, row.table, row.oid)
        # Without TID range scans each chunk would read the whole table: so one reader copies it.
        step = self._config.table(row.table).chunk_pages
        if source.info.server_version < TID_RANGE_SCANS:
            logger.warning("%s: before Postgres 14 one reader copies a table", row.table)
            step = max([step, *(heap.pages for heap in found)])
        step = max(step, -(-sum(heap.pages for heap in found) // MAX_CHUNKS))
        return [
            (heap, chunk)
            for heap in found
            for chunk in plan_chunks(heap.pages, step, leaf=heap.oid if heap.is_leaf else 0)
        ]

    def _keep(self, row: TableRow) -> None:
        """Hold the pin that ``row`` is copied under, or have the rest copied under another one.

        Rows that moved between the two snapshots may show up twice or not at all: in a mirror with
        a key their changes since the first pin, which the log has, put that right. The planned
        pages have to be in the same files. The copy begins anew without a key, with other files, or
        where the lake table shows each change: none may be both copied and logged, or missed.
        """
        assert row.pin is not None
        if row.pin in self._held:
            if self._held[row.pin].alive():
                return
            self._held.pop(row.pin).close()
        try:
            self._held[row.pin] = join_pin(self._store, self._pipeline.source_dsn, row.pin)
        except SnapshotLost:
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
        needed = {row.pin for row in self._store.tables() if row.state == "copying"}
        for pin in [pin for pin in self._held if pin not in needed]:
            self._held.pop(pin).close()
            self._store.connection.execute(
                "update pins set released_at = now() where pin = %s", (pin,)
            )
            self._store.connection.execute("delete from pin_holders where pin = %s", (pin,))
