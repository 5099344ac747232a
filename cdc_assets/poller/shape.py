"""A table's form as a poll finds it: the columns that are read, and how the log describes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.log.table_row import TableRow
from cdc_assets.masks import Mask, makes
from cdc_assets.messages.texts import copy_anew
from cdc_assets.poller.relations import described, refuse_unseen, unseen
from cdc_assets.poller.source import watermark
from cdc_assets.postgres.catalog import SourceTable, another
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pgoutput import Relation, RelationColumn
from cdc_assets.postgres.session.connect import Connection

# A valid index that begins with the column: then rows are read by it, in pages.
_INDEXED = """
select distinct i.indrelid::bigint, a.attname::text
  from pg_catalog.pg_index i
  join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
  join pg_catalog.pg_class c on c.oid = i.indexrelid
  join pg_catalog.pg_am m on m.oid = c.relam and m.amname = 'btree'
 where i.indrelid = any(%s::oid[]) and i.indisvalid and i.indpred is null
"""
_LIVE = """
select c.oid::bigint, a.attnum::int, a.attname::text, a.atttypid::bigint, a.atttypmod
  from pg_catalog.pg_namespace n
  join pg_catalog.pg_class c on c.relnamespace = n.oid
  join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
 where n.nspname = %s and c.relname = %s order by a.attnum
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A table's columns. ``names``: those that are read, each with its mask. ``live``: all.

    ``kind``: as in SourceTable. ``key``: places in ``names`` of a configured key, which no
    constraint keeps. ``indexed``: whether the watermark's order is an index's.
    """

    relation: Relation
    kind: str
    key: tuple[int, ...]
    names: tuple[tuple[str, Mask | None], ...]
    live: tuple[tuple[int, int, str, int, int], ...]
    watermark_type: str
    indexed: bool

    def is_still(self, source: Connection) -> bool:
        """Whether the table is as it was; nobody alters it while its lock is held."""
        name = (self.relation.schema, self.relation.name)
        return tuple(source.execute(_LIVE, name).fetchall()) == self.live


def indexed(source: Connection, oids: Collection[int]) -> frozenset[tuple[int, str]]:
    """The tables' columns that an index begins with, which finds rows by their order."""
    return frozenset((oid, name) for oid, name in source.execute(_INDEXED, (list(oids),)))


def shapes(
    source: Connection, config: SourceConfig, rows: Sequence[TableRow]
) -> Mapping[TableId, Shape | TableProblem]:
    """Of each table that is queried. Five statements, which wait for no lock, for all of them."""
    found = described(source, config, [row.table for row in rows])
    oids = [row.oid for row in rows]
    by_index, below = indexed(source, oids), unseen(source, oids)
    shapes = dict[TableId, Shape | TableProblem]()
    for row in rows:
        try:
            shapes[row.table] = _shape(config, row, found[row.table], by_index, below.get(row.oid))
        except TableProblem as problem:
            shapes[row.table] = problem
    return shapes


def _shape(
    config: SourceConfig,
    row: TableRow,
    found: SourceTable | TableProblem,
    by_index: Collection[tuple[int, str]],
    below: TableId | None,
) -> Shape:
    if isinstance(found, TableProblem):
        raise found
    if found.oid != row.oid:
        raise another(row.table, row.oid)
    of = watermark(config.table(row.table))
    column = next((c for c in found.columns if c.name == of.column), None)
    if column is None or not found.key_columns:
        lacks = "a key" if column is not None else f"the column {of.column}, its watermark,"
        raise TableProblem(
            row.table,
            f"it has lost {lacks} by which its changes are found",
            f"Put it back, or correct the configuration; then: {copy_anew(row.table)}",
        )
    refuse_unseen(found, of, below)
    read, key = _read(config, row, found), config.table(row.table).key
    return Shape(
        _relation(found),
        found.kind,
        tuple(place for place, (name, _) in enumerate(read) if name in key),
        tuple(read),
        tuple((found.oid, c.number, c.name, c.type_oid, c.modifier) for c in found.columns),
        column.type,
        (found.oid, of.column) in by_index,
    )


def _relation(found: SourceTable) -> Relation:
    """As a Relation message would be."""
    full = found.replica_identity == "f"
    key = () if found.replica_identity == "n" else found.key_columns
    return Relation(
        found.oid,
        found.id.schema,
        found.id.name,
        found.replica_identity,
        tuple(
            RelationColumn(c.name, c.type_oid, c.modifier, full or c.name in key)
            for c in found.columns
            if c.generated != "v"
        ),
    )


def _read(config: SourceConfig, row: TableRow, found: SourceTable) -> list[tuple[str, Mask | None]]:
    """Excluded columns stay at the source, under any name; so do masked ones as they are."""
    if not makes({*row.masks.values(), *row.mask_numbers.values()}, config.salt):
        raise TableProblem(
            row.table,
            "it is of columns that are masked with another mask_salt",
            f"Put the salt back; or {copy_anew(row.table)}",
        )
    masks = config.masks(row.table) or {}
    read = list[tuple[str, Mask | None]]()
    for column in found.columns:
        left_out = column.name in row.excluded or column.number in row.excluded_numbers
        if left_out or column.generated == "v":
            continue
        rule = row.mask_rule(column)
        recorded = Mask.of_rule(rule, config.salt) if rule is not None else None
        read.append((column.name, recorded or masks.get(column.name)))
    return read
