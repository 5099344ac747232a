"""One maintenance run: a source's tables one after the other, each step of each reported.

The order follows the references: compaction leaves old files to expiry, expiry leaves unnamed files
to the removal of orphans; the log comes last. A run may die after any step; the next run does every
step again. Work that somebody else's lock prevents is left for the next run; an error of one table
stops neither the others nor the steps after it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from cdc_assets.errors import TableProblem
from cdc_assets.lake.adopted.taking import left_alone
from cdc_assets.lake.comments import annotate, statements
from cdc_assets.lake.lost_reply import before_lost_rewrite, set_back
from cdc_assets.lake.place import NotListed
from cdc_assets.lake.publish import name_cursor
from cdc_assets.lake.standing import is_begun, standing
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.figures.work import Work, add
from cdc_assets.log.groups.cursors import is_read
from cdc_assets.log.locks import write_lock
from cdc_assets.log.staged.places import staged_places
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.states import SETTLED, TableState
from cdc_assets.log.verified import version
from cdc_assets.maintenance.compact import (
    NOT_COMPACTED,
    Busy,
    Compacted,
    compact,
    set_limits,
    tidy_metadata,
    writing,
)
from cdc_assets.maintenance.due import let_rest
from cdc_assets.maintenance.expire import (
    NOTHING,
    Removed,
    drop_dead_copies,
    expire_snapshots,
    remove_orphans,
)
from cdc_assets.maintenance.files import Stored, live_files, stored
from cdc_assets.maintenance.lost_care import surviving
from cdc_assets.maintenance.plan import is_due
from cdc_assets.maintenance.staged import (
    mark_passed,
    passed_offset,
    remove_given_up,
    remove_old_rows,
    remove_passed,
    remove_staged_orphans,
    settle,
)
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.comments import comments
from cdc_assets.postgres.names import TableId
from cdc_assets.process.traces import noted
from cdc_assets.relay.first import refuse_other_log

logger = logging.getLogger(__name__)

# Orphans are rare, and finding them lists everything: once a day, unless somebody asks.
ORPHANS_EVERY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Maintained:
    """The work done on one table, and the table's state after it.

    ``left_alone``: why its lake table wasn't touched, or not rewritten. ``problem``: what went
    wrong.
    """

    table: TableId
    compacted: Compacted = NOT_COMPACTED
    expired: Removed = NOTHING
    orphans: Removed = NOTHING
    dead_copies: Removed = NOTHING
    staged: Removed = NOTHING
    staged_orphans: Removed = NOTHING
    stored: Stored | None = None
    data_files: int = 0
    deleted_rows: int = 0
    snapshots: int = 0
    seconds: float = 0.0
    left_alone: str | None = None
    problem: TableProblem | None = field(default=None, compare=False)

    @property
    def removed_files(self) -> int:
        return sum(removed.files for removed in self._removed())

    @property
    def removed_bytes(self) -> int:
        return sum(removed.bytes for removed in self._removed())

    def _removed(self) -> list[Removed]:
        return [value for f in fields(self) if isinstance(value := getattr(self, f.name), Removed)]

    def work(self) -> dict[str, int]:
        """What was done, flat: ``expired_files``, ``staged_bytes`` and so on."""
        flat = dict[str, int]()
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Removed):
                flat |= {f"{part.name}_files": value.files, f"{part.name}_bytes": value.bytes}
            elif isinstance(value, Compacted):
                flat |= {f.name: getattr(value, f.name) for f in fields(value)}
        return {**flat, "expired_snapshots": self.expired.snapshots}

    def state(self) -> dict[str, int]:
        """How the table stands after it."""
        return {
            "stored_files": self.stored.files if self.stored else 0,
            "stored_bytes": self.stored.bytes if self.stored else 0,
            "metadata_bytes": self.stored.metadata_bytes if self.stored else 0,
            "data_files": self.data_files,
            "deleted_rows": self.deleted_rows,
            "snapshots": self.snapshots,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "table": str(self.table),
            **self.work(),
            **self.state(),
            "seconds": round(self.seconds, 3),
            "left_alone": self.left_alone,
            "problem": str(self.problem) if self.problem else None,
        }


def maintain(
    pipeline: Pipeline,
    session: Callable[[], SparkSession],
    tables: Sequence[TableId],
    *,
    thorough: bool = True,
    budget_seconds: float | None = None,
) -> Iterator[Maintained]:
    """Maintain ``tables``, yielding a result for each; failures are in it, not raised.

    ``session`` is called only if there is something to do that needs Spark. Without ``thorough``
    orphans are looked for once a day. Once ``budget_seconds`` are over no compaction begins. Raises
    SourceMismatch, having changed nothing, if the log was begun with another ``log``.
    """
    refuse_other_log(pipeline.config, pipeline.store)
    until = time.monotonic() + budget_seconds if budget_seconds is not None else math.inf
    settle(pipeline)
    for number, table in enumerate(tables):
        # The first table's turn removes the orphans of shared files, too.
        turn = _Table(pipeline, session, table, shared=number == 0)
        yield turn.maintain(until, thorough=thorough)
    remove_given_up(pipeline, pipeline.config.maintenance.staged_grace, settle(pipeline))
    remove_old_rows(pipeline.store)


class _Table:
    """One table's turn; results are kept step by step, so that an error doesn't hide them."""

    def __init__(
        self,
        pipeline: Pipeline,
        session: Callable[[], SparkSession],
        table: TableId,
        *,
        shared: bool,
    ) -> None:
        self._pipeline = pipeline
        self._store = pipeline.store
        self._session = session
        self._shared = shared
        self._done = Maintained(table)
        self._is_through = True
        self._held = 0  # snapshots that tags and branches keep, whatever their age

    def maintain(self, until: float, *, thorough: bool) -> Maintained:
        began, now = time.monotonic(), self._store.server_now().astimezone(UTC)
        saw = version(self._store, self._done.table)
        with self._told():
            self._steps(until, now, thorough)
        if self._is_through and time.monotonic() < until:
            let_rest(self._pipeline, self._done.table, saw, self._done.snapshots - self._held)
        self._note(seconds=time.monotonic() - began)
        self._count()
        return self._done

    def _count(self) -> None:
        done = self._done
        if done.problem is not None or not done.left_alone:
            outcome = "failed" if done.problem is not None else "done"
            work = Work("maintenance", outcome, bytes=done.removed_bytes, seconds=done.seconds)
            add(self._store.connection, self._store.source, work)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Note an error and go on, so that the steps after it are done all the same."""
        table = self._done.table
        try:
            yield
            return
        except (Busy, NotListed) as left:
            self._note(left_alone=str(left))
        except TableProblem as problem:
            self._note(problem=self._done.problem or problem)
        except Exception as error:  # noqa: BLE001 - one table's: the others go on
            failed = TableProblem(table, f"its maintenance failed: {noted(error)}")
            self._note(problem=self._done.problem or failed)
        self._is_through = False

    def _steps(self, until: float, now: datetime, thorough: bool) -> None:
        store, table = self._store, self._done.table
        row = store.table(table)
        if row is None:
            self._note(left_alone="it isn't registered yet")
            return
        config = self._pipeline.config
        lake = LakeTable(config, config.table(table), row)
        if row.state not in SETTLED:
            self._note(left_alone=f"it is {row.state}")
        elif (why := left_alone(store, row)) is not None:
            self._note(left_alone=why)
        elif (loaded := lake.load()) is not None:
            self._heal(lake, loaded)
            if row.state == TableState.STREAMING:
                self._look_after_cursor(lake)
            self._annotate(lake)
            # What grows has to be removed, even if the table can't be compacted.
            with self._told(), surviving(store, table, "its compaction"):
                self._rewrite(lake, until)
            with self._told():
                if not is_read(store, table):
                    self._note(expired=expire_snapshots(lake, self._session, now))
            with self._told():
                if thorough or self._orphans_due(now):
                    self._note(orphans=remove_orphans(store, lake, self._session, now))
                    store.set_meta(self._orphans_key, now.isoformat())
        with self._told():
            self._note(dead_copies=drop_dead_copies(store, lake, now))
            self._measure(lake)
        self._staged(lake, now)

    def _rewrite(self, lake: LakeTable, until: float) -> None:
        busy: Busy | None = None
        try:
            set_limits(self._store, lake, self._session)  # compaction reads within them, too
        except Busy as error:  # they are set by the next run; compaction waits by itself
            busy = error
        compacted = compact(self._store, lake, self._session, until=until)
        self._note(compacted=compacted)
        before, after = tidy_metadata(self._store, lake, self._session)
        self._note(compacted=replace(compacted, manifests_before=before, manifests_after=after))
        if busy is not None:
            raise busy

    def _heal(self, lake: LakeTable, loaded: Table) -> None:
        """Undo a rewrite that a run before lost and didn't live to undo: all else would fail."""
        if before_lost_rewrite(loaded) is not None:
            with writing(self._store, lake.row):
                set_back(self._store, self._session(), lake)

    def _look_after_cursor(self, lake: LakeTable) -> None:
        """Find others' changes to a table that gets none of ours; keep its cursor within reach.

        Others may expire the snapshot that names it, and one of older metadata is forgotten.
        """
        store = self._store
        if not is_begun(store, lake) or not store.try_lock(lock := write_lock(lake.row.table)):
            return  # its writer looks for itself
        try:
            cursor = standing(store, lake, state := lake.state())
            if not state.at_head:
                name_cursor(self._session(), lake, state, cursor)
            known = store.cursor(lake.row.table)
            if known is not None and known.offset > cursor.offset:
                store.set_cursor(lake.row.table, cursor)  # it was set back: the rest is due again
        finally:
            store.unlock(lock)

    def _annotate(self, lake: LakeTable) -> None:
        """Bring the source's comments into the table; the next run does it if somebody writes."""
        try:
            with self._pipeline.connect_source("comments") as source:
                told = comments(source, lake.row.oid)
        except psycopg.OperationalError:  # the lake is cared for without the source, too
            return
        loaded = lake.load()
        if loaded is None or not statements(loaded.schema(), loaded.properties, lake.columns, told):
            return
        if self._store.try_lock(lock := write_lock(lake.row.table)):
            try:
                annotate(self._session(), lake, told)
            finally:
                self._store.unlock(lock)

    def _staged(self, lake: LakeTable, now: datetime) -> None:
        """Remove what the table's log needs no more, whatever state the table is in."""
        store, config = self._store, self._pipeline.config
        # The row was read before the cursor: a copy that ends in between is only missed this time.
        mark_passed(store, lake.row, passed_offset(store, lake.row, lake.state().cursor))
        with self._told():
            grace = config.maintenance.staged_grace
            self._note(staged=remove_passed(store, lake.row.table, staged_places(config), grace))
        settled = settle(self._pipeline)
        orphans = remove_staged_orphans(self._pipeline, lake.row.table, settled, now)
        if self._shared:
            orphans += remove_staged_orphans(self._pipeline, None, settled, now)
        self._note(staged_orphans=orphans)

    def _measure(self, lake: LakeTable) -> None:
        """Note the table's files and snapshots, for people."""
        loaded = lake.load()
        current = loaded.current_snapshot() if loaded is not None else None
        if loaded is None or current is None:
            return
        files = live_files(loaded, current)
        refs = {ref.snapshot_id for ref in loaded.metadata.refs.values()}
        self._held = len(refs - {current.snapshot_id})
        self._note(
            stored=stored(Storage.of(lake.config.s3, loaded.io.properties), loaded.location()),
            data_files=len(files),
            deleted_rows=sum(file.deleted for file in files),
            snapshots=len(loaded.metadata.snapshots),
        )

    @property
    def _orphans_key(self) -> str:
        return f"maintenance.orphans:{self._done.table}"

    def _orphans_due(self, now: datetime) -> bool:
        last = self._store.meta(self._orphans_key)
        return is_due(datetime.fromisoformat(last) if last else None, now, ORPHANS_EVERY)

    def _note(self, **found: Any) -> None:
        self._done = replace(self._done, **found)
