"""Reading the rows of a table from a watermark on, in pages, as rows of the staged file.

A page is one statement, and so one snapshot and one short hold of ``ACCESS SHARE``: it ends after
PAGE_ROWS and all rows with the last one's watermark. Rows with one time have, as a rule, been
written by one transaction: no page is longer than it was. Without an index each page would read the
whole table, so that there is one.

A row version that was staged isn't staged again: those with a watermark that the next poll begins
at or below are remembered, MOST_SEEN of them, by their place and transaction: what comes later at
the same place has another transaction's id. Of views and foreign tables, whose rows have neither,
by what they show, the watermark with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import LiteralString

import pyarrow as pa
from psycopg import sql

from cdc_assets.config.tables import TableConfig
from cdc_assets.log.staged.files import STAGED_SCHEMA
from cdc_assets.poller.bounds import WHOLE
from cdc_assets.poller.shape import Shape
from cdc_assets.poller.source import watermark
from cdc_assets.poller.troubles import Unread
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.types import text_form

PAGE_ROWS = 10_000
# Of text, that wait for more of it in memory.
PART_BYTES = 16 * 2**20
MOST_SEEN = 100_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_POSITION: LiteralString = "(select pg_catalog.pg_current_wal_insert_lsn()::text)"
_REPLAYED: LiteralString = "(select pg_catalog.pg_last_wal_replay_lsn()::text)"
# By relkind, what tells a row's version from any other's.
_VERSIONS: Mapping[str, LiteralString] = {
    "p": "pg_catalog.format('%s %s %s', t.tableoid, t.ctid, t.xmin)",
    "r": "pg_catalog.format('%s %s', t.ctid, t.xmin)",
    "m": "pg_catalog.format('%s %s', t.ctid, t.xmin)",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is read of a table: rows from ``begin`` on. ``bound``: what the next poll begins at.

    ``seen``: the versions that are staged. ``at``: when it was asked, in microseconds.
    """

    table: TableConfig
    shape: Shape
    begin: int
    bound: int
    seen: AbstractSet[str]
    at: int
    in_recovery: bool


@dataclass(slots=True)
class Found:
    """Counted while pages are read. ``last``: the watermark of the last page's last row.

    ``seen``: the versions that the next poll finds again.
    """

    rows: int = 0
    pages: int = 0
    skipped: int = 0
    last: str | None = None
    is_over: bool = False
    seen: set[str] = field(default_factory=set)


def literal(shape: Shape, bound: int) -> sql.Composable:
    """A bound as a value of the watermark's type; a time without a zone is one of UTC."""
    if not shape.watermark_type.startswith("timestamp"):
        return sql.SQL("{}::bigint").format(sql.Literal(str(bound)))
    at = (_EPOCH + timedelta(microseconds=bound)).isoformat(sep=" ")
    return sql.SQL("{}::{}").format(sql.Literal(at), sql.SQL(_plain(shape.watermark_type)))


def _plain(kind: str) -> LiteralString:
    """The type without a precision, which would round."""
    if not kind.startswith("timestamp"):
        return "bigint"
    return "timestamptz" if kind.endswith("with time zone") else "timestamp"


def page(source: Connection, asked: Asked, found: Found) -> Iterator[pa.Table]:
    """The rows of the next page in parts of about PART_BYTES, as in a staged file."""
    data, lsn, size = list[str](), Lsn.ZERO, 0
    for lsn, row in _rows(source, asked, found):
        data.append(row)
        size += len(row)
        if size >= PART_BYTES:
            yield staged(data, lsn, asked.at)
            data, size = [], 0
    if data:
        yield staged(data, lsn, asked.at)


def staged(data: list[str], lsn: Lsn, at: int) -> pa.Table:
    """Rows as JSON as rows of the staged file: each a whole row, which is so at ``lsn``."""
    count = len(data)
    return pa.table(
        [
            pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int8()), pa.array(["U"])),
            pa.array([int(lsn)] * count, pa.int64()),
            pa.array([int(lsn)] * count, pa.int64()),
            pa.array([at] * count, pa.int64()).cast(pa.timestamp("us", "UTC")),
            pa.array([0] * count, pa.int64()),
            pa.nulls(count, pa.string()),
            pa.array(data, pa.large_string()),
        ],
        schema=STAGED_SCHEMA,
    )


def _rows(source: Connection, asked: Asked, found: Found) -> Iterator[tuple[Lsn, str]]:
    """Rows as JSON, each with an LSN that all it shows had committed below."""
    shape, names, count = asked.shape, asked.shape.names, 0
    with source.cursor() as cursor, cursor.copy(_page(asked, found.last)) as copy:
        for position, is_new, place, found.last, *texts in copy.rows():
            count += 1
            if None in [texts[column] for column in shape.key]:
                columns = ", ".join(shape.names[place][0] for place in shape.key)
                raise Unread(
                    f"a row has NULL in its key ({columns}), by which rows are told apart: leave"
                    " such rows out of the view, or name other columns in key:"
                )
            version = place or _digest(texts)
            if is_new == "t" and len(found.seen) < MOST_SEEN:
                found.seen.add(version)
            if version in asked.seen:
                found.skipped += 1
                continue
            found.rows += 1
            values = zip(names, texts, strict=True)
            row = {name: mask.text(v) if mask else v for (name, mask), v in values}
            yield Lsn.parse(position), json.dumps(row, ensure_ascii=False)
    found.pages += 1
    found.is_over = not shape.indexed or count < PAGE_ROWS


def _digest(texts: Sequence[str | None]) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()


def _page(asked: Asked, last: str | None) -> sql.Composed:
    """The rows behind those with the watermark ``last``; None: from the begin on."""
    shape, of = asked.shape, watermark(asked.table)
    column = sql.Identifier("t", of.column)
    # NULL orders nothing: a page that ended with it would be followed by the first one.
    condition: sql.Composable = sql.SQL("{} is not null").format(column)
    if last is not None:
        value = sql.SQL("{}::{}").format(sql.Literal(last), sql.SQL(_plain(shape.watermark_type)))
        condition = sql.SQL("{} > {}").format(column, value)
    elif asked.begin > WHOLE:
        condition = sql.SQL("{} >= {}").format(column, literal(shape, asked.begin))
    end: sql.Composable = sql.SQL("")
    if shape.indexed:
        end = sql.SQL("order by {} fetch first {} rows with ties").format(
            column, sql.Literal(PAGE_ROWS)
        )
    is_new = (
        sql.SQL("true")
        if asked.bound == WHOLE
        else sql.SQL("{} >= {}").format(column, literal(shape, asked.bound))
    )
    return sql.SQL("copy (select {}, {}, {}, {}, {} from {} t where {} {}) to stdout").format(
        sql.SQL(_REPLAYED if asked.in_recovery else _POSITION),
        is_new,
        sql.SQL(_VERSIONS.get(shape.kind, "null")),
        text_form(column),
        sql.SQL(", ").join(text_form(sql.Identifier("t", name)) for name, _ in shape.names),
        asked.table.rows,
        condition,
        end,
    )
