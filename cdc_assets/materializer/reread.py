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

Rows may be of any size, and so many as a batch has: they are read by short statements, and handed
on in pieces, so that neither the source nor anybody who takes them holds all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

import psycopg
from psycopg import sql

from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.messages.texts import copy_anew
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import attributes, check_oid
from cdc_assets.postgres.horizon import running, secured
from cdc_assets.postgres.key_lookup import Key, KeyColumn, key_columns, lookups, takes_a_scan
from cdc_assets.postgres.publication.row_filters import filtered
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.postgres.types import text_form


@dataclass(slots=True)
class Piece:
    """Of the keys that were looked up: the ``found`` ones' places, with their rows as ``_data``.

    ``gone``: the places of keys without a row.
    """

    found: list[tuple[int, str]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)


Reread = Callable[[Sequence[Key]], Iterator[Piece]]

# Of a piece, as JSON; it may have half as much again, and a row more.
PIECE_BYTES = 32 * 10**6
# Of what one statement should read. It is ended at the second one, and the keys that it hasn't come
# to are looked up by further ones: a row may be far larger than those before it.
_STATEMENT_BYTES, _MOST_BYTES = PIECE_BYTES // 4, PIECE_BYTES // 2
# Keys of the first statement, when nothing is known of the rows, and of any.
_FIRST_KEYS, _MOST_KEYS = 32, 500
# What a key without a row counts, at least.
_KEY_BYTES = 100

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
    """A function from keys to rows, both in text form.

    ``transactions``: the ids of those that changed the keys' rows in the batch.

    Once the last piece is taken, the log records that the table isn't whole before that moment: no
    row counts before.
    """

    def reread(keys: Sequence[Key]) -> Iterator[Piece]:
        with pipeline.connect_source("repair", reads=True) as source:
            check_oid(source, lake.row.table, lake.row.oid)
            await_visible(source, lake, transactions())
            yield from pieces_of(pipeline, source, lake, keys)
            count_read(pipeline, source, lake)

    return reread


def rows_of(
    pipeline: Pipeline, source: Connection, lake: LakeTable, keys: Sequence[Key]
) -> list[tuple[int, str]]:
    """The rows that ``source`` shows of ``keys``, all at once; see :func:`pieces_of`."""
    return [row for piece in pieces_of(pipeline, source, lake, keys) for row in piece.found]


def pieces_of(
    pipeline: Pipeline, source: Connection, lake: LakeTable, keys: Sequence[Key]
) -> Iterator[Piece]:
    """The rows that ``source`` shows of ``keys``: a key's place among them, and JSON as ``_data``.

    No statement is under way while a piece is used, but where a lookup takes a scan. Raises
    TableProblem where a column of the key is gone, or columns were renamed meanwhile.
    """
    now = column_names(source, lake)
    lookup = _Lookup(pipeline, source, lake, now, texts_of_row(lake, now))
    piece, size = Piece(), 0
    for part in _parts(lookup, lake, keys):
        piece.found += part.found
        piece.gone += part.gone
        size += sum(len(row) for _, row in part.found)
        size += sum(_KEY_BYTES + sum(len(t or "") for t in keys[place]) for place in part.gone)
        if size >= PIECE_BYTES:
            if lookup.scans:  # the statement is under way, and nobody can rename what it reads
                with pipeline.connect_source("repair") as beside:
                    refuse_renamed(beside, lake, now)
            else:
                refuse_renamed(source, lake, now)
            yield piece
            piece, size = Piece(), 0
        del part
    refuse_renamed(source, lake, now)
    if piece.found or piece.gone:
        yield piece


def _parts(lookup: _Lookup, lake: LakeTable, keys: Sequence[Key]) -> Iterator[Piece]:
    """What a statement each finds; of one that scans the table, some rows at a time."""
    due = [*reversed(range(len(keys)))]
    step = len(keys) if lookup.scans else _FIRST_KEYS
    while due:
        some = due[: -step - 1 : -1]
        del due[-step:]
        left, part, size, ended = set(some), Piece(), 0, True
        with closing(lookup.rows([keys[place] for place in some])) as rows:
            for at, *texts in rows:
                values = zip(lake.columns, texts, strict=True)
                row = json.dumps({c.source.name: c.masked(v) for c, v in values})
                part.found.append((some[at], row))
                left.discard(some[at])
                size += len(row)
                if size < _MOST_BYTES:
                    continue
                if not lookup.scans:
                    ended = False
                    break
                yield part
                part, size = Piece(), 0
        if ended:
            part.gone = [place for place in some if place in left]
        else:
            due += [place for place in reversed(some) if place in left]
        fits = len(some) * _STATEMENT_BYTES // max(1, size) if ended else len(part.found) // 2
        step = len(keys) if lookup.scans else max(1, min(fits, 2 * step, _MOST_KEYS))
        yield part


def there(
    pipeline: Pipeline, source: Connection, lake: LakeTable, keys: Sequence[Key]
) -> frozenset[int]:
    """The places of the keys that ``source`` shows a row of. Raises as :func:`pieces_of`.

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
        for place, *texts in _Lookup(pipeline, source, lake, now, select).rows(keys)
        if all(keys[place][column] == text for column, text in zip(as_text, texts, strict=False))
    )
    refuse_renamed(source, lake, now)
    return found


class _Lookup:
    """What is selected of rows ``t``, by their keys. ``scans``: a statement reads all the table."""

    def __init__(
        self,
        pipeline: Pipeline,
        source: Connection,
        lake: LakeTable,
        now: Mapping[int, str],
        select: sql.Composable,
    ) -> None:
        self._source, self._select = source, select
        self._key, where = _key(source, lake), row_filter(source, pipeline.config, lake.row)
        numbers = {c.source.number for c in [*lake.columns, *lake.key]}
        columns = [name for number, name in now.items() if number in numbers]
        self._rows = filtered(lake.table.rows, where, columns)
        self.scans = takes_a_scan(self._key)

    def rows(self, keys: Sequence[Key]) -> Generator[tuple[Any, ...]]:
        """Those of the rows of ``keys``, each behind its key's place, as the server sends them."""
        query = sql.SQL("select k.n, {} from {} join {} t on {}")
        for some in lookups(self._key, keys):
            statement = query.format(self._select, some.listed, self._rows, some.equal)
            streamed = cast("Generator[tuple[Any, ...]]", self._source.cursor().stream(statement))
            with closing(streamed) as found:  # what is left of the statement is canceled
                for n, *values in found:
                    yield some.first + int(n) - 1, *values
