"""How far each table's log is applied: the cursor, the worker that may move it, and the backlog.

The Iceberg table's own snapshots are the truth (``lake.standing``); a cursor here is their cache.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime

import psycopg

from cdc_assets.errors import Fenced
from cdc_assets.log.figures.work import GIVEN, NO_WORK, Work, adding
from cdc_assets.log.locks import write_lock
from cdc_assets.log.states import TableState
from cdc_assets.log.tables import GROUP, TableRegistry
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# A problem that was told of a table is over when its cursor changes.
_WELL = (
    "with well as (update claims set problem = null, problem_since = null"
    " where consumer_group = %(group)s and source = %(source)s"
    " and table_name = %(table)s and problem is not null returning 1)"
)
# In this order, for the sake of others' locks; what isn't asked for comes last, so work_done does.
_SET = (
    f"{_WELL}, moved as (insert into mat_cursor as m"
    ' (consumer_group, source, table_name, "offset", applied_lsn, commit_time)'
    " select %(group)s, %(source)s, %(table)s, %(offset)s, %(lsn)s::pg_lsn,"
    "  %(time)s::timestamptz from (select count(*) from well) w"
    "  where %(epoch)s::bigint is null or exists"
    "  (select from claims where consumer_group = %(group)s and source = %(source)s"
    "   and table_name = %(table)s and worker = %(worker)s and epoch = %(epoch)s)"
    " on conflict (consumer_group, source, table_name)"
    ' do update set "offset" = excluded."offset", applied_lsn = excluded.applied_lsn,'
    " commit_time = coalesce(excluded.commit_time, m.commit_time), updated_at ="
    ' case when m."offset" = excluded."offset" then m.updated_at else now() end returning 1),'
    f" counted as ({adding(f'{GIVEN} from moved where %(work_count)s > 0')}) select from moved"
)


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a table's log is applied: ``offset`` is the first one that isn't."""

    offset: int
    applied_lsn: Lsn
    commit_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's claim to a table; ``epoch`` is the fence, raised with every change of worker."""

    worker: uuid.UUID
    epoch: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """The part of a table's log that waits to be applied, from ``offset`` on."""

    table: TableId
    rows: int
    bytes: int
    oldest_commit: datetime | None
    offset: int


class CursorStore(TableRegistry):
    """Reads and writes claims and cursors of the group that merges into the lake."""

    def claim(self, table: TableId, worker: uuid.UUID) -> Claim | None:
        """Take the writer's lock and the claim to ``table``; None if another has the lock.

        Raises Fenced if the worker was taken for dead.
        """
        if not self.try_lock(lock := write_lock(table)):
            return None
        try:
            row = self.connection.execute(
                "insert into claims as c (consumer_group, source, table_name, worker)"
                " values (%(group)s, %(source)s, %(table)s, %(worker)s)"
                " on conflict (consumer_group, source, table_name) do update"
                " set worker = excluded.worker, claimed_at = case when c.worker = excluded.worker"
                "  then c.claimed_at else excluded.claimed_at end,"
                " epoch = c.epoch + (c.worker is distinct from excluded.worker)::int"
                " returning epoch",
                {"group": GROUP, "source": self.source, "table": str(table), "worker": worker},
            ).fetchone()
        except psycopg.errors.ForeignKeyViolation as error:
            self.unlock(lock)
            raise Fenced(
                "this worker wasn't heard of for too long: its tables went to others."
            ) from error
        assert row is not None
        return Claim(worker, int(row[0]))

    def cursor(self, table: TableId) -> Cursor | None:
        row = self.connection.execute(
            'select "offset", applied_lsn, commit_time from mat_cursor'
            " where consumer_group = %s and source = %s and table_name = %s",
            (GROUP, self.source, str(table)),
        ).fetchone()
        return Cursor(row[0], Lsn.parse(row[1]), row[2]) if row else None

    def set_cursor(
        self,
        table: TableId,
        cursor: Cursor,
        claim: Claim | None = None,
        work: Work = NO_WORK,
    ) -> None:
        """Remember the Iceberg table's cursor; the table is the truth, this is its cache.

        Its ``updated_at`` says since when nothing was merged. ``work`` led to it, and is counted.
        A problem that was told of the table is over.
        Raises Fenced, having changed nothing, if ``claim`` is another worker's by now.
        """
        done = self.connection.execute(
            _SET,
            {
                "group": GROUP,
                "source": self.source,
                "table": str(table),
                "offset": cursor.offset,
                "lsn": str(cursor.applied_lsn),
                "time": cursor.commit_time,
                "epoch": claim.epoch if claim is not None else None,
                "worker": claim.worker if claim is not None else None,
                **work.parameters(),
            },
        )
        if not done.rowcount:
            raise Fenced(f"{table}: another worker looks after it by now.")

    def finish_copy(
        self, table: TableId, epoch: int, complete_lsn: Lsn, *, streams: bool = True
    ) -> bool:
        """Record that every chunk landed; the log is applied from now on. False in a past epoch."""
        with self.connection.transaction():
            done = self.connection.execute(
                "update tables t set state = %s, complete_lsn = %s, updated_at = now(),"
                " (copied_chunks, copied_rows, copied_at) ="
                " (select count(*), coalesce(sum(c.rows), 0), max(c.heartbeat_at)"
                "   from snapshot_progress c where c.source = t.source"
                "   and c.table_name = t.table_name and c.epoch = t.epoch)"
                " where source = %s and table_name = %s and epoch = %s and state = 'copying'",
                (
                    TableState.STREAMING if streams else TableState.COPIED,
                    str(complete_lsn),
                    self.source,
                    str(table),
                    epoch,
                ),
            )
            if done.rowcount:
                self.forget_cursor(table)
        return done.rowcount == 1

    def forget_cursor(self, table: TableId) -> None:
        """Remove a cursor of the epoch before, which doesn't apply to a new complete copy.

        A problem that was told of the table is over, too.
        """
        self.connection.execute(
            f"{_WELL} delete from mat_cursor"
            " where consumer_group = %(group)s and source = %(source)s and table_name = %(table)s",
            {"group": GROUP, "source": self.source, "table": str(table)},
        )

    def backlogs(self) -> list[Backlog]:
        """The backlog of every table that streams; a table that has caught up has 0 rows."""
        # Lateral: a plain join would read a day's log to find the rows that wait.
        rows = self.connection.execute(
            "select t.table_name, coalesce(b.rows, 0), coalesce(b.bytes, 0), b.oldest,"
            ' coalesce(m."offset", 0) from tables t'
            " left join mat_cursor m on m.source = t.source and m.table_name = t.table_name"
            "  and m.consumer_group = %s"
            " cross join lateral (select sum(l.row_count) as rows, sum(l.byte_size) as bytes,"
            "  min(l.commit_time) as oldest from log_index l"
            "  where l.source = t.source and l.table_name = t.table_name"
            '  and l.end_offset > coalesce(m."offset", 0)) b'
            " where t.source = %s and t.state = 'streaming' order by 1",
            (GROUP, self.source),
        ).fetchall()
        return [Backlog(TableId.parse(n), int(r), int(b), at, o) for n, r, b, at, o in rows]
