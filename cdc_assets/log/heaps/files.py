"""Records of the followed tables' heaps; ``log.heaps.record`` explains their use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from cdc_assets.log.heaps.record import HeapFile, KnownHeaps, Moment
from cdc_assets.log.session import LogSession
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# Key in pipeline_meta: the moment of the last look, for all tables without one of their own.
_SEEN = "heaps_seen"


def known_heaps(store: LogSession) -> dict[TableId, tuple[int, KnownHeaps]]:
    """The recorded heaps of each table, with their epoch."""
    horizon, _, lsn = (store.meta(_SEEN) or "0 0/0").partition(" ")
    last = Moment(int(horizon), Lsn.parse(lsn))
    rows = store.connection.execute(
        "select table_name, epoch, files, horizon, lsn::text, pending::text, truncated::text"
        " from heap_files where source = %s",
        (store.source,),
    ).fetchall()
    return {
        TableId.parse(name): (
            epoch,
            KnownHeaps(
                {int(oid): _heap_file(said) for oid, said in files.items()},
                last if own is None else Moment(own, Lsn.parse(own_lsn)),
                own is not None,
                Lsn.parse(pending) if pending else None,
                Lsn.parse(truncated) if truncated else None,
            ),
        )
        for name, epoch, files, own, own_lsn, pending, truncated in rows
    }


def has_one_heap(store: LogSession, row: TableRow) -> bool:
    """Whether the table is recorded as one that has rows in itself alone: no partition, no child.

    A partitioned table has no heap itself, but may have a single partition.
    """
    found = store.connection.execute(
        "select files from heap_files where source = %s and table_name = %s and epoch = %s",
        (store.source, str(row.table), row.epoch),
    ).fetchone()
    return found is not None and set(found[0]) == {str(row.oid)}


def _heap_file(said: int | list[Any]) -> HeapFile:
    """An earlier version wrote down the filenode alone."""
    return HeapFile(said) if isinstance(said, int) else HeapFile(*said)


def remember_heaps(
    store: LogSession,
    row: TableRow,
    files: Mapping[int, HeapFile],
    *,
    own: Moment | None = None,
    pending: Lsn | None = None,
) -> None:
    """Write down a table's files; as of ``own``, or of the source's last look."""
    store.connection.execute(
        "insert into heap_files (source, table_name, epoch, files, horizon, lsn, pending)"
        " values (%s, %s, %s, %s, %s, %s, %s) on conflict (source, table_name) do update set"
        " epoch = excluded.epoch, files = excluded.files, horizon = excluded.horizon,"
        " lsn = excluded.lsn, pending = excluded.pending"
        " where heap_files.epoch <= excluded.epoch",
        (
            store.source,
            str(row.table),
            row.epoch,
            json.dumps({str(oid): list(file) for oid, file in files.items()}),
            own.horizon if own is not None else None,
            str(own.lsn) if own is not None else None,
            str(pending) if pending is not None else None,
        ),
    )


def remember_moment(store: LogSession, moment: Moment) -> None:
    """Record that tables without a moment of their own were unchanged at this one, too."""
    store.set_meta(_SEEN, f"{moment.horizon} {moment.lsn}")


def mark_truncated(store: LogSession, tables: Iterable[TableId], lsn: Lsn) -> None:
    """Record that the log has a TRUNCATE of these tables, at ``lsn`` or just before."""
    store.connection.execute(
        "update heap_files set truncated = %s where source = %s and table_name = any(%s)",
        (str(lsn), store.source, [str(table) for table in tables]),
    )
