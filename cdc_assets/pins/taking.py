"""Taking a pin: what its tables are under its snapshot, recorded in one transaction.

The chunks of each copy are planned under the snapshot, and the table's publication entry and files
are remembered as they are there. A table that can't be pinned now goes on waiting.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import LiteralString

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.log.asked.adoptions import await_adoption
from cdc_assets.log.copies.chunks import plan_copy
from cdc_assets.log.heaps.files import known_heaps, remember_heaps
from cdc_assets.log.heaps.record import HeapFile, Moment
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.texts import bounded, counted
from cdc_assets.pins.enrol import Enrolled, described
from cdc_assets.pins.heap_facts import heap_files, moment
from cdc_assets.pins.holders import started, under
from cdc_assets.postgres.catalog import Heap, heaps_of
from cdc_assets.postgres.ctid import (
    MAX_CHUNKS,
    TID_RANGE_SCANS,
    CtidRange,
    heap_pages,
    plan_chunks,
)
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.waits import locked
from cdc_assets.readiness.source.now import look_at_tables
from cdc_assets.readiness.source.planning import AT_ONCE, AT_ONCE_LIMITS
from cdc_assets.readiness.source.record import PublishedAs, TableNow
from cdc_assets.readiness.strategy import adopts

logger = logging.getLogger(__name__)

Chunks = list[tuple[Heap, CtidRange]]


def take(
    source: Connection,
    config: SourceConfig,
    store: LogStore,
    point: Lsn,
    snapshot_name: str | None,
    tables: list[TableRow],
    *,
    first: bool = False,
    seen: Seen | None = None,
    elsewhere: bool = False,
    read: Lsn | None = None,
) -> tuple[str, list[TableRow]]:
    """Record a pin with the frozen plans; returns its id, and the tables that it pins.

    ``point``: what committed below it is what the snapshot shows. None: no snapshot shows just
    that, but each one from now on shows all of it. ``first``: the log begins at it. ``seen``: what
    the tables were like before the point; one that is otherwise by now can't be pinned.
    ``elsewhere``: ``source`` is another server, where transactions that ran at the point may seem
    to have ended. ``read``: what the snapshot shows had committed below that; None: below the
    point, at the source.
    """
    held = snapshot_name is not None
    with under(source, snapshot_name):
        busy = locked(source, [row.table for row in tables])
        free = [row for row in tables if row.table not in busy]
        kinds = as_registered(source, config, free)
        known = [row for row in free if row.table in kinds]
        if seen is not None:
            now = look_at(source, config, known)
            known = [row for row in known if now.of(row) == seen.of(row)]
        if config.publishes:
            known = _filtered_as_wanted(source, config, known)
        plans = [*_plans(source, config, known, kinds)]
        pinned = [row for row, _ in plans]
        fresh = [row for row in pinned if row.snapshot_lsn is None]
        entries = look_at_tables(source, config.publication, fresh) if config.publishes else {}
        files = heap_files(source, [row.oid for row in fresh])
        # A standby has none to tell, and no query needs one.
        horizon = moment(source).horizon if config.publishes and not elsewhere else None
        since = started(source)
    # Not before all is asked: where the log is, an open transaction holds up slots and VACUUM, and
    # another server may hang.
    with store.connection.transaction(), store.connection.pipeline():
        pin = new_pin(store, config, since, point, held=held, read=read)
        if first:
            store.begin_at(point)
        if config.publishes:
            _remember_entries(store, fresh, entries)
            _remember_heaps(store, fresh, files, point, horizon)
        else:
            for row in fresh:
                store.set_row_filter(row.table, row.filter_wanted, row.epoch)
        for row, chunks in plans:
            if adopts(config, row):
                await_adoption(store, row, point)
            plan_copy(
                store,
                row,
                pin,
                point,
                chunks,
                read=read,
                resumes=row.snapshot_lsn is not None,
                state_without=TableState.STREAMING if config.streams else TableState.COPIED,
            )
    return pin, pinned


def log_pinned(pinned: list[TableRow], point: Lsn) -> None:
    names = bounded(", ".join(str(row.table) for row in pinned), 1_000)
    logger.info("pinned %s at %s: %s", counted(len(pinned), "table"), point, names)


def new_pin(
    store: LogStore,
    config: SourceConfig,
    since: object,
    point: Lsn,
    *,
    held: bool = True,
    read: Lsn | None = None,
) -> str:
    """Record a pin of a server that was started ``since``; returns its id."""
    pin = str(uuid.uuid4())
    store.connection.execute(
        "insert into pins (pin, source, consistent_point, held, server_started, read_lsn)"
        " values (%s, %s, %s, %s, %s, %s)",
        (pin, config.name, str(point), held, since, str(read) if read else None),
    )
    return pin


@dataclass(frozen=True, slots=True)
class Seen:
    """The files of tables' heaps, by oid, and the tables' entries in the publication."""

    files: Mapping[int, Mapping[int, HeapFile]]
    published_as: Mapping[TableId, PublishedAs | None]

    def of(self, row: TableRow) -> tuple[object, object]:
        return self.files.get(row.oid), self.published_as.get(row.table)


def look_at(source: Connection, config: SourceConfig, rows: Sequence[TableRow]) -> Seen:
    now = look_at_tables(source, config.publication, rows)
    return Seen(
        heap_files(source, [row.oid for row in rows]),
        {row.table: now[row.table].published_as for row in rows},
    )


def _filtered_as_wanted(
    source: Connection, config: SourceConfig, rows: list[TableRow]
) -> list[TableRow]:
    """Without those whose entry has another filter since they were published: they wait on."""
    now = look_at_tables(source, config.publication, rows)
    return [
        row
        for row in rows
        if row.snapshot_lsn is not None or row.row_filter == now[row.table].row_filter
    ]


def _remember_entries(
    store: LogStore, fresh: Sequence[TableRow], now: Mapping[TableId, TableNow]
) -> None:
    """Of tables whose copies begin: the log of one that resumes goes on with its known entry."""
    for row in fresh:
        entry = now[row.table].published_as
        store.set_published_as(row.table, str(entry) if entry else None, row.epoch)
        store.set_row_filter(row.table, now[row.table].row_filter, row.epoch)


def _remember_heaps(
    store: LogStore,
    fresh: Sequence[TableRow],
    files: Mapping[int, Mapping[int, HeapFile]],
    point: Lsn,
    horizon: int | None,
) -> None:
    """``horizon``: of the snapshot; None: that of when the tables' logs began."""
    known = known_heaps(store) if horizon is None else {}
    for row in fresh:
        before = known[row.table][1].seen.horizon if horizon is None else horizon
        remember_heaps(store, row, files.get(row.oid, {}), own=Moment(before, point))


def _plans(
    source: Connection,
    config: SourceConfig,
    rows: Sequence[TableRow],
    kinds: Mapping[TableId, str],
) -> Iterator[tuple[TableRow, Chunks]]:
    """Each table with the chunks that are to be copied, but for those that can't be pinned now.

    The queries lock the tables' heaps until the subtransaction ends: an ALTER of one table doesn't
    wait until all are planned. Where one is locked, or all take long, each is asked by itself. So
    is a partitioned one from the start: the server has room for some thousands of locks, of all
    sessions together.
    """
    for row in rows:
        if kinds[row.table] == "p":
            with suppress(psycopg.errors.LockNotAvailable):
                yield from _planned(source, config, [row])
    plain = [row for row in rows if kinds[row.table] != "p"]
    for first in range(0, len(plain), AT_ONCE):
        some = plain[first : first + AT_ONCE]
        try:
            yield from _planned(source, config, some, AT_ONCE_LIMITS)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled):
            for row in some:
                with suppress(psycopg.errors.LockNotAvailable):
                    yield from _planned(source, config, [row])


def _planned(
    source: Connection,
    config: SourceConfig,
    rows: Sequence[TableRow],
    limits: LiteralString = "",
) -> list[tuple[TableRow, Chunks]]:
    # The plan of a copy that resumes stays; it notices a file or a column that is gone.
    fresh = {
        row.oid: row.table for row in rows if row.snapshot_lsn is None and not adopts(config, row)
    }
    found: Mapping[int, list[Heap] | TableProblem] = {}
    if fresh and config.snapshot.mode != "never":
        with source.transaction(force_rollback=True):
            if limits:
                source.execute(limits, prepare=False)
            found = heaps_of(source, fresh)
    there = [(row, found.get(row.oid, [])) for row in rows]
    # One with a foreign partition is described anew before the next pin.
    return [
        (row, chunks_of(source, config, row.table, parts))
        for row, parts in there
        if not isinstance(parts, TableProblem)
    ]


def as_registered(
    source: Connection, config: SourceConfig, rows: Sequence[TableRow]
) -> dict[TableId, str]:
    """The kinds of the tables that the snapshot shows as they were registered; "" with a plan.

    Slot creation waits for running transactions, and one of them may have altered a table. It goes
    on waiting then, and is described anew before the next pin.
    """
    with source.transaction(force_rollback=True):  # keeps no lock of what was planned
        fresh = [row.table for row in rows if row.snapshot_lsn is None]
        now = described(source, config, fresh, again=True)
    same = {row.table: "" for row in rows if row.snapshot_lsn is not None}
    for row in rows:
        found = now.get(row.table)
        if isinstance(found, Enrolled):
            seen = found.table.oid, found.table.columns, found.table.key_columns
            if seen == (row.oid, row.columns, row.key_columns):
                same[row.table] = found.table.kind
    return same


def chunks_of(
    source: Connection, config: SourceConfig, table: TableId, found: Sequence[Heap]
) -> Chunks:
    """The chunks of every heap of the table; none without a heap."""
    # Without TID range scans each chunk would read the whole table: so one reader copies it.
    step = config.table(table).chunk_pages
    if found and source.info.server_version < TID_RANGE_SCANS:
        logger.warning("%s: before Postgres 14 one reader copies a table", table)
        step = max([step, *(heap.pages for heap in found)])
        found = [replace(heap, toast_pages=0) for heap in found]
    least = -(-sum(heap.pages for heap in found) // MAX_CHUNKS)
    chunks = list[tuple[Heap, CtidRange]]()
    for heap in found:
        of_heap = max(least, heap_pages(step, heap.pages, heap.toast_pages))
        leaf = heap.oid if heap.is_leaf else 0
        chunks += [(heap, chunk) for chunk in plan_chunks(heap.pages, of_heap, leaf=leaf)]
    return chunks
