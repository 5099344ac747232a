"""The columns that a lake table has after a schema change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from psycopg import sql

from cdc_assets.lake.columns import TableColumns
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.log.copies.chunks import planned_files
from cdc_assets.log.relation import Told
from cdc_assets.materializer.schema.match import Ambiguous, numbered, same_values
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import (
    NO_FILE,
    Attribute,
    Column,
    attributes,
    heaps,
    type_names,
)
from cdc_assets.postgres.publication.contents import listed_columns
from cdc_assets.postgres.publication.row_filters import and_filter


class Refused(Exception):
    """A schema change that can't be followed: ``what`` is in the way, and the ``remedy``."""

    def __init__(self, what: str, remedy: str = "") -> None:
        self.what, self.remedy = what, remedy
        super().__init__(what)


def next_columns(pipeline: Pipeline, lake: LakeTable, told: Told) -> tuple[TableColumns, LakeTable]:
    """The table's next form: its property's next value (with the old fields), and the table.

    Raises Refused.
    """
    row, loaded = lake.row, lake.load()
    assert loaded is not None
    before = lake.recorded(loaded)
    fields = before.fields or lake.described(loaded.schema()).fields
    with pipeline.connect_source("schema") as source:
        now = attributes(source, row.oid)
        listed = listed_columns(source, pipeline.config.publication, [row.oid]).get(row.oid)
        if listed is not None:
            now = tuple(a for a in now if a.dropped or a.number in listed)
        types = type_names(source, [(c.type_oid, c.modifier) for c in told.columns])
    by_number = {c.number: c for c in row.columns}
    newest = max([*by_number, *fields], default=0)
    try:
        numbers = told.numbers or numbered(row.columns, told, now, newest)
    except Ambiguous as ambiguous:
        raise Refused(f"its schema changed more often than can be followed: {ambiguous}") from None
    at = {a.number: a for a in now}
    columns = tuple(
        Column(
            c.name,
            type_,
            number,
            by_number[number].not_null if number in by_number else False,
            at[number].generated,
            c.type_oid,
            c.modifier,
        )
        for c, type_, number in zip(told.columns, types, numbers, strict=True)
    )
    _refuse(lake, by_number, columns)
    names = {c.number: c.name for c in columns}
    known_key = [c.number for name in row.key_columns for c in row.columns if c.name == name]
    key = tuple(names[number] for number in known_key if number in names)
    if len(key) < len(known_key):
        key = ()
    told_key = told.key(key)
    if set(told_key) != set(key):
        if told.identity == "f":
            raise Refused(
                "its key changed, which the stream doesn't tell under REPLICA IDENTITY FULL"
            )
        key = told_key
    if row.mode == "soft_delete" and not key:
        raise Refused("without a key no row can be marked as deleted", "Give it a key.")
    excluded = set(lake.table.columns.exclude)
    if hidden := excluded & set(key):
        raise Refused(
            f"column {min(hidden)}, which columns.exclude names, belongs to its key now",
            "Take it out of columns.exclude.",
        )
    if masked := [c for c in columns if c.name in key and row.mask_rule(c) is not None]:
        raise Refused(
            f"column {masked[0].name}, which columns.mask names, belongs to its key now, by which"
            " rows are found",
            "Take it out of columns.mask, or give the table a key without it.",
        )
    after = replace(lake, row=replace(row, columns=columns, key_columns=key))
    exact = {c.source.number for c in lake.key}
    for part in after.key:
        if part.mapping.fits is not None and part.source.number not in exact:
            raise Refused(
                f"column {part.name} belongs to its key now, and may have lost values that the"
                f" lake's {part.mapping.lake} can't hold"
            )
    missing: dict[int, str | None] = {}
    unknown = {number for number in before.unknown if number in names}
    for column in after.columns:
        number = column.source.number
        if number not in by_number:
            if at[number].dropped and not key:
                unknown.add(number)
            if told.numbers and any(
                c.name == column.source.name and c.number not in names for c in row.columns
            ):
                # A column that was dropped and added again may have been taken for the old one.
                at[number] = replace(at[number], missing=None, has_default=True)
            missing |= _missing(pipeline, after, column, at[number])
    described = after.described()
    return replace(described, fields=fields, fill=missing, unknown=tuple(sorted(unknown))), after


def _refuse(lake: LakeTable, before: Mapping[int, Column], columns: Sequence[Column]) -> None:
    rules = lake.table.columns
    for column in columns:
        known = before.get(column.number)
        if known is None:
            continue
        if known.name in rules.exclude and column.name not in rules.exclude:
            raise Refused(
                f"column {known.name}, which columns.exclude names, is called {column.name} now",
                "Name it there.",
            )
        if column.name in rules.exclude:
            continue
        if rules.mask.get(known.name) != rules.mask.get(column.name):
            raise Refused(
                f"column {known.name} is called {column.name} now, and columns.mask names one of"
                " the two",
                f"Say there whether {column.name} is masked.",
            )
        forced = rules.types.get(known.name)
        if rules.types.get(column.name) != forced:
            raise Refused(
                f"column {known.name}, which columns.types names, is called {column.name} now",
                "Name it there.",
            )
        if _of_the_same_type(known, column):
            continue
        as_text = forced == "string" or column.number in lake.row.text_numbers
        as_text = as_text or lake.row.mask_rule(column) is not None
        if not same_values(known.type, column.type, as_text=as_text):
            raise Refused(
                f"column {column.name} changed its type from {known.type} to {column.type}, and"
                " Postgres doesn't send the values that this gave to its rows"
            )


def _of_the_same_type(known: Column, now: Column) -> bool:
    """By oid, where it is known: an earlier version wrote the name of a type without its schema."""
    if known.type_oid:
        return (known.type_oid, known.modifier) == (now.type_oid, now.modifier)
    return now.type.endswith(f".{known.type}")


def _missing(
    pipeline: Pipeline, lake: LakeTable, column: LakeColumn, now: Attribute
) -> dict[int, str | None]:
    """The values that older rows show in an added column, as ``fill`` takes them."""
    if now.dropped:
        return {}
    if now.missing is not None:
        return {now.number: column.masked(now.missing)}
    store, row = pipeline.store, lake.row
    with pipeline.connect_source("schema", reads=True) as source:
        parts = heaps(source, row.table, row.oid)
        files = {heap.oid: heap.filenode for heap in parts}
        # A rewrite, by a volatile default or later, stores a value in every row. And a partitioned
        # table's catalog entry doesn't have the values that its partitions' rows show. Nor has a
        # view's.
        same_files = files == planned_files(store, row) and not any(
            part.is_leaf or part.filenode == NO_FILE for part in parts
        )
        if not now.has_default and same_files:
            return {}
        rows = and_filter(row_filter(source, pipeline.config, row))
        found = source.execute(
            sql.SQL("select exists (select from {} where {} is distinct from null{})").format(
                lake.table.rows, sql.Identifier(now.name), rows
            )
        ).fetchone()
    if not found or not found[0]:
        return {}
    if not row.key_columns and lake.has_rows(lake.state()):
        raise Refused(
            f"column {column.name} was added with a value for each row, and without a key its rows"
            " can't be told apart"
        )
    return {now.number: None}
