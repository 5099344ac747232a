"""Backfills as the log records them: what was asked for, and how far it is.

A backfill is carried out by one process at a time, which holds its lock. Whoever else may ask for
another state meanwhile: it looks at each part that it reads. A chunk is either planned or applied:
one that was read by a process that died is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from cdc_assets.errors import ConfigurationError
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

State = Literal["requested", "running", "paused", "stopped", "done", "failed"]
ENDED = ("stopped", "done", "failed")
# Ended ones are listed for as long.
_KEPT_DAYS = 90


@dataclass(frozen=True, slots=True)
class Backfill:
    """``predicate``: which rows, in SQL; None: all. ``replaces``: rows that only the lake has go.

    ``epoch``, ``heaps``: the table's copy, and its files, that its chunks are of. ``read``,
    ``applied`` (``differed``: of these, those that the lake had otherwise, or not at all),
    ``superseded``, ``removed``: rows; ``chunks`` of which ``chunks_done`` are applied.
    """

    number: int
    table: TableId
    predicate: str | None
    replaces: bool
    requested_by: str
    requested_at: datetime
    state: State
    reason: str | None
    epoch: int | None
    heaps: str | None
    begun_at: datetime | None
    ended_at: datetime | None
    read: int
    applied: int
    differed: int
    superseded: int
    removed: int
    chunks: int
    chunks_done: int

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def sentence(self) -> str:
        """Which rows of what it is of, and how far it is."""
        rows = f" where {self.predicate}" if self.predicate is not None else ""
        rows += ", and what only the lake has" if self.replaces else ""
        said = f"backfill {self.number} of {self.table}{rows}: {self.state}"
        if self.begun_at is not None:
            said += (
                f", {self.chunks_done} of {self.chunks} chunks, {self.read:,} rows read,"
                f" {self.applied:,} applied ({self.differed:,} differed),"
                f" {self.superseded:,} left to the stream"
            )
            said += f", {self.removed:,} removed" if self.replaces else ""
        if (pace := self.rows_a_second) is not None:
            said += f", {pace:,.0f} rows/s"
        return said

    @property
    def rows_a_second(self) -> float | None:
        """Of those applied, since it began; None before it ended."""
        if self.begun_at is None or self.ended_at is None:
            return None
        seconds = (self.ended_at - self.begun_at).total_seconds()
        return self.applied / seconds if seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        times = (self.requested_at, self.begun_at, self.ended_at)
        requested, begun, ended = (at.isoformat() if at else None for at in times)
        return {
            "backfill": self.number,
            "table": str(self.table),
            "where": self.predicate,
            "replace": self.replaces,
            "state": self.state,
            "reason": self.reason,
            "requested_by": self.requested_by,
            "requested_at": requested,
            "begun_at": begun,
            "ended_at": ended,
            "chunks": self.chunks,
            "chunks_done": self.chunks_done,
            "read": self.read,
            "applied": self.applied,
            "differed": self.differed,
            "superseded": self.superseded,
            "removed": self.removed,
        }


_SELECT = """
select b.backfill, b.table_name, b.predicate, b.replaces, b.requested_by, b.requested_at, b.state,
       b.reason, b.epoch, b.heaps, b.begun_at, b.ended_at, b.rows_read, b.rows_applied,
       b.rows_differed, b.rows_superseded, b.rows_removed, c.chunks, c.done
  from backfills b left join lateral (
       select count(*)::int as chunks, count(*) filter (where c.state = 'applied')::int as done
         from backfill_chunks c where c.source = b.source and c.backfill = b.backfill) c on true
 where b.source = %s
"""


def _of(row: tuple[Any, ...]) -> Backfill:
    number, table, *rest = row
    return Backfill(int(number), TableId.parse(table), *rest)


# The condition of a backfill that reads no rows: it removes those that only the lake has.
NO_ROWS = "false"
DELETES = "query.deletes"


def request_deletes(store: LogStore, every_seconds: float) -> int:
    """Ask for one of each table that streams and whose deletes weren't looked for that long.

    None while the last one isn't over, nor for a table that was copied since. How many.
    """
    done = store.connection.execute(
        "insert into backfills (source, table_name, predicate, replaces, requested_by)"
        " select t.source, t.table_name, %(none)s, true, %(by)s from tables t"
        " where t.source = %(source)s and t.state = 'streaming' and t.complete_lsn is not null"
        " and t.updated_at < now() - make_interval(secs => %(every)s)"
        " and not t.masks ?| t.key_columns"  # such a key isn't found by what the lake has of it
        " and not exists (select from backfills b where b.source = t.source"
        "  and b.table_name = t.table_name and b.replaces and (b.ended_at is null"
        "  or b.requested_at > now() - make_interval(secs => %(every)s)))",
        {"source": store.source, "none": NO_ROWS, "by": DELETES, "every": every_seconds},
    )
    return done.rowcount


def looked_for_deletes(store: LogStore) -> dict[TableId, datetime]:
    """When the last one began that is done, of each table that had one."""
    rows = store.connection.execute(
        "select table_name, max(begun_at) from backfills"
        " where source = %s and replaces and state = 'done' group by 1",
        (store.source,),
    )
    return {TableId.parse(name): at for name, at in rows if at is not None}


def request(
    store: LogStore, table: TableId, predicate: str | None, *, replaces: bool, by: str
) -> Backfill:
    """Ask for a backfill; whoever carries out backfills of the source does it."""
    store.connection.execute(
        "delete from backfills where source = %s and ended_at < now() - make_interval(days => %s)",
        (store.source, _KEPT_DAYS),
    )
    row = store.connection.execute(
        "insert into backfills (source, table_name, predicate, replaces, requested_by)"
        " values (%s, %s, %s, %s, %s) returning backfill",
        (store.source, str(table), predicate, replaces, by),
    ).fetchone()
    assert row is not None
    return backfill(store, int(row[0]))


def backfill(store: LogStore, number: int) -> Backfill:
    """Raises ConfigurationError if there is none of that number."""
    row = store.connection.execute(
        f"{_SELECT} and b.backfill = %s".encode(), (store.source, number)
    ).fetchone()
    if row is None:
        raise ConfigurationError(
            f"source {store.source} has no backfill {number}.", "See cdc-assets backfill --list."
        )
    return _of(row)


def backfills(store: LogStore, *, outstanding: bool = False, ended: bool = True) -> list[Backfill]:
    """All that are remembered, by number; ``outstanding``: those to be carried out now.

    Without ``ended``: nor those that have ended.
    """
    states = ("requested", "running") if outstanding else ("requested", "running", "paused")
    only = f" and b.state in {states}" if outstanding or not ended else ""
    rows = store.connection.execute(f"{_SELECT}{only} order by 1".encode(), (store.source,))
    return [_of(row) for row in rows.fetchall()]


_MAY: dict[State, tuple[State, ...]] = {
    "running": ("requested", "running"),
    "requested": ("paused", "failed"),
    "paused": ("requested", "running"),
    "stopped": ("requested", "running", "paused"),
    "done": ("running",),
    "failed": ("requested", "running"),
}


def become(store: LogStore, number: int, state: State, reason: str | None = None) -> bool:
    """Change its state; False if it is in one that this can't follow."""
    ends = state in ENDED
    changed = store.connection.execute(
        "update backfills set state = %(state)s, reason = %(reason)s,"
        " begun_at = case when %(state)s = 'running' then coalesce(begun_at, clock_timestamp())"
        "  else begun_at end,"
        " ended_at = case when %(ends)s then clock_timestamp() end"
        " where source = %(source)s and backfill = %(number)s and state = any(%(may)s)",
        {
            "state": state,
            "reason": reason,
            "ends": ends,
            "source": store.source,
            "number": number,
            "may": list(_MAY[state]),
        },
    )
    return bool(changed.rowcount)


def note(store: LogStore, number: int, reason: str | None) -> None:
    """Say what it waits for; None: for nothing any more."""
    store.connection.execute(
        "update backfills set reason = %s where source = %s and backfill = %s"
        " and state = 'running' and reason is distinct from %s",
        (reason, store.source, number, reason),
    )


def plan(
    store: LogStore,
    number: int,
    epoch: int,
    heaps: str,
    chunks: Sequence[CtidRange],
    offset: int,
) -> None:
    """Record its chunks, instead of those before; what was applied of these stays applied.

    ``offset``: see :func:`search_from`.
    """
    with store.connection.transaction():
        store.connection.execute(
            "update backfills set epoch = %s, heaps = %s, searched_from = %s"
            " where source = %s and backfill = %s",
            (epoch, heaps, offset, store.source, number),
        )
        store.connection.execute(
            "delete from backfill_chunks where source = %s and backfill = %s",
            (store.source, number),
        )
        with store.connection.cursor() as cursor:
            cursor.executemany(
                "insert into backfill_chunks (source, backfill, number, first_block, end_block)"
                " values (%s, %s, %s, %s, %s)",
                [
                    (store.source, number, place, chunk.first_block, chunk.end_block)
                    for place, chunk in enumerate(chunks)
                ],
            )


def search_from(store: LogStore, number: int, offset: int) -> None:
    """Whoever goes on with it searches the log from there for changes that left values out."""
    store.connection.execute(
        "update backfills set searched_from = %s where source = %s and backfill = %s",
        (offset, store.source, number),
    )


def searched_from(store: LogStore, number: int) -> int:
    """As :func:`search_from` or :func:`plan` said."""
    row = store.connection.execute(
        "select coalesce(searched_from, 0) from backfills where source = %s and backfill = %s",
        (store.source, number),
    ).fetchone()
    return int(row[0]) if row is not None else 0


def planned(store: LogStore, number: int) -> list[tuple[int, CtidRange]]:
    """The chunks that aren't applied, with their places."""
    rows = store.connection.execute(
        "select number, first_block, end_block from backfill_chunks"
        " where source = %s and backfill = %s and state = 'planned' order by number",
        (store.source, number),
    ).fetchall()
    # These values become SQL at the source: nothing but integers may be in them.
    return [(n, CtidRange(int(a), None if b is None else int(b))) for n, a, b in rows]


@dataclass(frozen=True, slots=True)
class Applied:
    """What was applied of a chunk: see ``backfill`` for the two LSNs."""

    chunk: int
    horizon: Lsn
    lsn: Lsn
    rows: int
    seconds: float


def chunk_applied(store: LogStore, number: int, done: Applied) -> None:
    store.connection.execute(
        "update backfill_chunks set state = 'applied', horizon = %s, read_lsn = %s, rows = %s,"
        " seconds = %s where source = %s and backfill = %s and number = %s",
        (
            str(done.horizon),
            str(done.lsn),
            done.rows,
            done.seconds,
            store.source,
            number,
            done.chunk,
        ),
    )


def count(
    store: LogStore,
    number: int,
    *,
    read: int = 0,
    applied: int = 0,
    differed: int = 0,
    superseded: int = 0,
    removed: int = 0,
) -> None:
    """Add to its rows."""
    store.connection.execute(
        "update backfills set rows_read = rows_read + %s, rows_applied = rows_applied + %s,"
        " rows_differed = rows_differed + %s, rows_superseded = rows_superseded + %s,"
        " rows_removed = rows_removed + %s"
        " where source = %s and backfill = %s",
        (read, applied, differed, superseded, removed, store.source, number),
    )
