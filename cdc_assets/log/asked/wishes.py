"""Users' requests, as the log keeps them: pausing tables or the source, and dropping the source.

While a table is paused, nothing more is applied to it. Its changes are still staged, so that the
source keeps no WAL because of it, and a copy goes on to its end, because its pin holds back the
source. Changes staged meanwhile are applied after the pause. Nothing starts for a dropped source.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from cdc_assets.errors import SourceMismatch
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.names import TableId

# Key in pipeline_meta: since when the whole source is paused.
_SOURCE = "paused_at"


def pause(store: LogStore, table: TableId | None = None) -> None:
    """Pause ``table``, or (None) the source; an existing pause keeps its start."""
    if table is not None:
        # A table that isn't registered yet is described at the first start.
        store.connection.execute(
            "insert into tables as t"
            " (source, table_name, oid, state, key_columns, columns, paused_at)"
            " values (%s, %s, 0, 'waiting', '{}', '[]', clock_timestamp())"
            " on conflict (source, table_name)"
            " do update set paused_at = coalesce(t.paused_at, excluded.paused_at)",
            (store.source, str(table)),
        )
        return
    store.connection.execute(
        "insert into pipeline_meta (source, key, value) values (%s, %s, clock_timestamp()::text)"
        " on conflict do nothing",
        (store.source, _SOURCE),
    )


def resume(store: LogStore, table: TableId | None = None) -> bool:
    """End the pause of ``table``, or (None) the source's; tables keep pauses of their own.

    False if it wasn't paused.
    """
    if table is None:
        return store.forget_meta(_SOURCE)
    done = store.connection.execute(
        "update tables set paused_at = null where source = %s and table_name = %s"
        " and paused_at is not null",
        (store.source, str(table)),
    )
    return bool(done.rowcount)


def source_paused(store: LogStore) -> datetime | None:
    """Since when the whole source is paused."""
    row = store.connection.execute(
        "select value::timestamptz from pipeline_meta where source = %s and key = %s",
        (store.source, _SOURCE),
    ).fetchone()
    return row[0] if row else None


def paused(store: LogStore) -> Mapping[TableId, datetime]:
    """The paused tables, with the start of the pause: their own or the source's."""
    rows = store.connection.execute(
        "select t.table_name, least(t.paused_at, m.value::timestamptz) from tables t"
        " left join pipeline_meta m on m.source = t.source and m.key = %s"
        " where t.source = %s and coalesce(t.paused_at, m.value::timestamptz) is not null",
        (_SOURCE, store.source),
    ).fetchall()
    return {TableId.parse(name): since for name, since in rows}


# Key in pipeline_meta: since when the source is dropped.
DROPPED = "dropped_at"


def dropped_since(store: LogStore) -> str | None:
    """Since when the source is dropped, as the coordination server prints it."""
    return store.meta(DROPPED)


def refuse_if_dropped(store: LogStore) -> None:
    """Raise SourceMismatch if the source is dropped: nothing may be made at it again."""
    since = dropped_since(store)
    if since is not None:
        raise SourceMismatch(
            ["source_dropped"],
            f"source {store.source} was dropped at {since}.",
            "Remove its configuration, or take it up again: cdc-assets resume copies every table"
            " anew.",
        )


def take_up_again(store: LogStore) -> bool:
    """Undo the mark of :func:`drop_source`; False if there was none."""
    return store.forget_meta(DROPPED)
