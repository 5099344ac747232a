"""Removing from the lake what no reader needs any more: snapshots, orphans, copies that died.

Expiry needs no writer lock: it changes no row and moves no branch. Iceberg commits it by
compare-and-swap, beside merges, and deletes afterwards only what the removed snapshots have and
none of the remaining ones; a merge under way has what ``main`` has, which remains, and files of its
own, which no snapshot of the table has yet. ``plan`` decides what is kept: above all the newest
snapshot that names the cursor.

Orphans are files below the table's location that no snapshot and no metadata ever named: those of
dead writers, and of workers whose copy was given up. Only their age distinguishes them from files
of a write under way, so they get a grace of a day at least, and are looked for once the writer's
lock was free. A table that isn't copied completely is left alone: its workers' files wait for their
commit for as long as the copy takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from pyarrow import fs
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.copies import SUFFIX, drop_copy, is_copy
from cdc_assets.lake.drafts.tables import forget_drafts
from cdc_assets.lake.lineage import OFFSET
from cdc_assets.lake.lost_reply import is_there
from cdc_assets.lake.place import deletable, refuse_misled
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.staged.places import Place
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.states import SETTLED
from cdc_assets.log.store import LogStore
from cdc_assets.maintenance.compact import Busy, writing
from cdc_assets.maintenance.files import stored
from cdc_assets.maintenance.plan import expiry, orphaned_before

logger = logging.getLogger(__name__)

# Iceberg's error where a file isn't there.
_GONE = "NotFoundException"
# Before any snapshot was made: else those of five days would be expired with the ones named.
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)
# Of a snapshot that a tag or a branch keeps, however old it is.
_KEPT = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Removed:
    """Removed files; ``snapshots``: how many were expired for it."""

    files: int = 0
    bytes: int = 0
    snapshots: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(
            self.files + other.files,
            self.bytes + other.bytes,
            self.snapshots + other.snapshots,
        )


NOTHING = Removed()


def expire_snapshots(
    lake: LakeTable, session: Callable[[], SparkSession], now: datetime
) -> Removed:
    """Expire what the configuration doesn't keep; asks for a session only if there is any.

    Before that, the snapshots that lost commits left, whatever their age.
    """
    loaded = lake.load()
    if loaded is not None and _expire_lost(lake, loaded, session):
        loaded = lake.load()
    if loaded is None:
        return NOTHING
    ancestors, others = _history(loaded)
    made = [_made(snapshot.timestamp_ms) for snapshot in others]
    wanted = expiry(ancestors, made, lake.config.maintenance, now)
    if wanted is None:
        return NOTHING
    refuse_misled(lake, loaded)
    before = _stored_bytes(lake)
    row = (
        session()
        .sql(
            f"call {CATALOG}.system.expire_snapshots(table => {lake.procedure_name},"
            f" older_than => {_timestamp(wanted.older_than)}, retain_last => {wanted.retain_last},"
            " stream_results => true)"
        )
        .first()
    )
    assert row is not None
    # Files that merges add meanwhile make it too small, never too large.
    freed = before - _stored_bytes(lake)
    return Removed(sum(int(count or 0) for count in row), max(0, freed), wanted.snapshots)


def _stored_bytes(lake: LakeTable) -> int:
    """Of its folder, with keys of now: those that a catalog lent before a statement may be over."""
    loaded = lake.loaded()
    return stored(Storage.of(lake.config.s3, loaded.io.properties), loaded.location()).bytes


def _expire_lost(lake: LakeTable, loaded: Table, session: Callable[[], SparkSession]) -> bool:
    """Expire the snapshots whose manifest list was lost with a reply; whether there were any.

    See ``lake.lost_reply``. Nobody could look for orphans, or expire any snapshot, beside them.
    Iceberg expires them, and fails as it looks for their files: those are orphans then.
    """
    _, left = _history(loaded)
    lost = [snapshot for snapshot in left if not is_there(loaded, snapshot.manifest_list)]
    if not lost:
        return False
    refuse_misled(lake, loaded)
    ids = ", ".join(str(snapshot.snapshot_id) for snapshot in lost)
    try:
        session().sql(
            f"call {CATALOG}.system.expire_snapshots(table => {lake.procedure_name},"
            f" older_than => {_timestamp(_NEVER)}, snapshot_ids => array({ids}))"
        )
    except PySparkException as error:
        if _GONE not in str(error):
            raise
    logger.warning("%s: snapshots of lost commits are expired: %s", lake.row.table, ids)
    return True


def _history(loaded: Table) -> tuple[list[tuple[datetime, bool]], list[Snapshot]]:
    """``main``'s snapshots, the newest first, and those that no branch or tag leads to.

    Of the former, when each was made (``_KEPT`` if it can't go), and whether it names the cursor.
    """
    by_id = {s.snapshot_id: s for s in loaded.metadata.snapshots}
    led_to: set[int] = set()
    ancestors = []
    heads = [ref.snapshot_id for name, ref in loaded.metadata.refs.items() if name != "main"]
    for head in [loaded.metadata.current_snapshot_id, *heads]:
        at = head
        while at is not None and (snapshot := by_id.get(at)) is not None:
            if at not in led_to and head == loaded.metadata.current_snapshot_id:
                said = snapshot.summary.additional_properties if snapshot.summary else {}
                made = _KEPT if at in heads else _made(snapshot.timestamp_ms)
                ancestors.append((made, OFFSET in said))
            led_to.add(at)
            at = snapshot.parent_snapshot_id
    return ancestors, [s for s in by_id.values() if s.snapshot_id not in led_to]


def _made(timestamp_ms: int) -> datetime:
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC)


def _timestamp(at: datetime) -> str:
    return f"timestamp '{at.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f} UTC'"


def remove_orphans(
    store: LogStore, lake: LakeTable, session: Callable[[], SparkSession], now: datetime
) -> Removed:
    """Remove files below the table's location that nothing ever named and that are old enough.

    A change under way ends first, and no earlier draft is published later: whatever may be named
    after the look is younger, however long a change takes. Raises Busy.
    """
    loaded = lake.load()
    if loaded is None or lake.row.state not in SETTLED:
        return NOTHING
    deletable(lake, loaded)  # raises before Spark looks
    with writing(store, lake.row):
        forget_drafts(lake, loaded)
    older_than = orphaned_before(now, lake.config.maintenance)
    # Hadoop has no file system for s3://; the catalog's own lists by prefix.
    by_prefix = str(loaded.location().startswith("s3://")).lower()
    rows = (
        session()
        .sql(
            f"call {CATALOG}.system.remove_orphan_files(table => {lake.procedure_name},"
            f" older_than => {_timestamp(older_than)}, dry_run => true,"
            f" prefix_listing => {by_prefix})"
        )
        .collect()
    )
    if not rows:
        return NOTHING
    row = store.table(lake.row.table)
    if row is None or (row.epoch, row.state) != (lake.row.epoch, lake.row.state):
        return NOTHING  # a copy of it began while we looked
    place = deletable(lake, lake.loaded())  # with keys of now
    return Removed(*place.delete([place.path(str(row[0])) for row in rows]))


def drop_dead_copies(store: LogStore, lake: LakeTable, now: datetime) -> Removed:
    """Drop the targets of copies that were given up, and the files that their workers left."""
    gone = NOTHING
    oldest = orphaned_before(now, lake.config.maintenance)
    # A table that is complete needs the target of no copy any more, its own included.
    last = lake.row.epoch if lake.row.state in SETTLED else lake.row.epoch - 1
    for epoch in range(1, last + 1):
        shadow = LakeTable(lake.config, lake.table, lake.row, suffix=f"{SUFFIX}{epoch}")
        loaded = shadow.load()
        if loaded is not None and not is_copy(shadow, loaded):
            continue  # another table's, or somebody's own, that has such a name
        if loaded is not None:
            with suppress(Busy), writing(store, lake.row):
                gone += Removed(*drop_copy(shadow, loaded))
        if shadow.location is not None:
            gone += _remove_old(deletable(shadow), oldest)
    return gone


def _remove_old(place: Place, oldest: datetime) -> Removed:
    """Delete the files of ``place`` older than ``oldest``, and the folders that are then empty."""
    selector = fs.FileSelector(place.root, recursive=True, allow_not_found=True)
    found = place.filesystem.get_file_info(selector)
    gone = place.delete(i.path for i in found if i.is_file and i.mtime < oldest)
    place.delete_empty([place.root, *(i.path for i in found if not i.is_file)])
    return Removed(*gone)
