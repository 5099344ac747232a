"""The rows of a staged file, as a program is given them: columns of the lake's names and types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import psycopg.postgres
import pyarrow as pa
import pyarrow.compute as pc

from cdc_assets.config.source import SourceConfig
from cdc_assets.consumers.events import ROW_COLUMNS
from cdc_assets.consumers.values import arrow
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.log.batch import WITH_OLD_KEY
from cdc_assets.log.relation import Told
from cdc_assets.log.staged.files import OLD_KEY
from cdc_assets.log.table_row import TableRow
from cdc_assets.postgres.catalog import Column
from cdc_assets.postgres.pgoutput import RelationColumn
from cdc_assets.postgres.types import arrow_type

# Rows and bytes of text that an event has at most, unless one row has more.
BATCH_ROWS = 10_000
BATCH_BYTES = 16 * 10**6


@dataclass(frozen=True)
class Shape:
    """The columns of some rows, and the key's."""

    columns: tuple[LakeColumn, ...]
    key: tuple[LakeColumn, ...]

    def name(self, column: LakeColumn) -> str:
        return f"{column.name}__source" if column.name in ROW_COLUMNS else column.name

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(map(self.name, self.key))

    @cached_property
    def schema(self) -> pa.Schema:
        columns = {self.name(c): arrow_type(c.mapping.lake) for c in self.columns}
        return pa.schema({**columns, **ROW_COLUMNS, "_old_key": self.old_key_type})

    @property
    def old_key_type(self) -> pa.DataType:
        if not self.key:
            return pa.null()
        return pa.struct([(self.name(c), arrow_type(c.mapping.lake)) for c in self.key])


def shape_of(lake: LakeTable) -> Shape:
    """The shape of the rows that the lake table has."""
    return Shape(lake.columns, lake.key)


def is_known(row: TableRow, told: Told) -> bool:
    """Whether the lake table has, or had, followed the stream to these columns."""
    known = {(c.name, c.type_oid, c.modifier) for c in row.columns}
    return all((c.name, c.type_oid, c.modifier) in known for c in told.columns)


def shape_told(config: SourceConfig, row: TableRow, told: Told) -> Shape:
    """The shape of rows of a staged file, whose columns the lake table may have no more."""
    columns = tuple(_column(row, column) for column in told.columns)
    then = replace(row, columns=columns, key_columns=told.key(row.key_columns))
    names = {c.name for c in columns}
    if not set(then.key_columns) <= names:  # a key that the stream doesn't tell, and that is gone
        then = replace(then, key_columns=())
    return shape_of(LakeTable(config, config.table(row.table), then))


def _column(row: TableRow, told: RelationColumn) -> Column:
    """The column as the lake table has it; else as far as the stream says what it is."""
    declared = told.type_oid, told.modifier
    for column in row.columns:
        if (column.name, column.type_oid, column.modifier) == (told.name, *declared):
            return column
    # It was dropped, renamed or altered since. Where some are masked, it may have been one of them.
    kind = "text" if row.masks or row.mask_numbers else type_text(*declared)
    number = next((c.number for c in row.columns if c.name == told.name), 0)
    return Column(told.name, kind, number, type_oid=told.type_oid, modifier=told.modifier)


def type_text(type_oid: int, modifier: int) -> str:
    """``format_type``'s spelling of a type that every Postgres has; of any other one, text."""
    info = psycopg.postgres.types.get(type_oid)
    if info is None:
        return "text"
    text = info.regtype
    if text == "numeric" and modifier >= 4:
        precision, scale = (modifier - 4) >> 16, (((modifier - 4) & 0x7FF) ^ 1024) - 1024
        text = f"numeric({precision},{scale})"
    if text == "character" and modifier < 0:
        text = "bpchar"
    return f"{text}[]" if type_oid == info.array_oid else text


def without_moves(rows: pa.Table) -> pa.Table:
    """Staged rows without the deletes of old keys: the update behind each of them has that key.

    The two are of one change, and so have one LSN; a flusher stages both in one file.
    """
    if len(rows) < 2:
        return rows
    lsn = rows["_lsn"].to_numpy()
    deleted = pc.equal(rows["_op"].cast(pa.string()), "D").to_numpy(zero_copy_only=False)
    moved = pc.match_substring(rows["_data"], WITH_OLD_KEY).to_numpy(zero_copy_only=False)
    pair = deleted[:-1] & moved[1:] & (lsn[:-1] == lsn[1:])
    return rows.filter(pa.array([*(~pair), True])) if pair.any() else rows


def pieces(rows: pa.Table) -> Iterator[pa.Table]:
    """Staged rows cut into pieces that an event may have; a truncate is a piece by itself."""
    sizes = pc.binary_length(rows["_data"]).to_pylist()
    ops = rows["_op"].cast(pa.string()).to_pylist()
    start = size = 0
    for i, (op, length) in enumerate(zip(ops, sizes, strict=True)):
        cut = op == "T" or (i > start and ops[i - 1] == "T")
        if i > start and (cut or i - start >= BATCH_ROWS or size + length > BATCH_BYTES):
            yield rows.slice(start, i - start)
            start, size = i, 0
        size += length
    if start < len(rows):
        yield rows.slice(start)


def typed(shape: Shape, row: TableRow, rows: pa.Table) -> pa.Table:
    """Staged rows with their ``_offset``, as a program is given them."""
    data: list[Mapping[str, Any]] = [json.loads(text) for text in rows["_data"].to_pylist()]
    names = {c.source.name: shape.name(c) for c in shape.columns}
    found = [arrow(row.table, c, [one.get(c.source.name) for one in data]) for c in shape.columns]
    unchanged = [
        None if text is None else [names[name] for name in json.loads(text) if name in names]
        for text in rows["_unchanged_cols"].to_pylist()
    ]
    own = {
        "_op": rows["_op"].cast(pa.string()),
        "_unchanged": pa.array(unchanged, ROW_COLUMNS["_unchanged"]),
        "_old_key": _old_keys(shape, row, data),
        **{name: rows[name] for name in ("_offset", "_commit_lsn", "_lsn", "_ts", "_xid")},
    }
    return pa.table([*found, *(own[name] for name in ROW_COLUMNS)], schema=shape.schema)


def _old_keys(shape: Shape, row: TableRow, data: Sequence[Mapping[str, Any]]) -> pa.Array:
    kind = shape.old_key_type
    old = [json.loads(one[OLD_KEY]) if OLD_KEY in one else None for one in data]
    if not shape.key or not any(old):
        return pa.nulls(len(data), kind)
    fields = [
        arrow(row.table, c, [None if key is None else key.get(c.source.name) for key in old])
        for c in shape.key
    ]
    absent = pa.array([key is None for key in old])
    return pa.StructArray.from_arrays(fields, fields=list(kind), mask=absent)


def read_rows(shape: Shape, rows: pa.Table, *, is_history: bool) -> pa.Table:
    """Rows of the lake table, as those of a snapshot; what it has for itself is left out.

    ``is_history``: its rows are changes, which have an ``_op`` each.
    """
    found = {shape.name(c): rows[c.name] for c in shape.columns}
    if is_history:
        found |= {name: rows[name] for name in ROW_COLUMNS if name in rows.column_names}
    found = {"_op": pa.array(["R"] * len(rows)), **found}
    nothing = {f.name: pa.nulls(len(rows), f.type) for f in shape.schema if f.name not in found}
    arrays = [(found | nothing)[f.name].cast(f.type) for f in shape.schema]
    return pa.table(arrays, schema=shape.schema)
