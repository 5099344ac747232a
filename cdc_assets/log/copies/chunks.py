"""The rows of ``snapshot_progress``: the plan of each copy, and the state of each chunk.

A plan is frozen when a table is pinned. A chunk is *planned*, then *claimed* by a worker, then
*written* (its rows are in a file of the lake that no snapshot holds yet), then *landed*. The mark
landed is a cache for people and planners: the Iceberg table's snapshot summaries decide which
chunks landed (invariant 6). Earlier states are decided here, by the coordination server's clock.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cdc_assets.log.copies.claims import FREE
from cdc_assets.log.figures.work import adding
from cdc_assets.log.session import STALE_SECONDS
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.catalog import Heap
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


@dataclass(frozen=True, slots=True)
class ChunkProgress:
    """One chunk of a table's plan; rows, bytes (of Arrow data) and seconds once it was read.

    ``file`` holds the rows of this chunk and several others; None for a chunk without rows.
    """

    key: str
    range: CtidRange
    state: str
    rows: int | None
    bytes: int | None
    seconds: float | None
    file: str | None = None


# One statement, since a first start plans hundreds of tables.
_PLAN = """
with moved as (
    update tables
       set state = %(state)s, pin = %(pin)s, snapshot_lsn = %(point)s, complete_lsn = %(complete)s,
           reason = null, updated_at = now(), copied_chunks = 0, copied_rows = 0, copied_at = null
     where source = %(source)s and table_name = %(table)s and epoch = %(epoch)s
       and state = 'waiting' and snapshot_lsn is null
    returning table_name, epoch),
planned as (
    insert into snapshot_progress (source, table_name, epoch, chunk, first_block, end_block,
                                   relation, relation_oid, filenode, database)
    select %(source)s, m.table_name, m.epoch, c.*, %(database)s
      from moved m,
           unnest(%(chunks)s::text[], %(first)s::bigint[], %(end)s::bigint[], %(relations)s::text[],
                  %(oids)s::oid[], %(files)s::oid[]) c
        on conflict do nothing)
select from moved
"""


def plan_copy(
    store: LogStore,
    row: TableRow,
    pin: str,
    point: Lsn,
    chunks: Sequence[tuple[Heap, CtidRange]],
    *,
    read: Lsn | None = None,
    resumes: bool = False,
    state_without: TableState = TableState.STREAMING,
    database: str | None = None,
) -> None:
    """Move a waiting table to copying under ``pin``; without chunks to ``state_without``.

    Does nothing if the table no longer waits as ``row`` describes: while the pin was being made it
    got another epoch (by a re-sync, or a change that isn't in the log), which waits for a pin of
    its own.

    ``read``: what the snapshot shows had committed below that (None: below ``point``). ``resumes``:
    chunks of an earlier pin stay landed or written, and the log counts from that pin. ``database``:
    whose pages the chunks are, if it isn't the source.
    """
    if resumes:
        store.connection.execute(
            "update tables set state = 'copying', pin = %s, reason = null, updated_at = now()"
            " where source = %s and table_name = %s and epoch = %s and state = 'waiting'",
            (pin, store.source, str(row.table), row.epoch),
        )
        return
    with store.connection.transaction():
        moved = store.connection.execute(
            _PLAN,
            {
                "source": store.source,
                "table": str(row.table),
                "epoch": row.epoch,
                "state": TableState.COPYING if chunks else state_without,
                "pin": pin if chunks else None,
                "point": str(point),
                "complete": None if chunks else str(read or point),
                "chunks": [c.key(row.epoch) for _, c in chunks],
                "first": [c.first_block for _, c in chunks],
                "end": [c.end_block for _, c in chunks],
                "relations": [heap.id.identifier.as_string(store.connection) for heap, _ in chunks],
                "oids": [heap.oid for heap, _ in chunks],
                "files": [heap.filenode for heap, _ in chunks],
                "database": database,
            },
        )
        if not chunks and moved.fetchone() is not None:
            store.forget_cursor(row.table)


def restart_copy(store: LogStore, row: TableRow, *, of_pin: str | None = None) -> bool:
    """Give up the copy of ``row``'s epoch: a new epoch waits for a new pin.

    ``of_pin``: only while it is being copied under that pin. False when nothing was given up.
    """
    with store.connection.transaction():
        moved = store.connection.execute(
            "update tables set state = 'waiting', epoch = epoch + 1, pin = null, followed = false,"
            " log_from = null, snapshot_lsn = null, complete_lsn = null, reason = null,"
            " updated_at = now()"
            " where source = %(source)s and table_name = %(table)s and epoch = %(epoch)s"
            " and (%(pin)s::uuid is null or (pin = %(pin)s::uuid and state = 'copying'))",
            {
                "source": store.source,
                "table": str(row.table),
                "epoch": row.epoch,
                "pin": of_pin,
            },
        )
        if moved.rowcount:
            store.connection.execute(
                "delete from snapshot_progress"
                " where source = %s and table_name = %s and epoch <= %s",
                (store.source, str(row.table), row.epoch),
            )
    return moved.rowcount == 1


def await_another_pin(store: LogStore, row: TableRow) -> None:
    """Record a lost pin: copied chunks stay, the rest waits for another pin of the epoch."""
    with store.connection.transaction():
        moved = store.connection.execute(
            "update tables set state = 'waiting', pin = null, updated_at = now()"
            " where source = %s and table_name = %s and epoch = %s and pin = %s"
            " and state = 'copying'",
            (store.source, str(row.table), row.epoch, row.pin),
        )
        if moved.rowcount:
            store.connection.execute(
                "update snapshot_progress set state = 'planned', claim = null, claimed_by = null"
                " where source = %s and table_name = %s and epoch = %s and state = 'claimed'",
                (store.source, str(row.table), row.epoch),
            )
            # A replica's snapshot may have shown what the next pin's point is below.
            store.connection.execute(
                "update snapshot_progress c set read_lsn = greatest(c.read_lsn, p.read_lsn)"
                " from pins p where p.pin = %s and p.read_lsn is not null and c.source = %s"
                " and c.table_name = %s and c.epoch = %s and c.state in ('written', 'landed')",
                (row.pin, store.source, str(row.table), row.epoch),
            )


def void_copy(store: LogStore, row: TableRow, at: Lsn) -> str | None:
    """End the reading of a table that the log truncates, at or before ``at``.

    Outstanding chunks count as written without rows, under a pin of their own that no session has
    to hold: the table isn't complete before ``at``. Returns that pin, None if the copy went on
    elsewhere.
    """
    pin = str(uuid.uuid4())
    with store.connection.transaction():
        store.connection.execute(
            "insert into pins (pin, source, consistent_point) values (%s, %s, %s)",
            (pin, store.source, str(at)),
        )
        moved = store.connection.execute(
            "update tables set pin = %s, updated_at = now() where source = %s and table_name = %s"
            " and epoch = %s and pin = %s and state = 'copying'",
            (pin, store.source, str(row.table), row.epoch, row.pin),
        )
        if not moved.rowcount:
            return None
        store.connection.execute(
            "update snapshot_progress set state = 'written', file = null, rows = 0, bytes = 0,"
            " claim = null where source = %s and table_name = %s and epoch = %s"
            " and state in ('planned', 'claimed')",
            (store.source, str(row.table), row.epoch),
        )
    return pin


def planned_files(store: LogStore, row: TableRow) -> dict[int, int]:
    """The file that each heap of the plan had when it was planned: filenode by oid."""
    rows = store.connection.execute(
        "select distinct relation_oid, filenode from snapshot_progress"
        " where source = %s and table_name = %s and epoch = %s",
        (store.source, str(row.table), row.epoch),
    ).fetchall()
    return {int(oid): int(filenode) for oid, filenode in rows}


def planned_in(store: LogStore, row: TableRow) -> str | None:
    """The database whose pages the plan has; None: it is the source, or a physical copy of it."""
    found = store.connection.execute(
        "select database from snapshot_progress"
        " where source = %s and table_name = %s and epoch = %s limit 1",
        (store.source, str(row.table), row.epoch),
    ).fetchone()
    return found[0] if found else None


def chunks(store: LogStore, table: TableId, epoch: int) -> list[ChunkProgress]:
    """The table's plan with its progress, in block order."""
    rows = store.connection.execute(
        "select chunk, state, rows, bytes, seconds, file from snapshot_progress"
        " where source = %s and table_name = %s and epoch = %s order by chunk",
        (store.source, str(table), epoch),
    ).fetchall()
    return [ChunkProgress(key, CtidRange.parse(key)[1], *rest) for key, *rest in rows]


def read_until(store: LogStore, row: TableRow, pin: str) -> Lsn:
    """An LSN that whatever the copy has read had committed below; ``pin``: its last one."""
    found = store.connection.execute(
        "select greatest(p.consistent_point, p.read_lsn, (select max(c.read_lsn)"
        " from snapshot_progress c"
        " where c.source = %s and c.table_name = %s and c.epoch = %s))::text"
        " from pins p where p.pin = %s",
        (store.source, str(row.table), row.epoch, pin),
    ).fetchone()
    assert found is not None  # pins are never deleted while a table names them
    return Lsn.parse(found[0])


def last_read(store: LogStore) -> Lsn | None:
    """An LSN that whatever copies in short transactions, or from elsewhere, have read is below."""
    found = store.connection.execute(
        "select greatest((select max(read_lsn) from snapshot_progress where source = %s),"
        " (select max(p.read_lsn) from pins p join tables t on t.pin = p.pin"
        "   where t.source = %s))::text",
        (store.source, store.source),
    ).fetchone()
    return Lsn.parse(found[0]) if found and found[0] else None


_LAND = (
    "with landed as (update snapshot_progress set state = 'landed',"
    "  landed_at = coalesce(landed_at, now()), claim = null where source = %(source)s"
    "  and table_name = %(table)s and epoch = %(epoch)s and chunk = any(%(chunks)s)"
    "  and state <> 'landed' returning rows, bytes, seconds) "
    + adding(
        "'copy', 'done', count(*), coalesce(sum(rows), 0), coalesce(sum(bytes), 0),"
        " coalesce(sum(seconds), 0) from landed having count(*) > 0"
    )
)


def mark_landed(store: LogStore, table: TableId, epoch: int, keys: Iterable[str]) -> None:
    """Remember that the Iceberg table holds these chunks, and count them."""
    which = {"source": store.source, "table": str(table), "epoch": epoch, "chunks": list(keys)}
    store.connection.execute(_LAND, which)


def forget_landed(store: LogStore, table: TableId, epoch: int, keep: Iterable[str]) -> None:
    """Plan again the chunks that are marked landed but aren't in the Iceberg table."""
    store.connection.execute(
        "update snapshot_progress set state = 'planned', claim = null, landed_at = null"
        " where source = %s and table_name = %s and epoch = %s and state = 'landed'"
        " and chunk <> all(%s)",
        (store.source, str(table), epoch, list(keep)),
    )


def plan_again(store: LogStore, table: TableId, epoch: int, keys: Iterable[str]) -> None:
    """Plan these written chunks again, because their file can't be used."""
    store.connection.execute(
        "update snapshot_progress set state = 'planned', claim = null, file = null"
        " where source = %s and table_name = %s and epoch = %s and state = 'written'"
        " and chunk = any(%s)",
        (store.source, str(table), epoch, list(keys)),
    )


def unread(store: LogStore, rows: Sequence[TableRow]) -> list[TableRow]:
    """Those of ``rows`` with a chunk that is still to be read: only they need their pins."""
    found = store.connection.execute(
        "select t.place from unnest(%s::text[], %s::int[]) with ordinality t (name, epoch, place)"
        " where exists (select from snapshot_progress c where c.source = %s"
        " and c.table_name = t.name and c.epoch = t.epoch and c.state in ('planned', 'claimed'))",
        ([str(row.table) for row in rows], [row.epoch for row in rows], store.source),
    ).fetchall()
    return [rows[place - 1] for (place,) in sorted(found)]


def being_read(store: LogStore) -> set[TableId]:
    """Tables of which somebody has a chunk to read now."""
    found = store.connection.execute(
        "select distinct c.table_name from snapshot_progress c join tables t using"
        " (source, table_name, epoch) where c.source = %s and c.state = 'claimed'"
        " and c.heartbeat_at >= clock_timestamp() - make_interval(secs => %s)",
        (store.source, STALE_SECONDS),
    ).fetchall()
    return {TableId.parse(name) for (name,) in found}


def claimable(store: LogStore, row: TableRow, only: Iterable[str] | None) -> int:
    """How many chunks a worker could claim now (see ``log.copies.claims``)."""
    found = store.connection.execute(
        f"select count(*) from snapshot_progress c where {FREE}",
        {
            "source": store.source,
            "table": str(row.table),
            "epoch": row.epoch,
            "pin": row.pin,
            "stale": STALE_SECONDS,
            "only": list(only) if only is not None else None,
        },
    ).fetchone()
    return int(found[0]) if found else 0
