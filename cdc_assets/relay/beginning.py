"""How the second log, and a table's, begins: at the end of the first one, held from there on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from cdc_assets.config.source import SourceConfig
from cdc_assets.log.asked.wishes import refuse_if_dropped
from cdc_assets.log.copies.chunks import restart_copy
from cdc_assets.log.groups.lakes import LOG_GROUP, LOG_OF
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.names import TableId
from cdc_assets.relay.first import (
    first_log,
    logged_copy,
    staged_otherwise,
    why_no_log,
    why_of_another,
    why_unlogged,
)

logger = logging.getLogger(__name__)

_HELD = """
select table_name, copy from mat_cursor where consumer_group = %s and source = %s
"""
# What was passed on of another copy, or was let go of, is of no use to the one that begins.
_FORGET = "delete from log_index where source = %(source)s and table_name = %(table)s"
_BEGIN = """
with held as (
    insert into mat_cursor
           (consumer_group, source, table_name, "offset", applied_lsn, copy)
    select %(group)s, %(first)s, %(table)s, coalesce(max(next_offset), 0), '0/0', %(copy)s
      from log_seq where source = %(first)s and table_name = %(table)s
        on conflict (consumer_group, source, table_name) do update
       set "offset" = excluded."offset", copy = excluded.copy, updated_at = now()
    returning "offset")
insert into log_seq (source, table_name, next_offset)
select %(source)s, %(table)s, "offset" from held
    on conflict (source, table_name) do update set next_offset = excluded.next_offset
"""
_FOLLOWED = """
update tables set followed = true
 where source = %(source)s and table_name = %(table)s and epoch = %(epoch)s and oid = %(oid)s
   and state = 'waiting' and snapshot_lsn is null
"""


def begin_relay(config: SourceConfig, store: LogStore) -> None:
    """Give the second log its beginning, once the first one has its own. Raises SourceMismatch."""
    if config.log is None:
        return
    refuse_if_dropped(store)
    first = first_log(config, store)
    store.set_meta(LOG_OF, first.source)
    store.set_meta(LOG_GROUP, config.log.group)
    if store.flushed_lsn() is None and (flushed := first.flushed_lsn()) is not None:
        store.begin_at(flushed)


def held_copies(first: LogStore, group: str) -> Mapping[TableId, str | None]:
    """Of each table that the group holds, the copy whose log that is."""
    rows = first.connection.execute(_HELD, (group, first.source))
    return {TableId.parse(name): copy for name, copy in rows}


def begin_tables(
    config: SourceConfig, store: LogStore, waiting: Sequence[TableRow]
) -> list[TableRow]:
    """Those of the tables that wait for a pin whose logs are held from now on, or were already.

    The others' rows say what they wait for; one that is staged otherwise than the configuration
    says is parked. Raises SourceMismatch.
    """
    assert config.log is not None
    first, group = first_log(config, store), config.log.group
    if not waiting:
        return []
    if store.flushed_lsn() is None:
        for row in waiting:
            _waits(store, row, why_no_log(first.source))
        return []
    there, held = {row.table: row for row in first.tables()}, held_copies(first, group)
    begun = list[TableRow]()
    for row in waiting:
        theirs = there.get(row.table)
        copy = logged_copy(theirs)
        if row.snapshot_lsn is not None:  # it goes on, or is noticed to be another copy's
            begun += [row] if copy is not None and held.get(row.table) == copy else []
            continue
        if theirs is None or copy is None:
            _waits(store, row, why_unlogged(first.source, theirs))
            continue
        if theirs.oid != row.oid:
            _waits(store, row, why_of_another(first.source))
            continue
        if (problem := staged_otherwise(first.source, row, theirs)) is not None:
            logger.error("parked: %s", problem)
            store.park(row.table, problem.reason, row.epoch)
            continue
        if row.followed and held.get(row.table) != copy:
            restart_copy(store, row)  # what a pin is being made for isn't logged any more
            continue
        if not row.followed:
            _hold(store, first, group, row, copy, anew=held.get(row.table) != copy)
        begun.append(row)
    return begun


def _waits(store: LogStore, row: TableRow, why: str) -> None:
    if row.reason != why:  # each tick looks at hundreds of tables
        store.note_waiting(row.table, why)


def _hold(
    store: LogStore, first: LogStore, group: str, row: TableRow, copy: str, *, anew: bool
) -> None:
    which = {
        "source": store.source,
        "first": first.source,
        "group": group,
        "table": str(row.table),
        "copy": copy,
        "epoch": row.epoch,
        "oid": row.oid,
    }
    with store.connection.transaction():
        if anew:
            store.connection.execute(_FORGET, which)
            store.connection.execute(_BEGIN, which)
        store.connection.execute(_FOLLOWED, which)
