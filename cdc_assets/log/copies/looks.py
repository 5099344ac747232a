"""A look at the copies of many tables together: one statement, however many they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.postgres.names import TableId

_LOOK = """
select t.table_name, t.epoch, t.state, t.pin::text,
       count(*) filter (where c.state = 'planned'),
       count(*) filter (where c.state = 'claimed'),
       count(*) filter (where c.state = 'written')
  from tables t left join snapshot_progress c
    on c.source = t.source and c.table_name = t.table_name and c.epoch = t.epoch
 where t.source = %s and t.table_name = any(%s)
 group by t.source, t.table_name
"""


@dataclass(frozen=True, slots=True)
class CopyLook:
    """A table's copy, and how many chunks of its plan are in the states before landed."""

    epoch: int
    state: TableState
    pin: str | None
    planned: int
    claimed: int
    written: int


def looks(store: LogStore, tables: Iterable[TableId]) -> dict[TableId, CopyLook]:
    rows = store.connection.execute(_LOOK, (store.source, list(map(str, tables)))).fetchall()
    return {
        TableId.parse(name): CopyLook(epoch, TableState(state), pin, *counts)
        for name, epoch, state, pin, *counts in rows
    }
