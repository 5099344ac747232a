"""Pins of another server than the source: a physical copy of it, which the tables are read from.

Such a copy has what committed below one LSN, its point, and nothing else. The log has what commits
from some LSN on: from there (:func:`begin_logs`) no transaction is left that had written before the
table was published, or before the flusher knew it. If that comes first, copy and log together are
the table, without a gap; what both have is dropped when the log is merged (invariant 4). So the
copy may be made at any time after its tables' logs began, and be read long after that.

Which files the table had, and how it was published, is held against what it was when its log began,
and from the pin on against what it is (``heap_facts``, ``readiness.source``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import psycopg

from cdc_assets.errors import CdcError, SnapshotLost
from cdc_assets.log.copies.begun import begin_log, forget_begin
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.heaps.files import remember_heaps
from cdc_assets.log.heaps.record import HeapFile, Moment
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.pins.at_horizon import Proven
from cdc_assets.pins.elsewhere.replay import stopped
from cdc_assets.pins.heap_facts import heap_files, moment
from cdc_assets.pins.holders import Holder, hold, under
from cdc_assets.pins.taking import look_at, take
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import NewSlot, current_lsn, export_snapshot
from cdc_assets.readiness.copy_server import (
    PAUSE_STATE,
    CopyServer,
    behind,
    conflicts,
    is_replica,
    other_table,
    problem,
    unreachable,
    unstopped,
)
from cdc_assets.readiness.source.now import look_at_tables
from cdc_assets.readiness.source.restart_record import compare_table

logger = logging.getLogger(__name__)

# What a session gets that a standby ends so that its replay goes on, and what others get that were
# to take over its snapshot.
_ENDED = (psycopg.errors.SerializationFailure, psycopg.errors.UndefinedObject, SnapshotLost)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What came of it: a pin and its tables, if any could be pinned; and why others couldn't."""

    refused: Mapping[TableId, Finding]
    holder: Holder | None = None
    point: Lsn | None = None
    pinned: Sequence[TableRow] = ()


def begin_logs(pipeline: Pipeline, source: Connection, proven: Proven) -> None:
    """Record from which LSN on the logs of the tables are whole: a copy may be of any later one.

    Whatever kept them from it committed below an LSN of now.
    """
    store, config = pipeline.store, pipeline.config
    at, now = moment(source), look_at(source, config, proven.tables)
    same = [row for row in proven.tables if now.of(row) == proven.seen.of(row)]
    begin = current_lsn(source)
    with store.connection.transaction():
        for row in same:
            entry = now.published_as[row.table]
            store.set_published_as(row.table, str(entry) if entry else None, row.epoch)
            remember_heaps(store, row, now.files.get(row.oid, {}), own=Moment(at.horizon, begin))
            begin_log(store, row, begin)
    if same:
        names = ", ".join(str(row.table) for row in same)
        logger.info("the logs of %s begin at %s: a copy may be of any later LSN", names, begin)


def pin_elsewhere(pipeline: Pipeline, source: Connection, tables: list[TableRow]) -> Elsewhere:
    """Pin the tables at the server of ``snapshot.from``, as far as they can be copied there.

    Raises psycopg.Error of the source and of the coordination database.
    """
    names, replica = [row.table for row in tables], is_replica(pipeline.config)
    with ExitStack() as sessions:
        try:
            there = sessions.enter_context(closing(pipeline.connect_copy("pins")))
            server = CopyServer.look(there, pipeline.config)
        except (psycopg.Error, CdcError) as error:
            return refused_for(pipeline, dict.fromkeys(names, unreachable(error)))
        if (found := problem(server, source, goes_on=replica)) is not None:
            return refused_for(pipeline, dict.fromkeys(names, found))
        try:
            shown = _shown(pipeline, source, there, server, tables)
            if shown is None:
                return Elsewhere({})  # the next tick looks again
            with closing(shown.slot.connection):
                return _pin(pipeline, there, shown, tables)
        except _ENDED:
            what = (
                "the replica of snapshot.from ended a session that pinned tables: it needed rows"
                " that VACUUM has removed at the primary. They are pinned again."
            )
            return refused_for(pipeline, dict.fromkeys(names, conflicts(what)))


@dataclass(frozen=True, slots=True)
class _Shown:
    """A snapshot, and what is known of it."""

    slot: NewSlot
    """With the point: what committed below that it shows."""
    read: Lsn
    """What it shows committed below that."""
    files: Mapping[int, Mapping[int, HeapFile]]
    """Of each table's heaps, as they were before the point."""

    @property
    def is_exact(self) -> bool:
        return self.read == self.slot.consistent_point


def _shown(
    pipeline: Pipeline,
    source: Connection,
    there: Connection,
    judged: CopyServer,
    tables: list[TableRow],
) -> _Shown | None:
    """A snapshot of the server, exact if it stands still; None if that changed meanwhile.

    Or if it isn't the one, or parted from the source elsewhere, than when it was ``judged``.
    """
    config, replica = pipeline.config, is_replica(pipeline.config)
    exactly = replica and not all(map(_is_evened, tables))
    stops = exactly and there.info.server_version >= PAUSE_STATE
    with ExitStack() as stop, ExitStack() as undo:
        if stops:
            aside = stop.enter_context(closing(pipeline.connect_copy("replay")))
            stop.enter_context(stopped(there, aside))
        files = heap_files(there, [row.oid for row in tables])
        server = CopyServer.look(there, config)
        slot = export_snapshot(pipeline.copy_dsn)
        undo.callback(slot.connection.close)
        again, stands = CopyServer.look(there, config), server.stands
        if server.point is None or again.stands != stands or not (stands or replica):
            return None
        if stands and again.point != server.point:
            return None
        if _whence(again) != _whence(judged):
            return None
        undo.pop_all()
        # A replica's snapshot may show what it replayed since it was looked at.
        read = server.point if stands else current_lsn(source)
        return _Shown(replace(slot, consistent_point=server.point), read, files)


def _whence(server: CopyServer) -> tuple[str, str, Lsn | None]:
    return server.system, server.database, server.parted


def _is_evened(row: TableRow) -> bool:
    """Whether the log evens out what the snapshot shows beyond its point, by key."""
    return row.mode == "mirror" and bool(row.key_columns)


def _pin(pipeline: Pipeline, there: Connection, shown: _Shown, tables: list[TableRow]) -> Elsewhere:
    store, config, name = pipeline.store, pipeline.config, shown.slot.snapshot_name
    point, goes_on = shown.slot.consistent_point, is_replica(config)
    refused = dict[TableId, Finding]()
    for row in tables:
        begin = row.snapshot_lsn or row.log_from
        if found := behind(row.table, begin, point, goes_on=goes_on):
            refused[row.table] = found
        elif not shown.is_exact and not _is_evened(row):
            refused[row.table] = unstopped(row.table)
    fit = [row for row in tables if row.table not in refused and resumes(pipeline, row, point)]
    with under(there, name):
        refused |= otherwise(pipeline, there, fit)
        files = heap_files(there, [row.oid for row in fit])
    # The log has rows of a partition from the point on, and not that it was truncated, or left.
    fit = [row for row in fit if files.get(row.oid) == shown.files.get(row.oid)]
    fit = [row for row in fit if row.table not in refused]
    if not fit:
        return refused_for(pipeline, refused)
    pin, pinned = take(there, config, store, point, name, fit, elsewhere=True, read=shown.read)
    holder = hold(store, pipeline.copy_dsn, pin, name)
    missing = {row.table for row in fit} - {row.table for row in pinned}
    refused |= {table: other_table(table) for table in missing}
    return replace(refused_for(pipeline, refused), holder=holder, point=point, pinned=pinned)


def resumes(pipeline: Pipeline, row: TableRow, point: Lsn | None = None) -> bool:
    """Whether a copy that lost its pin may go on at ``point``; if not, it begins anew.

    None: at the source, under a pin that is still to be made.

    What is read of one moment can be continued at a later one only where the log evens it out.
    """
    if row.snapshot_lsn is None or _is_evened(row) or row.snapshot_lsn == point:
        return True
    restart_copy(pipeline.store, row)
    return False


def otherwise(
    pipeline: Pipeline, there: Connection, rows: Sequence[TableRow]
) -> dict[TableId, Finding]:
    """The tables that were published otherwise between the begin of their logs and the copy."""
    config, fresh = pipeline.config, [row for row in rows if row.snapshot_lsn is None]
    now = look_at_tables(there, config.publication, fresh)
    found = dict[TableId, Finding]()
    for row in fresh:
        compared = compare_table(row, now[row.table], config.publication, config.table(row.table))
        if (wrong := next(compared, None)) is not None:
            forget_begin(pipeline.store, row)
            found[row.table] = other_table(row.table, f" ({wrong.code}: {wrong.message})")
    return found


def refused_for(pipeline: Pipeline, refused: Mapping[TableId, Finding]) -> Elsewhere:
    """Have the tables say why they wait."""
    for table, found in refused.items():
        said = found.message.removeprefix(f"{table}: ")
        pipeline.store.note_waiting(table, f"{found.code}: {said} {found.remedy}")
    return Elsewhere(refused)
