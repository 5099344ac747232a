"""Compaction: small files become large ones, deletion vectors are applied, in bounded slices.

Keeps invariants 7 and 9, and never races with a merge. Without a lock, a merge that moves ``main``
every few seconds would make each compaction fail at its commit, for days (a well-known pain), and a
compaction that moved ``main`` first would make the merge fail. So a slice holds the table's writer
lock, as a merge does. A merge waits for one slice at most: about one target file, some seconds.
Compaction queues for the lock, so a busy table's merges can't keep it out. After each slice it
steps aside until a merge that was refused the lock has had its turn.

A slice is written as a draft (``lake.publish``) and compared with ``main`` there: it must have as
many rows, by Iceberg's own counts, and in tables of up to CHECKED_ROWS the same keys. Then a commit
of no rows carries the cursor on and ``main`` moves, in one step. Readers never see wrong rows; a
slice that dies leaves files that are orphans.

Iceberg's planner picks the files to rewrite, within the options of ``plan``. It rewrites files only
with others of their partition, drops the deletion vectors of the files that it rewrote and no
others, and sorts by the table's sort order if there is one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pyiceberg.table import Table
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_assets.errors import TableProblem
from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.drafts.branches import drop_abandoned, writers_branches
from cdc_assets.lake.layout import arrange, is_arranged
from cdc_assets.lake.lineage import count
from cdc_assets.lake.lost_reply import healing
from cdc_assets.lake.publish import Draft, append, name_cursor, published
from cdc_assets.lake.spark.sql import listed, quoted, ticked
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import READING, RETRIES, LakeTable
from cdc_assets.log.locks import write_lock
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.maintenance.files import live_files
from cdc_assets.maintenance.plan import Slice, manifests_rewritten, next_slice
from cdc_assets.postgres.names import TableId

logger = logging.getLogger(__name__)

# A merge's turn takes 20 seconds, a comparison's or a copy's last step longer.
LOCK_SECONDS = 120.0
# A run that found the lock taken looks again within 5 seconds.
STEP_ASIDE_SECONDS = 8.0
_LOOK_SECONDS = 0.1
# A scan of so many keys takes half a second; above that only Iceberg's counts are compared.
CHECKED_ROWS = 10_000_000
# Table properties that bound the metadata each commit rewrites, its tries, and a scan's batches.
_LIMITS = (
    "write.metadata.delete-after-commit.enabled",
    "write.metadata.previous-versions-max",
    RETRIES,
    *READING,
)


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was rewritten. ``applied_deletes`` counts deletion vectors that are gone."""

    slices: int = 0
    rewritten_files: int = 0
    rewritten_bytes: int = 0
    added_files: int = 0
    applied_deletes: int = 0
    manifests_before: int = 0
    manifests_after: int = 0


NOT_COMPACTED = Compacted()


class Busy(Exception):
    """The table isn't ours to write now; the next run looks again. The message says why."""


class _NothingToPublish(Exception):
    """Leaves a draft unpublished."""


@contextmanager
def writing(store: LogStore, row: TableRow, *, patient: bool = True) -> Iterator[None]:
    """Hold the writer lock of the table that ``row`` describes.

    Raises Busy after LOCK_SECONDS, at once unless ``patient``; also if its copy was begun anew
    since: a commit would name the old copy, and have its columns.
    """
    lock = write_lock(row.table)
    if not (store.lock_within(lock, LOCK_SECONDS) if patient else store.try_lock(lock)):
        raise Busy("somebody else writes it")
    try:
        now = store.copy_state(row.table)
        if now is None or now.epoch != row.epoch:
            raise Busy("its copy was begun anew")
        yield
    finally:
        store.unlock(lock)


def step_aside(store: LogStore, table: TableId) -> None:
    """Let a merge that was refused the lock have its turn, if anything waits to be merged.

    A refused merge leaves no trace, so this waits for as long as it may take to come back.
    """
    deadline = time.monotonic() + STEP_ASIDE_SECONDS
    while time.monotonic() < deadline and not store.is_locked(write_lock(table)):
        if not any(b.rows for b in store.backlogs() if b.table == table):
            return
        time.sleep(_LOOK_SECONDS)


def compact(
    store: LogStore,
    lake: LakeTable,
    session: Callable[[], SparkSession],
    *,
    until: float,
) -> Compacted:
    """Rewrite slice by slice until nothing needs it or ``time.monotonic()`` is ``until``.

    Asks for a session only if there is something to do. Raises Busy if nothing could be done,
    TableProblem (the check failed; nothing was published), or what Spark raises.
    """
    done = NOT_COMPACTED
    if (loaded := lake.load()) is not None and not is_arranged(lake, loaded):
        with writing(store, lake.row):
            arrange(session(), lake, lake.loaded())
    while _due(lake) is not None and time.monotonic() < until:
        try:
            with writing(store, lake.row):
                # Looked at again: merges went on until the lock was ours.
                due = _due(lake)
                found = rewritten(session(), lake, due, done) if due is not None else None
        except Busy:
            if not done.slices:
                raise
            break
        if found is None:
            break
        done = found
        step_aside(store, lake.row.table)
    return done


def _state(lake: LakeTable) -> LakeState:
    """The table's state. Raises Busy if it is that of another copy.

    That copy had another log, and commits from now on name the present copy.
    """
    state = lake.state()
    if state.epoch not in (None, lake.row.epoch):
        raise Busy("it was set back to an earlier copy")
    return state


def _due(lake: LakeTable) -> Slice | None:
    loaded = lake.load()
    current = loaded.current_snapshot() if loaded is not None else None
    if loaded is None or current is None:
        return None
    return next_slice(live_files(loaded, current), lake.config.maintenance, loaded.spec().spec_id)


def rewritten(
    session: SparkSession,
    lake: LakeTable,
    due: Slice,
    done: Compacted = NOT_COMPACTED,
    *,
    checked_rows: int = CHECKED_ROWS,
) -> Compacted | None:
    """Rewrite one slice and publish it; None if Iceberg's planner found nothing in it.

    The table's writer lock is held. Keys of up to ``checked_rows`` rows are compared. Returns what
    was ``done`` with that added.
    """
    state, began = _state(lake), time.monotonic()
    loaded = lake.load()
    assert loaded is not None  # the lock is ours, and it was there
    try:
        with published(session, lake, state) as draft:
            if due.moved:
                found = _move(session, lake, draft, due)
            else:
                found = _rewrite(session, draft, due, _strategy(loaded))
            if not found.rewritten_files:
                raise _NothingToPublish
            _compare(session, lake, state, draft, checked_rows)
            append(session, lake, state, draft, state.cursor)
    except _NothingToPublish:
        return None
    logger.info(
        "%s: %d files (%.1f MB) rewritten as %d in %.1f s",
        lake.row.table,
        found.rewritten_files,
        found.rewritten_bytes / 1e6,
        found.added_files,
        time.monotonic() - began,
    )
    return Compacted(
        done.slices + 1,
        done.rewritten_files + found.rewritten_files,
        done.rewritten_bytes + found.rewritten_bytes,
        done.added_files + found.added_files,
        done.applied_deletes + found.applied_deletes,
    )


def _rewrite(session: SparkSession, draft: Draft, due: Slice, strategy: str) -> Compacted:
    options = ", ".join(f"'{k}', '{v}'" for k, v in due.options.items())
    row = session.sql(
        f"call {draft.catalog}.system.rewrite_data_files({draft.arguments}, {strategy},"
        f" options => map({options}))"
    ).first()
    assert row is not None
    return Compacted(
        1,
        row["rewritten_data_files_count"],
        row["rewritten_bytes_count"],
        row["added_data_files_count"],
        row["removed_delete_files_count"],
    )


def _move(session: SparkSession, lake: LakeTable, draft: Draft, due: Slice) -> Compacted:
    """Rewrite the rows of files of an older partition spec; appends take the present spec.

    Where deletes don't rewrite files, the old ones stay, with all of their rows hidden, until the
    next slice finds them hollow.
    """
    rows = session.table(lake.sql_name)
    moved = rows.where(F.col("_file").isin(list(due.moved))).select(
        *(F.col(ticked(name)) for name in rows.columns)
    )
    paths = ", ".join(quoted(path) for path in due.moved)
    # As an expression: Iceberg would take the bare column for one of the table.
    session.sql(f"delete from {draft.sql_name} where concat(_file, '') in ({paths})")
    moved.writeTo(draft.sql_name).append()
    return Compacted(1, due.files, due.bytes, count(draft.summary(), "added-data-files"))


def _strategy(loaded: Table) -> str:
    return f"strategy => '{'binpack' if loaded.sort_order().is_unsorted else 'sort'}'"


def _compare(
    session: SparkSession, lake: LakeTable, state: LakeState, draft: Draft, checked_rows: int
) -> None:
    """Raise TableProblem unless ``draft`` has the rows of ``main``."""
    totals = draft.summary()
    rows = count(totals, "total-records") - count(totals, "total-position-deletes")
    same = rows == state.total_rows
    if same and rows <= checked_rows:
        here, there = draft.sql_name, lake.sql_name
        same = _fingerprint(session, lake, here) == _fingerprint(session, lake, there)
    if not same:
        raise TableProblem(
            lake.row.table,
            f"compaction would have changed its rows ({state.total_rows:,} before, {rows:,} after)"
            " and was given up; readers see none of it",
            "Please report it; set maintenance.every: null until it is mended.",
        )


def _fingerprint(session: SparkSession, lake: LakeTable, target: str) -> tuple[int, int]:
    """The number of rows, and a sum over their keys (of all columns where there is no key)."""
    columns = ", ".join(ticked(c.name) for c in lake.key or lake.columns)
    row = session.sql(
        f"select count(*), coalesce(sum(xxhash64({columns}) % 1000000007), 0) from {target}"
    ).first()
    assert row is not None
    return int(row[0]), int(row[1])


def set_limits(store: LogStore, lake: LakeTable, session: Callable[[], SparkSession]) -> None:
    """Set the limits of a table that an earlier version made, or somebody altered. Raises Busy."""
    loaded = lake.load()
    wanted = {key: lake.properties()[key] for key in _LIMITS}
    if loaded is not None and loaded.properties.get(RETRIES) != "0":
        del wanted[RETRIES]  # no earlier version's: somebody's own number, or Iceberg's
    if loaded is not None and any(loaded.properties.get(k) != v for k, v in wanted.items()):
        with writing(store, lake.row):
            session().sql(f"alter table {lake.sql_name} set tblproperties ({listed(wanted)})")


def tidy_metadata(
    store: LogStore, lake: LakeTable, session: Callable[[], SparkSession]
) -> tuple[int, int]:
    """Drop the branches of dead writers, and rewrite manifests if there are too many.

    Returns the number of manifests before and after, (0, 0) if they were left as they are. Raises
    Busy.
    """
    if not _untidy(lake):
        return 0, 0
    with writing(store, lake.row):
        loaded = lake.load()
        if loaded is None:
            return 0, 0
        if writers_branches(loaded):
            drop_abandoned(session(), lake)
        before = _manifests(loaded)
        if not manifests_rewritten(before):
            return 0, 0
        _state(lake)
        with healing(store, session(), lake):
            session().sql(
                f"call {CATALOG}.system.rewrite_manifests(table => {lake.procedure_name},"
                " use_caching => false)"
            )
        state = lake.state()
        if state.cursor is not None:
            name_cursor(session(), lake, state, state.cursor)
        after = lake.load()
    return len(before), len(_manifests(after)) if after is not None else 0


def _untidy(lake: LakeTable) -> bool:
    """Whether there may be work; only the lock shows whether a branch's writer is still alive."""
    loaded = lake.load()
    if loaded is None:
        return False
    return bool(writers_branches(loaded)) or manifests_rewritten(_manifests(loaded))


def _manifests(loaded: Table) -> list[int]:
    current = loaded.current_snapshot()
    if current is None:
        return []
    return [manifest.manifest_length for manifest in current.manifests(loaded.io)]
