"""A look at the copies of many tables together: one statement, however many they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.names import TableId

_LOOK = """
select t.table_name, t.epoch, t.state, t.pin::text,
       count(*) filter (where c.state in ('planned', 'claimed')
                          and (%(only)s::text[] is null or c.chunk = any(%(only)s))),
       count(*) filter (where c.state = 'claimed'),
       count(*) filter (where c.state = 'written')
  from tables t left join snapshot_progress c
    on c.source = t.source and c.table_name = t.table_name and c.epoch = t.epoch
 where t.source = %(source)s and t.table_name = any(%(tables)s)
 group by t.source, t.table_name
"""


@dataclass(frozen=True, slots=True)
class CopyLook:
    """A table's copy: how many chunks are written, are claimed, or are unread (of those wanted)."""

    epoch: int
    state: TableState
    pin: str | None
    unread: int
    claimed: int
    written: int


def looks(
    store: LogStore, tables: Iterable[TableId], only: Iterable[str] | None = None
) -> dict[TableId, CopyLook]:
    """``only``: the keys of the chunks that are wanted; None: all are."""
    asked = {
        "source": store.source,
        "tables": list(map(str, tables)),
        "only": list(only) if only is not None else None,
    }
    rows = store.connection.execute(_LOOK, asked).fetchall()
    return {
        TableId.parse(name): CopyLook(epoch, TableState(state), pin, *counts)
        for name, epoch, state, pin, *counts in rows
    }
