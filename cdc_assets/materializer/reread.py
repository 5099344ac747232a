"""Reading rows again from the source, where neither the log nor the lake has a column's value.

That happens only after a copy was resumed on another snapshot: a row moved into a chunk that was
copied already, and its update left a TOAST column out; or a row's key changed before that snapshot,
and under the old key the lake may have the row that has it by now (invariant 8). The row is read as
it is *now*, which may be later than the log's position; the changes in between are still to come
and end with the same row. A row that is gone needs nothing: its delete is still to come. Until the
log is applied up to the LSN of that read, the table isn't whole: ``complete_lsn`` records that LSN.
The values of an added column (``schema.fill``) are read in the same way.

A transaction is in the log once its commit record is flushed, and visible only after that; where
its COMMIT waits for a synchronous standby, long after. A row that is read in between lacks a change
that no later one repeats; and the catalog has the columns of before. So the transactions of the
batch are awaited first. An asynchronous commit, however, is visible before it is flushed, and a
crash takes it back: what was read counts once it can't be lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.messages.texts import copy_anew
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import attributes, check_oid
from cdc_assets.postgres.horizon import running, secured
from cdc_assets.postgres.key_lookup import Key, KeyColumn, key_columns, lookups
from cdc_assets.postgres.publication.row_filters import filtered
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.postgres.types import text_form

Reread = Callable[[Sequence[Key]], list[str]]

# How long a batch's transactions are awaited: a merge holds its table's lock meanwhile.
VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_STANDBY = (
    ", most likely for a synchronous standby: pg_stat_activity has it, with wait_event SyncRep. The"
    " merge is tried again."
)


def texts_of_row(lake: LakeTable, now: Mapping[int, str]) -> sql.Composed:
    """The select list for a row ``t``; ``now``: the source's column names, maybe ahead."""

    def text(column: LakeColumn) -> sql.Composable:
        if column.source.number not in now:
            return sql.SQL("null")
        return text_form(sql.Identifier("t", now[column.source.number]))

    return sql.SQL(", ").join(text(c) for c in lake.columns)


def column_names(source: psycopg.Connection[Any], lake: LakeTable) -> dict[int, str]:
    """The names that the source's columns have now, by attribute number."""
    return {a.number: a.name for a in attributes(source, lake.row.oid) if not a.dropped}


def refuse_renamed(
    source: psycopg.Connection[Any], lake: LakeTable, before: Mapping[int, str]
) -> None:
    """Raise TableProblem unless names are as ``before``: what was read may be of other columns."""
    if column_names(source, lake) != before:
        what = "its columns were renamed while rows of it were read again"
        raise TableProblem(lake.row.table, what)


def _key(source: psycopg.Connection[Any], lake: LakeTable) -> list[KeyColumn]:
    numbers = [c.source.number for c in lake.key]
    found = key_columns(source, lake.row.oid, numbers)
    if gone := [c.name for c in lake.key if c.source.number not in found]:
        raise TableProblem(
            lake.row.table,
            f"rows of it have to be read again, and the source has no column {gone[0]} any more,"
            " which belongs to their key",
            copy_anew(lake.row.table),
        )
    return [found[number] for number in numbers]


def await_visible(source: Connection, lake: LakeTable, transactions: frozenset[str]) -> None:
    """Return once all of them are visible to the next snapshot, and to a look at the catalog.

    Raises TableProblem after VISIBLE_SECONDS.
    """
    deadline = time.monotonic() + VISIBLE_SECONDS
    while hanging := running(source) & transactions:
        if time.monotonic() > deadline:
            raise TableProblem(
                lake.row.table,
                "its rows or columns have to be read again, and the source doesn't show transaction"
                f" {min(hanging)} yet, which is in the log",
                f"Its COMMIT waits{_STANDBY}",
            )
        time.sleep(_LOOK_SECONDS)


def count_read(pipeline: Pipeline, source: Connection, lake: LakeTable) -> None:
    """Let rows count that were read just now: they can't be lost any more.

    The log records that the table isn't whole before this moment. Raises TableProblem if
    synchronous standbys don't have them within VISIBLE_SECONDS.
    """
    lsn = current_lsn(source)
    if not secured(source, VISIBLE_SECONDS):
        what = "what was read again of its rows isn't on the synchronous standbys yet"
        raise TableProblem(lake.row.table, what, f"A COMMIT waits{_STANDBY}")
    pipeline.store.not_whole_before(lake.row, lsn)


def rereader(
    pipeline: Pipeline, lake: LakeTable, transactions: Callable[[], frozenset[str]]
) -> Reread:
    """A function from keys to rows, both in text form; rows are JSON as in ``_data``.

    ``transactions``: the ids of those that changed the keys' rows in the batch.

    The log records that the table isn't whole before the moment that they were read at.
    """

    def reread(keys: Sequence[Key]) -> list[str]:
        with pipeline.connect_source("repair", reads=True) as source:
            check_oid(source, lake.row.table, lake.row.oid)
            await_visible(source, lake, transactions())
            found = rows_of(pipeline, source, lake, keys)
            count_read(pipeline, source, lake)
        return [row for _, row in found]

    return reread


def rows_of(
    pipeline: Pipeline, source: Connection, lake: LakeTable, keys: Sequence[Key]
) -> list[tuple[int, str]]:
    """The rows that ``source`` shows of ``keys``: a key's place among them, and JSON as ``_data``.

    Raises TableProblem where a column of the key is gone, or columns were renamed meanwhile.
    """
    found: list[tuple[int, str]] = []
    now = column_names(source, lake)
    for place, *texts in _looked_up(pipeline, source, lake, keys, now, texts_of_row(lake, now)):
        values = zip(lake.columns, texts, strict=True)
        row = json.dumps({c.source.name: c.masked(v) for c, v in values})
        found.append((place, row))
    refuse_renamed(source, lake, now)
    return found


def there(
    pipeline: Pipeline, source: Connection, lake: LakeTable, keys: Sequence[Key]
) -> frozenset[int]:
    """The places of the keys that ``source`` shows a row of. Raises as :func:`rows_of`.

    Where the lake has a column of the key as text, 1.0 isn't 1.00, which is equal to it at the
    source: a key that became the other one is a row of its own.
    """
    now = column_names(source, lake)
    as_text = {
        place: text_form(sql.Identifier("t", now[column.source.number]))
        for place, column in enumerate(lake.key)
        if column.mapping.lake == "string" and column.mask is None and column.source.number in now
    }
    select = sql.SQL(", ").join(as_text.values() or [sql.SQL("null")])
    found = frozenset(
        place
        for place, *texts in _looked_up(pipeline, source, lake, keys, now, select)
        if all(keys[place][column] == text for column, text in zip(as_text, texts, strict=False))
    )
    refuse_renamed(source, lake, now)
    return found


def _looked_up(
    pipeline: Pipeline,
    source: Connection,
    lake: LakeTable,
    keys: Sequence[Key],
    now: Mapping[int, str],
    select: sql.Composable,
) -> Iterator[tuple[Any, ...]]:
    """What is selected of the rows ``t`` of the keys, each behind its key's place."""
    query = sql.SQL("select k.n, {} from {} join {} t on {}")
    key, where = _key(source, lake), row_filter(source, pipeline.config, lake.row)
    numbers = {c.source.number for c in [*lake.columns, *lake.key]}
    rows = filtered(lake.table.rows, where, [n for number, n in now.items() if number in numbers])
    for some in lookups(key, keys):
        for n, *values in source.execute(query.format(select, some.listed, rows, some.equal)):
            yield some.first + int(n) - 1, *values
