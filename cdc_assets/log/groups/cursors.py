"""The cursors of a consumer group, each moved by the one process that has claimed the table.

The claim's epoch is the fence: a commit names it, in the statement that moves the cursor, and locks
the claim's row until it is through. So whoever takes a table over sees the last commit of the
process before, and that one can't commit any more.

A claim holds the table's log from its beginning on until there is a cursor (invariant 11). Both are
there before an entry is read, so no entry that the group needs can be removed meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import LiteralString

from cdc_assets.errors import Fenced
from cdc_assets.log.session import STALE_SECONDS
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.tables import GROUP
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# No snapshot of Iceberg has it: their ids are positive.
NO_SNAPSHOT = 0


@dataclass(frozen=True, slots=True)
class GroupCursor:
    """How far a group is in a table's log, see ``0038_groups``.

    ``copy`` None: it begins anew. ``snapshot_id``: of what it begins with, until that was read;
    NO_SNAPSHOT if it begins without, until that was committed.
    """

    offset: int
    copy: str | None
    snapshot_id: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A table that a process has claimed for its group, as of one look.

    ``epoch``: of the claim. ``copy``: the table's present one, None unless its log is applied.
    ``end``: of its log. ``lake``: the first offset that the lake table doesn't hold.
    """

    epoch: int
    cursor: GroupCursor | None
    copy: str | None
    state: TableState | None
    end: int
    lake: int


_HELD = """
select k.table_name, k.epoch, m."offset", m.copy, m.snapshot_id, t.epoch,
       t.snapshot_lsn::text, t.state, coalesce(s.next_offset, 0), coalesce(l."offset", 0)
  from claims k
  left join mat_cursor m using (consumer_group, source, table_name)
  left join tables t using (source, table_name)
  left join log_seq s using (source, table_name)
  left join mat_cursor l on l.consumer_group = %(lake)s and l.source = k.source
                        and l.table_name = k.table_name
 where k.consumer_group = %(group)s and k.source = %(source)s and k.worker = %(worker)s
"""
_MOVE = """
with mine as (
    select from claims where consumer_group = %(group)s and source = %(source)s
       and table_name = %(table)s and worker = %(worker)s and epoch = %(epoch)s for share)
insert into mat_cursor
       (consumer_group, source, table_name, "offset", applied_lsn, copy, snapshot_id)
select %(group)s, %(source)s, %(table)s, %(offset)s, '0/0', %(copy)s, %(snapshot_id)s from mine
    on conflict (consumer_group, source, table_name) do update
   set "offset" = excluded."offset", copy = excluded.copy, snapshot_id = excluded.snapshot_id,
       updated_at = now()
returning 1
"""
_DROP: tuple[LiteralString, ...] = tuple(
    f"delete from {relation} where consumer_group = %(group)s and source = %(source)s"
    " and table_name = coalesce(%(table)s, table_name) returning table_name"
    for relation in ("mat_cursor", "claims")
)


def copy_name(epoch: int, snapshot_lsn: Lsn | str) -> str:
    """One copy of a table, which no other one is called, even in a schema made anew."""
    return f"{epoch}:{snapshot_lsn}"


def held(store: LogStore, group: str, worker: uuid.UUID) -> Mapping[TableId, Held]:
    """What a process of the group has claimed: one query, however many tables there are."""
    rows = store.connection.execute(
        _HELD, {"group": group, "source": store.source, "worker": worker, "lake": GROUP}
    ).fetchall()
    found = {}
    for name, epoch, offset, copy, snapshot, of, lsn, state, end, lake in rows:
        cursor = None if offset is None else GroupCursor(offset, copy, snapshot)
        known = None if state is None else TableState(state)
        now = copy_name(of, lsn) if known == TableState.STREAMING and lsn is not None else None
        found[TableId.parse(name)] = Held(epoch, cursor, now, known, end, lake)
    return found


def move(
    store: LogStore,
    group: str,
    table: TableId,
    cursor: GroupCursor,
    worker: uuid.UUID,
    epoch: int,
) -> None:
    """Set the group's cursor. Raises Fenced, having changed nothing, if the claim is gone."""
    done = store.connection.execute(
        _MOVE,
        {
            "group": group,
            "source": store.source,
            "table": str(table),
            "worker": worker,
            "epoch": epoch,
            "offset": cursor.offset,
            "copy": cursor.copy,
            "snapshot_id": cursor.snapshot_id,
        },
    )
    if not done.rowcount:
        raise Fenced(f"{table}: another process of the group {group} reads it by now.")


_READ = """
select exists (select from mat_cursor m join claims k using (consumer_group, source, table_name)
  join sessions s on s.holder = k.worker
 where m.source = %(source)s and m.table_name = %(table)s and m.snapshot_id <> 0
   and s.heartbeat_at >= clock_timestamp() - make_interval(secs => %(stale)s))
"""


def is_read(store: LogStore, table: TableId) -> bool:
    """Whether a process that lives reads a snapshot of the lake table, whose files it needs."""
    row = store.connection.execute(
        _READ, {"source": store.source, "table": str(table), "stale": STALE_SECONDS}
    ).fetchone()
    return bool(row and row[0])


def drop(store: LogStore, group: str, table: TableId | None = None) -> list[TableId]:
    """Forget a group, or one table of it; returns the tables whose log it doesn't hold any more.

    Who still reads for it can't commit.
    """
    which = {"group": group, "source": store.source, "table": table and str(table)}
    found = set[str]()
    with store.connection.transaction():
        if table is None:
            store.connection.execute(
                "delete from consumer where consumer_group = %(group)s and source = %(source)s",
                which,
            )
        for statement in _DROP:
            found |= {name for (name,) in store.connection.execute(statement, which)}
    return sorted(map(TableId.parse, found))
