"""Taking a lake table from one relation to the next, in place where that is right.

Each statement is a commit of its own, so whoever dies between two leaves a table that is altered
half-way. What is left to be done is found by field ids and attribute numbers, which renames keep
(``spark.columns``): every step is done once, however often it is tried. The steps end before a row
of the new relation is merged; the cursor doesn't move with them.

A dropped column stays, NULL in every row that is written from then on. An added one gets the values
that rows of before show in it (``fill``). What can't be followed is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from psycopg import sql
from pyiceberg.schema import Schema
from pyspark.sql import SparkSession

from cdc_assets.config_sections import ColumnsConfig
from cdc_assets.errors import TableProblem
from cdc_assets.log.progress import planned_files
from cdc_assets.materializer.evolve import Ambiguous, numbered, same_values
from cdc_assets.materializer.fill import fill
from cdc_assets.materializer.relation import Told
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import Attribute, Column, attributes, heaps, type_names
from cdc_assets.postgres.publications import listed_columns
from cdc_assets.postgres.types import mapping
from cdc_assets.spark.columns import PROPERTY, TableColumns
from cdc_assets.spark.standing import park
from cdc_assets.spark.tables import LakeColumn, LakeState, LakeTable, listed, ticked

logger = logging.getLogger(__name__)

# Spark's names of types and Iceberg's, where they differ.
_ICEBERG = {"bigint": "long", "timestamp_ntz": "timestamp", "timestamp": "timestamptz"}
_WIDER = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"\Adecimal\((\d+), ?(\d+)\)\Z")


def current(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, state: LakeState
) -> tuple[LakeTable, bool]:
    """``lake`` as the table itself describes it; what a dead writer has begun is ended.

    True if that can't be ended before the relation is known: :func:`follow` does it. What somebody
    else renamed gets its name back. Parks the table and raises TableProblem if its columns can't be
    those of its rows: dropped by somebody, of before a schema change, of another configuration.
    """
    loaded = lake.load()
    assert loaded is not None
    described = lake.recorded(loaded)
    if (why := reconfigured(described, lake.table.columns)) is not None:
        park(pipeline.store, lake, why)
    if state.sequence < described.since:
        park(pipeline.store, lake, "its lake table was set back to before its columns were changed")
    row = replace(lake.row, columns=described.columns, key_columns=described.key)
    found = replace(lake, row=row)
    if not described.altering:
        described = _restored(pipeline, session, found, described, loaded.schema())
    if described.fill:
        _filled(pipeline, session, found, state, described)
    if row != lake.row:
        pipeline.store.set_columns(row)
    return found, described.altering


def reconfigured(described: TableColumns, rules: ColumnsConfig) -> str | None:
    """How the configuration differs from what the table was made with, where that concerns it."""
    if described.exclude is None or described.types is None:
        return None
    for column in described.columns:
        if (column.name in described.exclude) != (column.name in rules.exclude):
            was = "without" if column.name in described.exclude else "with"
            return f"its lake table was made {was} column {column.name} (columns.exclude)"
        before, now = described.types.get(column.name), rules.types.get(column.name)
        if mapping(column.type, before).lake != mapping(column.type, now).lake:
            kind = mapping(column.type, before).lake
            return f"its lake table was made with column {column.name} as {kind} (columns.types)"
    return None


def follow(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, state: LakeState, told: Told
) -> LakeTable:
    """Alter the table, whose state is ``state``, so that it takes rows of the relation ``told``.

    Parks the table and raises TableProblem where that can't be done in place.
    """
    try:
        described, after = _next(pipeline, lake, told)
        loaded = lake.load()
        assert loaded is not None
        statements = _statements(after, loaded.schema(), described.fields)
    except _Refused as refused:
        way_out = f"Then run: cdc-assets resync {lake.row.table}."
        if not refused.remedy:
            way_out = f"Copy it anew: cdc-assets resync {lake.row.table}."
        problem = TableProblem(lake.row.table, refused.what, f"{refused.remedy} {way_out}".strip())
        pipeline.store.park(lake.row.table, str(problem), lake.row.epoch)
        raise problem from refused
    if statements or described.fill:
        # A writer that finds the table half-way sees that it is ours. The fields are named now, as
        # columns may have gone by their names, which are about to change.
        known = lake.recorded(loaded)
        begun = replace(known, fields=described.fields, altering=True)
        if begun != known:
            _describe(pipeline, session, lake, begun)
    for statement in statements:
        _alter(pipeline, session, lake, statement)
    loaded = lake.load()
    assert loaded is not None
    ids = {f.name: f.field_id for f in loaded.schema().fields}
    fields = {**described.fields, **{c.source.number: ids[c.name] for c in after.columns}}
    described = replace(described, fields=fields, since=state.sequence)
    _describe(pipeline, session, after, described)
    if described.fill:
        _filled(pipeline, session, after, state, described)
    pipeline.store.set_columns(after.row)
    return after


# --- parts ---


class _Refused(Exception):
    def __init__(self, what: str, remedy: str = "") -> None:
        self.what, self.remedy = what, remedy
        super().__init__(what)


def _alter(pipeline: Pipeline, session: SparkSession, lake: LakeTable, statement: str) -> None:
    """One step. Raises psycopg.OperationalError if the writer lock is lost, with its session.

    Nothing in the table itself would refuse what comes late, of a writer that was taken for dead.
    """
    pipeline.store.server_now()
    session.sql(f"alter table {lake.sql_name} {statement}")


def _describe(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, described: TableColumns
) -> None:
    properties = listed({PROPERTY: described.dump()})
    _alter(pipeline, session, lake, f"set tblproperties ({properties})")


def _filled(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    described: TableColumns,
) -> None:
    fill(pipeline, session, lake, state, described.fill)
    done = replace(described, fill={}, since=lake.state().sequence)
    _describe(pipeline, session, lake, done)


def _restored(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    described: TableColumns,
    schema: Schema,
) -> TableColumns:
    """Give columns that somebody else renamed their names back; their field ids are known then."""
    ids = {f.name: f.field_id for f in schema.fields}
    fields = described.fields or lake.described(schema).fields
    try:
        for name in [*(c.name for c in lake.columns if c.source.number not in fields), *lake.extra]:
            if name not in ids:
                raise _Refused(f"its lake table has no column {name} any more")
        statements = _statements(lake, schema, fields)
    except _Refused as refused:
        park(pipeline.store, lake, f"{refused.what} (somebody altered it)")
    for statement in statements:
        logger.warning("%s: somebody altered its lake table: %s", lake.row.table, statement)
        _alter(pipeline, session, lake, statement)
    if fields != described.fields:
        described = replace(described, fields=fields)
        _describe(pipeline, session, lake, described)
    return described


def _next(pipeline: Pipeline, lake: LakeTable, told: Told) -> tuple[TableColumns, LakeTable]:
    """What the table is to be: as its property will say (with the fields before), and as a table.

    Raises _Refused.
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
        raise _Refused(f"its schema changed more often than can be followed: {ambiguous}") from None
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
            raise _Refused(
                "its key changed, which the stream doesn't tell under REPLICA IDENTITY FULL"
            )
        key = told_key
    if row.mode == "soft_delete" and not key:
        raise _Refused("without a key no row can be marked as deleted", "Give it a key.")
    excluded = set(lake.table.columns.exclude)
    if hidden := excluded & set(key):
        raise _Refused(
            f"column {min(hidden)}, which columns.exclude names, belongs to its key now",
            "Take it out of columns.exclude.",
        )
    after = replace(lake, row=replace(row, columns=columns, key_columns=key))
    exact = {c.source.number for c in lake.key}
    for part in after.key:
        if part.mapping.fits is not None and part.source.number not in exact:
            raise _Refused(
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
                # Dropped and added again, it may have been taken for the old one until now.
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
            raise _Refused(
                f"column {known.name}, which columns.exclude names, is called {column.name} now",
                "Name it there.",
            )
        if column.name in rules.exclude:
            continue
        forced = rules.types.get(known.name)
        if rules.types.get(column.name) != forced:
            raise _Refused(
                f"column {known.name}, which columns.types names, is called {column.name} now",
                "Name it there.",
            )
        if _of_the_same_type(known, column):
            continue
        as_text = forced == "string" or column.number in lake.row.text_numbers
        if not same_values(known.type, column.type, as_text=as_text):
            raise _Refused(
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
    """What older rows show in an added column, as ``fill`` takes it."""
    if now.dropped:
        return {}
    if now.missing is not None:
        return {now.number: now.missing}
    store, row = pipeline.store, lake.row
    with pipeline.connect_source("schema", reads=True) as source:
        parts = heaps(source, row.table, row.oid)
        files = {heap.oid: heap.filenode for heap in parts}
        # A rewrite gives every row its value, be it by a volatile default or later. And what a
        # partition's rows show, the partitioned table doesn't know.
        same_files = files == planned_files(store, row) and not any(p.is_leaf for p in parts)
        if not now.has_default and same_files:
            return {}
        found = source.execute(
            sql.SQL("select exists (select from {} where {} is distinct from null)").format(
                lake.table.rows, sql.Identifier(now.name)
            )
        ).fetchone()
    if not found or not found[0]:
        return {}
    if not row.key_columns and lake.has_rows(lake.state()):
        raise _Refused(
            f"column {column.name} was added with a value for each row, and without a key its rows"
            " can't be told apart"
        )
    return {now.number: None}


def _statements(after: LakeTable, schema: Schema, fields: Mapping[int, int]) -> list[str]:
    """What is left to be altered, after ``alter table t``. Raises _Refused."""
    name_of = {f.field_id: f.name for f in schema.fields}
    type_of = {f.field_id: str(f.field_type) for f in schema.fields}
    id_of = {name: field_id for field_id, name in name_of.items()}
    owned = set(fields.values())
    wanted: dict[int, LakeColumn] = {}
    added: list[LakeColumn] = []
    for column in after.columns:
        field_id = fields.get(column.source.number)
        if field_id is None and (there := id_of.get(column.name)) not in owned:
            field_id = there  # a dead writer added it
        if field_id is None:
            added.append(column)
        else:
            wanted[field_id] = column
    taken = {column.name for column in after.columns}
    statements = []
    for field_id, name in list(name_of.items()):
        column_there = wanted.get(field_id)
        if name in taken and (column_there is None or column_there.name != name):
            aside = f"{name}__dropped_{field_id}" if column_there is None else f"cdc_{field_id}__"
            statements.append(f"rename column {ticked(name)} to {ticked(aside)}")
            name_of[field_id] = aside
    for field_id, column in wanted.items():
        if field_id not in name_of:
            raise _Refused(f"its lake table has no column {column.name} any more")
        if name_of[field_id] != column.name:
            statements.append(f"rename column {ticked(name_of[field_id])} to {ticked(column.name)}")
        has, needs = type_of[field_id], _iceberg(column.mapping.lake)
        if needs is not None and _widens(has, needs):
            statements.append(f"alter column {ticked(column.name)} type {column.mapping.lake}")
        elif needs is not None and has != needs and not _widens(needs, has):
            raise _Refused(
                f"column {column.name} is {has} in the lake and would have to be {needs}"
            )
    statements += [f"add column {ticked(c.name)} {c.mapping.lake}" for c in added]
    return statements


def _iceberg(lake: str) -> str | None:
    """Iceberg's spelling of a Spark SQL type; None for arrays, which are never changed."""
    if match := _DECIMAL.match(lake):
        return f"decimal({match[1]}, {match[2]})"
    return None if lake.startswith("array<") else _ICEBERG.get(lake, lake)


def _widens(has: str, needs: str) -> bool:
    one, other = _DECIMAL.match(has), _DECIMAL.match(needs)
    if one and other:
        return one[2] == other[2] and int(one[1]) < int(other[1])
    return (has, needs) in _WIDER
