"""Taking a lake table from one relation to the next, in place where that is right.

Each statement is a commit of its own, so a writer that dies between two leaves a table that is
altered half-way. The remaining steps are found by field ids and attribute numbers, which renames
keep (``lake.columns``): every step is done once, however often it is tried. The steps end before a
row of the new relation is merged; the cursor doesn't move with them.

A dropped column stays, NULL in every row that is written from then on. In an added column older
rows get the values that the source shows (``fill``). Changes that can't be followed are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import SparkSession

from cdc_assets.config.tables import ColumnsConfig
from cdc_assets.errors import TableProblem
from cdc_assets.lake.columns import PROPERTY, TableColumns
from cdc_assets.lake.spark.sql import listed, ticked
from cdc_assets.lake.standing import park
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.relation import Told
from cdc_assets.log.store import LogStore
from cdc_assets.materializer.schema.columns import Refused, next_columns
from cdc_assets.materializer.schema.fill import fill
from cdc_assets.materializer.schema.statements import alterations
from cdc_assets.messages.texts import command
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.types import mapping
from cdc_assets.readiness.source.enrolment import refuse_made_otherwise

logger = logging.getLogger(__name__)


def current(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, state: LakeState, loaded: Table
) -> tuple[LakeTable, bool, Table]:
    """``lake`` as the table itself describes it; an alteration that a dead writer began is ended.

    True if that needs the relation: :func:`follow` does it then. Columns that somebody else renamed
    get their names back. Also returns the table as it is then; ``loaded`` is as it was.

    Parks the table and raises TableProblem if its columns can't be those of its rows: one was
    dropped, the table was set back to before a schema change, or it was made with another
    configuration.
    """
    store, altered = pipeline.store, False
    described = lake.recorded(loaded)
    refuse_made_otherwise(store, lake.row, lake.config)
    if (why := reconfigured(described, lake.table.columns)) is not None:
        park(store, lake, why)
    if state.sequence < described.since:
        park(store, lake, "its lake table was set back to before its columns were changed")
    row = replace(lake.row, columns=described.columns, key_columns=described.key)
    found = replace(lake, row=row)
    if not described.altering:
        described, altered = _restored(store, session, found, described, loaded.schema())
    if described.fill:
        _filled(pipeline, session, found, state, described)
    if row != lake.row:
        store.set_columns(row)
    now = found.loaded() if altered or described.fill else loaded
    return found, described.altering, now


def reconfigured(described: TableColumns, rules: ColumnsConfig) -> str | None:
    """How the configuration differs from that of the table's creation, None if it doesn't."""
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
    store = pipeline.store
    try:
        described, after = next_columns(pipeline, lake, told)
        loaded = lake.load()
        assert loaded is not None
        statements = alterations(after, loaded.schema(), described.fields)
    except Refused as refused:
        _park(store, lake, refused)
    if statements or described.fill:
        # A writer that finds the table half-way sees that the change is ours. The field ids are
        # recorded now: until here names may have identified the columns, and names are to change.
        known = lake.recorded(loaded)
        begun = replace(known, fields=described.fields, altering=True)
        if begun != known:
            _describe(store, session, lake, begun)
    for statement in statements:
        _alter(store, session, lake, statement)
    loaded = lake.load()
    assert loaded is not None
    ids = {f.name: f.field_id for f in loaded.schema().fields}
    fields = {**described.fields, **{c.source.number: ids[c.name] for c in after.columns}}
    described = replace(described, fields=fields, since=state.sequence)
    _describe(store, session, after, described)
    if described.fill:
        _filled(pipeline, session, after, state, described)
    store.set_columns(after.row)
    return after


# --- parts ---


def _park(store: LogStore, lake: LakeTable, refused: Refused) -> NoReturn:
    if not refused.remedy:
        park(store, lake, refused.what)
    way_out = f"{refused.remedy} Then run: {command('resync', lake.row.table)}"
    problem = TableProblem(lake.row.table, refused.what, way_out)
    store.park(lake.row.table, problem.reason, lake.row.epoch)
    raise problem from refused


def _alter(store: LogStore, session: SparkSession, lake: LakeTable, statement: str) -> None:
    """One step. Raises psycopg.OperationalError if the session with the writer lock is lost.

    The table itself wouldn't refuse a late statement of a writer that was taken for dead.
    """
    store.server_now()
    session.sql(f"alter table {lake.sql_name} {statement}")


def _describe(
    store: LogStore, session: SparkSession, lake: LakeTable, described: TableColumns
) -> None:
    properties = listed({PROPERTY: described.dump()})
    _alter(store, session, lake, f"set tblproperties ({properties})")


def _filled(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    described: TableColumns,
) -> None:
    fill(pipeline, session, lake, state, described.fill)
    done = replace(described, fill={}, since=lake.state().sequence)
    _describe(pipeline.store, session, lake, done)


def _restored(
    store: LogStore,
    session: SparkSession,
    lake: LakeTable,
    described: TableColumns,
    schema: Schema,
) -> tuple[TableColumns, bool]:
    """Undo foreign renames of columns; record the columns' field ids. True if anything was done."""
    ids = {f.name: f.field_id for f in schema.fields}
    fields = described.fields or lake.described(schema).fields
    try:
        for name in [*(c.name for c in lake.columns if c.source.number not in fields), *lake.extra]:
            if name not in ids and name not in lake.table.metadata:
                raise Refused(f"its lake table has no column {name} any more")
        statements = alterations(lake, schema, fields)
    except Refused as refused:
        if not refused.remedy:
            refused = Refused(f"{refused.what} (somebody altered it)")
        _park(store, lake, refused)
    for statement in statements:
        logger.warning(
            "%s: columns.rename was changed, or somebody altered its lake table: %s",
            lake.row.table,
            statement,
        )
        _alter(store, session, lake, statement)
    # After those: a column that had a name of metadata's may have another one now.
    added = _added(lake, ids, fields)
    for statement in added:
        _alter(store, session, lake, statement)
    if fields != described.fields:
        described = replace(described, fields=fields)
        _describe(store, session, lake, described)
        return described, True
    return described, bool(statements or added)


def _added(lake: LakeTable, ids: Mapping[str, int], fields: Mapping[int, int]) -> list[str]:
    """The statements that add metadata's columns; ``ids`` are the table's fields as it was."""
    owned, found = {*fields.values()}, list[str]()
    live = {fields.get(column.source.number) for column in lake.columns}
    for name in lake.table.metadata:
        there = ids.get(name)
        if there in owned - live:  # it has the values of a column that the source has dropped
            found.append(f"rename column {ticked(name)} to {ticked(f'{name}__dropped_{there}')}")
        if there is None or there in owned:
            found.append(f"add column {ticked(name)} {lake.extra[name]}")
    return found
