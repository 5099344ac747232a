"""The rows of ``snapshot_progress`` and the states of a copy.

A plan is frozen when a table is pinned. Progress here is a cache for people and for the planner of
the next wave: which chunks have landed is what the Iceberg table's snapshot summaries say
(invariant 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cdc_assets.log.store import LogStore, TableRow
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


@dataclass(frozen=True, slots=True)
class ChunkProgress:
    """One chunk of a table's plan; rows, bytes (of Arrow data) and seconds once it was read."""

    key: str
    range: CtidRange
    state: str
    rows: int | None
    bytes: int | None
    seconds: float | None


def plan_copy(
    store: LogStore, row: TableRow, pin: str, point: Lsn, chunks: Sequence[CtidRange]
) -> None:
    """Move a waiting table to copying under ``pin``; without chunks (mode never) to streaming."""
    name = str(row.table)
    store.connection.execute(
        "update tables set state = %s, pin = %s, snapshot_lsn = %s, complete_lsn = %s,"
        " reason = null, updated_at = now() where source = %s and table_name = %s",
        (
            "copying" if chunks else "streaming",
            pin if chunks else None,
            str(point),
            None if chunks else str(point),
            store.source,
            name,
        ),
    )
    with store.connection.cursor() as cursor:
        cursor.executemany(
            "insert into snapshot_progress"
            " (source, table_name, epoch, chunk, first_block, end_block)"
            " values (%s, %s, %s, %s, %s, %s) on conflict do nothing",
            [
                (store.source, name, row.epoch, c.key(row.epoch), c.first_block, c.end_block)
                for c in chunks
            ],
        )


def restart_copy(store: LogStore, row: TableRow) -> None:
    """Give up the copy of ``row``'s epoch: a new epoch waits for a new pin."""
    with store.connection.transaction():
        moved = store.connection.execute(
            "update tables set state = 'waiting', epoch = epoch + 1, pin = null,"
            " snapshot_lsn = null, complete_lsn = null, reason = null, updated_at = now()"
            " where source = %s and table_name = %s and epoch = %s",
            (store.source, str(row.table), row.epoch),
        )
        if moved.rowcount:
            store.connection.execute(
                "delete from snapshot_progress"
                " where source = %s and table_name = %s and epoch <= %s",
                (store.source, str(row.table), row.epoch),
            )


def chunks(store: LogStore, table: TableId, epoch: int) -> list[ChunkProgress]:
    """The table's plan with its progress, in block order."""
    rows = store.connection.execute(
        "select chunk, first_block, end_block, state, rows, bytes, seconds from snapshot_progress"
        " where source = %s and table_name = %s and epoch = %s order by first_block",
        (store.source, str(table), epoch),
    ).fetchall()
    return [ChunkProgress(key, CtidRange(a, b), *rest) for key, a, b, *rest in rows]


def mark_landed(store: LogStore, table: TableId, epoch: int, keys: Iterable[str]) -> None:
    """Remember that the Iceberg table holds these chunks."""
    store.connection.execute(
        "update snapshot_progress set state = 'landed', landed_at = coalesce(landed_at, now())"
        " where source = %s and table_name = %s and epoch = %s and chunk = any(%s)",
        (store.source, str(table), epoch, list(keys)),
    )
