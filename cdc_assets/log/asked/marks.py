"""Marks: one position of the source, at which each of its lake tables gets a tag.

A mark's LSN is the ``flushed_lsn`` of its transaction, which holds that row's lock. So whatever is
registered by then committed below the LSN, and whatever is registered later committed at it or
above: each table's log is cut between two offsets, at the end that it has then. No file is.

No merge passes a mark. A merge reads the log first and pending marks after that (``drain``). If it
read an entry above the cut, that was registered after the mark's transaction had ended, so the mark
is read, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, LiteralString

import psycopg

from cdc_assets.errors import ConfigurationError
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.messages.texts import command
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId

# How long the flusher's row may be held by a process that does nothing.
_HELD: LiteralString = "3s"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def refuse_name(name: str) -> None:
    """Raise ConfigurationError unless ``name`` may be a mark's: it becomes a tag's, too."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name[:80]!a} can't be the name of a mark.",
            "Take up to 64 letters, digits, dots, dashes and underscores; a letter or digit first.",
        )


def tag_of(name: str) -> str:
    """The tag of the lake tables at the mark ``name``."""
    return f"mark_{name}"


class MarkState(StrEnum):
    """Whether a lake table has a mark's tag."""

    PENDING = "pending"
    """Not yet: merges stop at the mark until it has."""
    TAGGED = "tagged"
    MISSED = "missed"
    """It never will: it had no state of that moment."""


@dataclass(frozen=True, slots=True)
class MarkedTable:
    """One table at a mark; ``offset``: the first one of its log that isn't below the mark."""

    table: TableId
    offset: int
    state: MarkState
    snapshot_id: int | None = None
    reason: str | None = None

    @property
    def lacking(self) -> str | None:
        """Why it has no tag; None if it has."""
        if self.state == MarkState.TAGGED:
            return None
        return self.reason or "its merges haven't come to the mark yet: it is tagged when they do"


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark with its tables; its LSN is above all that its tags have."""

    name: str
    lsn: Lsn
    created_at: datetime
    scheduled: bool
    tables: tuple[MarkedTable, ...]

    @property
    def tag(self) -> str:
        """Of the lake tables."""
        return tag_of(self.name)

    def of(self, state: MarkState) -> list[MarkedTable]:
        return [table for table in self.tables if table.state == state]


@dataclass(frozen=True, slots=True)
class PendingMark:
    """A mark that a table hasn't the tag of yet."""

    name: str
    lsn: Lsn
    epoch: int
    offset: int


def make(store: LogStore, name: str, tables: Sequence[TableId], *, scheduled: bool = False) -> None:
    """Make a mark of ``tables`` where the log is now; those that don't stream are missed.

    Raises ConfigurationError if there is one of that name, or no log yet.
    """
    which = {"source": store.source, "name": name, "scheduled": scheduled}
    try:
        with store.connection.transaction():
            # The flusher waits for the row that is locked: not for a process that is stopped here.
            store.connection.execute(f"set local idle_in_transaction_session_timeout = '{_HELD}'")
            made = store.connection.execute(
                "with flushed as (select lsn from flushed_lsn where source = %(source)s for update)"
                " insert into marks (source, name, lsn, scheduled)"
                " select %(source)s, %(name)s, lsn, %(scheduled)s from flushed",
                which,
            )
            if not made.rowcount:
                raise ConfigurationError(
                    f"{store.source} has no log yet.",
                    "Begin it: cdc-assets snapshot, or dagster dev.",
                )
            # A statement of its own: it sees all that was registered before the lock was had.
            store.connection.execute(
                "insert into marked_tables"
                ' (source, name, table_name, epoch, "offset", state, reason)'
                " select %(source)s, %(name)s, w.table_name, coalesce(t.epoch, 0),"
                "  coalesce(s.next_offset, 0),"
                "  case when t.state = %(streaming)s then 'pending' else 'missed' end,"
                "  case when t.state = %(streaming)s then null"
                "   else 'it was ' || coalesce(t.state, 'new') end"
                " from unnest(%(tables)s::text[]) w (table_name)"
                " left join tables t on t.source = %(source)s and t.table_name = w.table_name"
                " left join log_seq s on s.source = %(source)s and s.table_name = w.table_name",
                {**which, "tables": [*map(str, tables)], "streaming": TableState.STREAMING},
            )
    except psycopg.errors.UniqueViolation as error:
        raise exists_already(name) from error


def exists_already(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is a mark {name} already.",
        f"Take another name, or drop it: {command('marks', '--drop', name)}",
    )


def pending_mark(store: LogStore, table: TableId) -> PendingMark | None:
    """The nearest mark that waits for the table. Read after the log: see this module."""
    row = store.connection.execute(
        'select m.name, m.lsn, p.epoch, p."offset" from marked_tables p'
        " join marks m on m.source = p.source and m.name = p.name"
        " where p.source = %s and p.table_name = %s and p.state = 'pending'"
        ' order by p."offset", m.lsn, m.name limit 1',
        (store.source, str(table)),
    ).fetchone()
    if row is None:
        return None
    name, lsn, epoch, offset = row
    return PendingMark(name, Lsn.parse(lsn), epoch, offset)


def marked_tables(store: LogStore) -> frozenset[TableId]:
    """The tables that marks wait for, whatever comes of their log; gives up those that are lost."""
    rows = store.connection.execute(
        "select distinct table_name from marked_tables where source = %s and state = 'pending'",
        (store.source,),
    ).fetchall()
    if rows:
        miss_lost(store)
    return frozenset(TableId.parse(name) for (name,) in rows)


def settle(
    store: LogStore, name: str, table: TableId, snapshot_id: int | None, reason: str | None
) -> None:
    """Record that a table has a mark's tag, or (with a ``reason``) that it never will."""
    store.connection.execute(
        "update marked_tables set state = %s, snapshot_id = %s, reason = %s"
        " where source = %s and name = %s and table_name = %s and state = 'pending'",
        (
            MarkState.TAGGED if reason is None else MarkState.MISSED,
            snapshot_id,
            reason,
            store.source,
            name,
            str(table),
        ),
    )


def miss_lost(store: LogStore) -> None:
    """Give up what waits for tables that stream no longer, or are copied anew."""
    store.connection.execute(
        "update marked_tables p set state = 'missed', reason = case when t.table_name is null"
        " then 'it was given up before it had the tag' when t.epoch <> p.epoch"
        " then 'it was copied anew before it had the tag'"
        " else 'it was ' || t.state || ' before it had the tag' end"
        " from marked_tables w left join tables t on t.source = w.source"
        "  and t.table_name = w.table_name"
        " where p.source = %(source)s and p.state = 'pending' and w.source = p.source"
        "  and w.name = p.name and w.table_name = p.table_name"
        "  and (t.table_name is null or t.epoch <> p.epoch or t.state <> %(streaming)s)",
        {"source": store.source, "streaming": TableState.STREAMING},
    )


def marks(store: LogStore, name: str | None = None) -> list[Mark]:
    """The source's marks with their tables, or the one of that name; the oldest first."""
    rows = store.connection.execute(
        "select m.name, m.lsn, m.created_at, m.scheduled, coalesce(array_agg(array[p.table_name,"
        '  p."offset"::text, p.state, p.snapshot_id::text, p.reason]'
        "  order by p.table_name) filter (where p.table_name is not null), '{}')"
        " from marks m left join marked_tables p on p.source = m.source and p.name = m.name"
        " where m.source = %(source)s and m.name = coalesce(%(name)s, m.name)"
        " group by m.source, m.name order by m.created_at, m.name",
        {"source": store.source, "name": name},
    ).fetchall()
    return [
        Mark(name, Lsn.parse(lsn), at, scheduled, tuple(map(_table, tables)))
        for name, lsn, at, scheduled, tables in rows
    ]


def names(store: LogStore, *, only_scheduled: bool = False) -> list[str]:
    """The names of the source's marks, or of those that a schedule made; the oldest first."""
    found = store.connection.execute(
        "select name from marks where source = %s and (scheduled or not %s)"
        " order by created_at, name",
        (store.source, only_scheduled),
    )
    return [str(name) for (name,) in found]


def _table(row: Sequence[Any]) -> MarkedTable:
    name, offset, state, snapshot, reason = row
    return MarkedTable(
        TableId.parse(name),
        int(offset),
        MarkState(state),
        None if snapshot is None else int(snapshot),
        reason,
    )


def forget(store: LogStore, name: str) -> bool:
    """Remove a mark from the log; False if there was none."""
    done = store.connection.execute(
        "delete from marks where source = %s and name = %s", (store.source, name)
    )
    return bool(done.rowcount)
