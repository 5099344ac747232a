"""Removing staged files: those that every consumer group is past, and those nobody registered.

Keeps invariant 11, staged files die last. A file is removed a grace period after every group's
cursor is past it; the lake's cursor is read from the Iceberg table, never from its cache. The entry
is deleted from ``log_index`` before the file: a run that dies in between leaves an orphan, never an
entry without its file.

A file that small tables share is removed with the last entry that names it. Of a second lake
(``relay``) the entries go, and the files are another source's, which keeps them until then: the
first one can't read the second's cursor from its Iceberg table. Entries that the second has, and
doesn't hold, go with the first one's.

An orphan is a file below the table's folder, or the shared one, without an entry. A flusher stages
a long transaction in parts and registers them at its COMMIT, perhaps days later, so age alone
proves nothing. The proof: every transaction that ran when the file was written has ended, and what
had committed by then is registered. ``Settling`` watches for that, over as many runs as it takes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta

import psycopg
from pyarrow import fs

from cdc_assets.errors import TableProblem, first_line
from cdc_assets.log.cursors import Cursor
from cdc_assets.log.groups.lakes import kept_from
from cdc_assets.log.sessions.heartbeat import forget_ended
from cdc_assets.log.staged.places import Place, foreign_entry, staged_place, staged_places
from cdc_assets.log.staged.storage import SHARED_FOLDER, folder_name
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.log.tables import GROUP
from cdc_assets.maintenance.expire import NOTHING, Removed
from cdc_assets.maintenance.plan import CLOCKS_APART, orphaned_before
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.relay.first import forget_passed_on

logger = logging.getLogger(__name__)

# Entries deleted in one transaction; a crash after it leaves so many orphans.
_BATCH = 1000
_SETTLING = "maintenance.settling"
# Only its age distinguishes a pin that no table is read under from one that is being made.
_PIN_GRACE = timedelta(days=1)


def passed_offset(store: LogStore, row: TableRow, lake: Cursor | None) -> int:
    """The offset that every consumer group is past. ``lake``: the Iceberg table's own cursor.

    While a table waits for a copy, no file of its log is passed: a copy decides by LSN.
    """
    others = store.connection.execute(
        'select min(coalesce(m."offset", 0)) from'
        " (select consumer_group, source, table_name from mat_cursor"
        "  union select consumer_group, source, table_name from claims) g"
        " left join mat_cursor m using (consumer_group, source, table_name)"
        " where g.source = %s and g.table_name = %s and g.consumer_group <> %s",
        (store.source, str(row.table), GROUP),
    ).fetchone()
    ours = (
        lake.offset
        if lake is not None and row.state in (TableState.STREAMING, TableState.PARKED)
        else 0
    )
    return min(ours, others[0]) if others and others[0] is not None else ours


def mark_passed(store: LogStore, row: TableRow, offset: int) -> None:
    """Record since when every group is past an entry; clear it where a cursor went back.

    While a table is copied, the lake's group doesn't need entries that the copy has
    (``snapshot_lsn``); if there are other groups, their cursors alone decide.
    """
    alone = not store.connection.execute(
        "select from mat_cursor where source = %s and table_name = %s and consumer_group <> %s"
        " union all select from claims where source = %s and table_name = %s"
        " and consumer_group <> %s",
        (store.source, str(row.table), GROUP) * 2,
    ).fetchall()
    # Only while copying: the complete table names its cursor, and the log has to go on there.
    copied = row.snapshot_lsn if alone and row.state == TableState.COPYING else None
    store.connection.execute(
        "update log_index set passed_at = case when end_offset <= %(offset)s"
        " or flushable_lsn <= %(copied)s then now() end"
        " where source = %(source)s and table_name = %(table)s"
        " and (passed_at is not null) <> (end_offset <= %(offset)s or flushable_lsn <= %(copied)s)",
        {
            "offset": offset,
            "copied": str(copied or Lsn.ZERO),
            "source": store.source,
            "table": str(row.table),
        },
    )


def remove_given_up(pipeline: Pipeline, grace: timedelta, settled: datetime | None) -> Removed:
    """Remove the staged files of tables that are given up (``operations.drop_table``)."""
    store, config = pipeline.store, pipeline.config
    removed, configured = NOTHING, {table.id for table in config.tables}
    for row in store.tables(None, TableState.PARKED):
        if row.oid or row.table in configured:
            continue
        store.connection.execute(
            "update log_index set passed_at = now()"
            " where source = %s and table_name = %s and passed_at is null",
            (store.source, str(row.table)),
        )
        try:
            removed += remove_passed(store, row.table, staged_places(config), grace)
            now = store.server_now().astimezone(UTC)
            removed += remove_staged_orphans(pipeline, row.table, settled, now)
        except TableProblem as problem:
            logger.warning("%s", problem)
    return removed


def remove_passed(
    store: LogStore, table: TableId, places: Sequence[Place], grace: timedelta
) -> Removed:
    """Remove the files that were passed longer ago than ``grace``, their entries first.

    What a second lake holds stays until its own maintenance has removed it from its log.

    Each table counts its share of a shared file's bytes, and the last one counts the file. Raises
    TableProblem, at the end, if entries name files that are none of the source's; these stay.
    """
    gone, foreign = NOTHING, set[str]()
    theirs = kept_from(store, table)
    while len(foreign) < _BATCH:
        found = store.connection.execute(
            "select start_offset, path from log_index where source = %s and table_name = %s"
            " and passed_at <= now() - %s and path <> all(%s)"
            " and (start_offset < %s) is not false order by start_offset limit %s",
            (store.source, str(table), grace, list(foreign), theirs, _BATCH),
        ).fetchall()
        place_of = {path: staged_place(places, path) for _, path in found}
        foreign |= {path for path, place in place_of.items() if place is None}
        with store.connection.transaction():
            rows = store.connection.execute(
                "delete from log_index where source = %s and table_name = %s"
                " and passed_at <= now() - %s and start_offset = any(%s)"
                " returning path, byte_size, first_row is not null, start_offset",
                (store.source, str(table), grace, [n for n, path in found if path not in foreign]),
            ).fetchall()
            forget_passed_on(store, table, [start for *_, start in rows])
        # Asked after the deletion is committed: of two concurrent runs the last one finds no entry.
        kept = _shared(store, {path for path, _, shared, _ in rows if shared})
        paths = {path for path, *_ in rows} - kept
        for place in places:
            place.delete(place.path(path) for path in paths if place_of.get(path) == place)
        if not any(place.lent for place in places):
            gone += Removed(len(paths), sum(size for _, size, *_ in rows))
        if not found:
            break
    if foreign:
        raise foreign_entry(table, min(foreign), places)
    return gone


def _shared(store: LogStore, paths: AbstractSet[str]) -> set[str]:
    """Those of ``paths`` that entries of other tables still name."""
    if not paths:
        return set()
    rows = store.connection.execute(
        "select distinct path from log_index where first_row is not null and path = any(%s)",
        (list(paths),),
    )
    return {path for (path,) in rows}


def remove_staged_orphans(
    pipeline: Pipeline, table: TableId | None, settled: datetime | None, now: datetime
) -> Removed:
    """Remove files older than the grace that never will be registered; table None: shared files."""
    config = pipeline.config
    if settled is None:
        return NOTHING
    oldest = min(settled - CLOCKS_APART, orphaned_before(now, config.maintenance))
    folder = SHARED_FOLDER if table is None else folder_name(table)
    gone = NOTHING
    for source in staged_places(config):
        place = Place(f"{source.uri}/{folder}", source.storage)
        found = list(_files(place, oldest))
        if not found:
            continue
        # Asked after the listing, so that a file registered meanwhile is seen.
        registered = {
            place.below(place.path(path))
            for (path,) in pipeline.store.connection.execute(
                "select path from log_index where source = %(source)s"
                " and case when %(table)s::text is null then first_row is not null"
                "  else table_name = %(table)s end",
                {"source": config.name, "table": None if table is None else str(table)},
            )
            if place.holds(path)
        }
        gone += Removed(
            *place.delete(i.path for i in found if place.below(i.path) not in registered)
        )
        days = place.filesystem.get_file_info(fs.FileSelector(place.root))
        # Nobody writes into the folder of an older day any more.
        place.delete_empty(i.path for i in days if (d := _day(i.path)) and d < oldest.date())
    return gone


def _files(place: Place, oldest: datetime) -> Iterator[fs.FileInfo]:
    """The files older than ``oldest``; folders are days, so that younger ones aren't listed."""
    filesystem = place.filesystem
    for folder in filesystem.get_file_info(fs.FileSelector(place.root, allow_not_found=True)):
        day = _day(folder.path)
        if day is not None and day <= oldest.date():
            selector = fs.FileSelector(folder.path, recursive=True)
            for info in filesystem.get_file_info(selector):
                if info.is_file and info.mtime < oldest:
                    yield info


def _day(path: str) -> date | None:
    try:
        return date.fromisoformat(path.rstrip("/").rsplit("/", 1)[-1])
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Settling:
    """``settled``: every file staged before it is registered, or never will be.

    ``at`` is the next candidate: it is settled once every transaction below ``xid`` has ended, and
    the log is then flushed beyond ``lsn``, where the WAL ended after that.
    """

    settled: str | None = None
    at: str | None = None
    xid: int = 0
    lsn: str | None = None


def settle(pipeline: Pipeline) -> datetime | None:
    """Take the next step; returns the time before which all is settled, None if it isn't known.

    None, too, if the source can't be reached: the lake is maintained without it.
    """
    if not pipeline.config.streams or pipeline.config.log is not None:
        return None
    try:
        source = pipeline.connect_source("maintenance")
    except psycopg.OperationalError as error:
        logger.warning("the source can't be asked what is settled: %s", first_line(error))
        return None
    store = pipeline.store
    text = store.meta(_SETTLING)
    now = Settling(**json.loads(text)) if text else Settling()
    with source:
        row = source.execute(
            "select pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint"
            " from pg_current_snapshot() s"
        ).fetchone()
        assert row is not None
        if now.lsn is not None and store.is_flushed(Lsn.parse(now.lsn)):
            now = Settling(settled=now.at)
        elif now.at is not None and now.lsn is None and row[0] >= now.xid:
            now = replace(now, lsn=str(current_lsn(source)))
        if now.at is None:
            now = replace(now, at=store.server_now().astimezone(UTC).isoformat(), xid=row[1])
    store.set_meta(_SETTLING, json.dumps(asdict(now)))
    return datetime.fromisoformat(now.settled) if now.settled else None


def remove_old_rows(store: LogStore) -> int:
    """Delete what is past, and return how many rows that were.

    Pins that no table is read under, plans of past epochs, and sessions that are over: processes
    that live for seconds leave theirs to the next heartbeat, which may never come.
    """
    store.forget_locks()
    sessions = forget_ended(store.connection, store.source)
    pins = store.connection.execute(
        "delete from pins p where source = %s and created_at < now() - %s"
        " and not exists (select from tables t where t.pin = p.pin)",
        (store.source, _PIN_GRACE),
    )
    plans = store.connection.execute(
        "delete from snapshot_progress p using tables t where p.source = %s"
        " and t.source = p.source and t.table_name = p.table_name and p.epoch < t.epoch",
        (store.source,),
    )
    return pins.rowcount + plans.rowcount + sessions
