"""Pins of a restored dump, which another database has: its oids, files and pages are its own.

A dump has no LSN of its own. Only one that was taken under a snapshot of ours has
(:func:`hold_point`): the consistent point of a slot, which splits the table's history as that of a
pin does. What the tables were like then is remembered, as the dump doesn't tell. That the rows are
those of the dump can't be seen: the table is compared with the source in the end (``verify``). But
a dump's script makes all tables before it loads the first row, and each one's rows come at once: so
a table without any, where the source's had some, isn't restored yet, or failed to load.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import LiteralString

import psycopg
from psycopg import sql

from cdc_assets.errors import (
    CdcError,
    PreflightError,
    SnapshotLost,
    TableProblem,
    first_line,
)
from cdc_assets.log.copies.chunks import plan_copy, planned_in, restart_copy
from cdc_assets.log.copies.held import HeldTable, held_table, remember_held
from cdc_assets.log.heaps.files import remember_heaps
from cdc_assets.log.heaps.record import Moment
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.pins.elsewhere.copies import Elsewhere, otherwise, refused_for
from cdc_assets.pins.enrol import as_published
from cdc_assets.pins.heap_facts import heap_files, moment
from cdc_assets.pins.holders import hold, started, under
from cdc_assets.pins.taking import as_registered, chunks_of, new_pin
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import SourceTable, describe_all, heap_names, heaps_of
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId, quoted
from cdc_assets.postgres.publication.collations import filters_alike
from cdc_assets.postgres.publication.contents import publication_of
from cdc_assets.postgres.session.connect import Connection, connect
from cdc_assets.postgres.session.waits import locked
from cdc_assets.postgres.slots import create_slot, export_snapshot, on_standby
from cdc_assets.readiness.copy_server import behind, unreachable
from cdc_assets.readiness.restored import awaited, other_collation, other_restored, unknown_lsn
from cdc_assets.readiness.source.now import look_at_tables
from cdc_assets.readiness.source.planning import AT_ONCE_LIMITS, PLANNING_TIMEOUT

# Other clusters may give the same oid, and the same file, to what was restored from the same dump.
_DATABASE: LiteralString = """
select c.system_identifier || '/' || d.oid
  from pg_catalog.pg_control_system() c, pg_catalog.pg_database d
 where d.datname = pg_catalog.current_database()
"""
# A table may have nothing but dead rows: no more of it is read at the source.
_FIRST_PAGES = 128
_PARTITIONS: LiteralString = """
select n.nspname::text, c.relname::text
  from pg_catalog.unnest(%s::oid[]) w (root)
 cross join lateral pg_catalog.pg_partition_tree(w.root::regclass) t
  join pg_catalog.pg_class c on c.oid = t.relid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where t.relid <> w.root
 order by 1, 2
"""


@dataclass(frozen=True, slots=True)
class HeldPoint:
    """A snapshot for a dump, of what committed below ``lsn``; it lives as long as ``session``."""

    lsn: Lsn
    snapshot_name: str
    session: Connection
    tables: Sequence[TableId]
    partitions: Sequence[TableId]
    """Of these tables, on all levels: a dump of a table alone has none of them."""

    def look(self) -> None:
        """Raise SnapshotLost if nothing holds the snapshot any more."""
        try:
            self.session.execute("select 1")
        except psycopg.Error as error:
            raise SnapshotLost(
                f"the snapshot {self.snapshot_name} isn't held any more: {first_line(error)}.",
                "A dump that had begun has it still; for another one, hold one anew.",
            ) from error


def hold_point(pipeline: Pipeline, source: Connection, rows: Sequence[TableRow]) -> HeldPoint:
    """Take a snapshot by a slot, and remember what the tables are like under it.

    Raises SlotBusy or PreflightError.
    """
    config, store = pipeline.config, pipeline.store
    if on_standby(source):
        raise PreflightError(
            "a standby's slot has no snapshot that a dump could rely on.",
            "Give a primary's address in postgres.dsn, or let the tables be copied there.",
        )
    rows = as_published(source, config, rows)  # what is registered doesn't tell their filters
    name = f"{config.slot[:50]}_{uuid.uuid4().hex[:8]}"
    slot = create_slot(pipeline.replication_dsn, name, temporary=True)
    with ExitStack() as undo:
        with closing(slot.connection):  # drops the slot, so that it keeps no WAL any longer
            called = f"cdc_assets {config.name} pin"
            session = connect(pipeline.source_dsn, application_name=called)
            undo.callback(session.close)
            session.execute("begin isolation level repeatable read read only")
            imported = sql.SQL("set transaction snapshot {}").format(
                sql.Literal(slot.snapshot_name)
            )
            session.execute(imported)
            exported = session.execute("select pg_catalog.pg_export_snapshot()").fetchone()
            assert exported is not None
        held = list[TableRow]()
        with under(source, exported[0]):
            kinds = as_registered(source, config, rows)
            known = [row for row in rows if row.table in kinds]
            wrong = otherwise(pipeline, source, known)
            known = [row for row in known if row.table not in wrong]
            now = look_at_tables(source, config.publication, known)
            known = [row for row in known if row.row_filter == now[row.table].row_filter]
            horizon = moment(source).horizon
            files = heap_files(source, [row.oid for row in known])
            described = describe_all(source, [row.table for row in known])
            for row in known:
                entry, row_filter = now[row.table].published_as, row.row_filter
                first = f"({row_filter or 'true'}) and ctid < '({_FIRST_PAGES},0)'"
                filled = _filled(source, described[row.table], first, AT_ONCE_LIMITS)
                facts = HeldTable(
                    str(entry) if entry else None,
                    row_filter,
                    files.get(row.oid, {}),
                    horizon,
                    filled or 0,
                )
                remember_held(store, slot.consistent_point, row, facts)
                held.append(row)
            parts = _partitions(source, held)
        undo.pop_all()
        tables = [row.table for row in held]
        return HeldPoint(slot.consistent_point, exported[0], session, tables, parts)


def _filled(
    connection: Connection,
    table: SourceTable | TableProblem,
    condition: str,
    limits: LiteralString,
) -> int | None:
    """How many of the table's heaps have such rows; None: that can't be told within the limits."""
    if isinstance(table, TableProblem):
        return None
    heaps, found = heap_names(connection, [table])[table.id], 0
    if isinstance(heaps, TableProblem):
        return None
    for heap in heaps:
        # A filter may name the table, whose rows are those of a partition here.
        rows = f"select from only {heap} {quoted(table.id.name)} where {condition}"
        try:
            with connection.transaction(force_rollback=True):
                connection.execute(limits, prepare=False)
                row = connection.execute(f"select exists ({rows})".encode()).fetchone()
        except psycopg.DatabaseError:
            if connection.closed:
                raise
            return None
        found += row is not None and bool(row[0])
    return found


def _partitions(source: Connection, rows: Sequence[TableRow]) -> list[TableId]:
    found = source.execute(_PARTITIONS, ([row.oid for row in rows],)).fetchall()
    return [TableId(schema, name) for schema, name in found]


def pin_restored(pipeline: Pipeline, source: Connection, tables: list[TableRow]) -> Elsewhere:
    """Pin the tables in the database that a dump was restored into, as far as they are known.

    Raises psycopg.Error of the source and of the coordination database.
    """
    origin = pipeline.config.snapshot.from_
    assert origin is not None
    tables = [row for row in tables if not _begins_anew(pipeline, row)]
    names = [row.table for row in tables]
    if origin.dsn is None or origin.lsn is None:
        return refused_for(pipeline, {table: awaited(table) for table in names})
    point = Lsn.parse(origin.lsn)
    refused, fit = dict[TableId, Finding](), list[tuple[TableRow, HeldTable]]()
    for row in tables:
        held = held_table(pipeline.store, point, row)
        if held is None or held.row_filter != row.row_filter:
            refused[row.table] = unknown_lsn(row.table, point)
        elif found := behind(row.table, row.snapshot_lsn or row.log_from, point):
            refused[row.table] = found
        elif row.snapshot_lsn in (None, point):
            fit.append((row, held))
        else:
            restart_copy(pipeline.store, row)  # its plan is of another dump's pages
    if not fit:
        return refused_for(pipeline, refused)
    with ExitStack() as sessions:
        try:
            there = sessions.enter_context(closing(pipeline.connect_copy("pins")))
            slot = export_snapshot(pipeline.copy_dsn)
            sessions.enter_context(closing(slot.connection))
        except (psycopg.Error, CdcError) as error:
            unknown = dict.fromkeys([row.table for row, _ in fit], unreachable(error))
            return refused_for(pipeline, refused | unknown)
        strange = {row.table for row, _ in fit if not _filters_alike(pipeline, source, there, row)}
        refused |= {table: other_collation(table) for table in strange}
        if not (fit := [(row, held) for row, held in fit if row.table not in strange]):
            return refused_for(pipeline, refused)
        pin, pinned = _take(pipeline, there, point, slot.snapshot_name, fit)
        holder = hold(pipeline.store, pipeline.copy_dsn, pin, slot.snapshot_name)
    done = {row.table for row in pinned}
    refused |= {row.table: other_restored(row.table) for row, _ in fit if row.table not in done}
    return replace(refused_for(pipeline, refused), holder=holder, point=point, pinned=pinned)


def _take(
    pipeline: Pipeline,
    there: Connection,
    point: Lsn,
    snapshot_name: str,
    tables: Sequence[tuple[TableRow, HeldTable]],
) -> tuple[str, list[TableRow]]:
    """Record the pin, with plans of the pages that the restored tables have."""
    store, config, pinned = pipeline.store, pipeline.config, list[TableRow]()
    with under(there, snapshot_name):
        busy = locked(there, [row.table for row, _ in tables])
        free = [(row, held) for row, held in tables if row.table not in busy]
        found = describe_all(there, [row.table for row, _ in free])
        same = {
            row.table: now
            for row, held in free
            if (now := _same(row, found[row.table])) and _has_rows(there, now, held)
        }
        heaps = heaps_of(there, {now.oid: table for table, now in same.items()})
        since, database = started(there), there.execute(_DATABASE).fetchone()
    assert database is not None
    with store.connection.transaction():
        pin = new_pin(store, config, since, point, read=point)
        for row, held in tables:
            now = same.get(row.table)
            if now is None or isinstance(parts := heaps[now.oid], TableProblem):
                continue
            if now.kind == "p" and len(parts) < len(held.files):
                continue  # the rows of the others aren't there
            if row.snapshot_lsn is None:
                store.set_published_as(row.table, held.published_as, row.epoch)
                store.set_row_filter(row.table, held.row_filter, row.epoch)
                remember_heaps(store, row, held.files, own=Moment(held.horizon, point))
            elif planned_in(store, row) != database[0]:
                restart_copy(store, row)  # the pages of its plan are another table's
                continue
            plan_copy(
                store,
                row,
                pin,
                point,
                chunks_of(there, config, row.table, parts),
                read=point,
                resumes=row.snapshot_lsn is not None,
                database=database[0],
            )
            pinned.append(row)
    return pin, pinned


def _begins_anew(pipeline: Pipeline, row: TableRow) -> bool:
    """Give up a copy that was begun at the source, or at a physical copy of it: no dump has that.

    Its log may have begun before one could be held.
    """
    begun_there = row.snapshot_lsn is not None and planned_in(pipeline.store, row) is None
    return begun_there and restart_copy(pipeline.store, row)


def _filters_alike(
    pipeline: Pipeline, source: Connection, there: Connection, row: TableRow
) -> bool:
    """Whether the table's filter, if it has one, means the same rows in the restored database."""
    name = publication_of(pipeline.config.publication, inserts_only=row.inserts_only)
    filtered = row.filter_wanted is not None
    return not filtered or filters_alike(source, there, name, row.table, row.oid)


def _has_rows(there: Connection, table: SourceTable, held: HeldTable) -> bool:
    """Whether no fewer of its heaps have rows than the source's had, as far as that can be told."""
    wanted = held.filled if table.kind == "p" else min(held.filled, 1)
    if not wanted:
        return True
    found = _filled(there, table, held.row_filter or "true", PLANNING_TIMEOUT)
    return found is None or found >= wanted


def _same(row: TableRow, found: SourceTable | TableProblem) -> SourceTable | None:
    """The restored table, if it has the columns of the source's; their numbers are its own."""
    if isinstance(found, TableProblem):
        return None
    types = {column.name: column.type for column in found.columns}
    wanted = {column.name: column.type for column in row.columns}
    return found if wanted.items() <= types.items() else None
