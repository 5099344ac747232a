"""Asking for a backfill: what can't be done is refused at once, and again where it is carried out.

Whoever may write in the coordination schema may ask for one, and its condition runs with the rights
of our role at the source: so it is one of the table's own columns and of Postgres's own immutable
operators and functions, without subqueries.
"""

from __future__ import annotations

from psycopg import sql

from cdc_assets.errors import ConditionProblem, ConfigurationError, TableProblem
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log import backfills as record
from cdc_assets.log.backfills import Backfill
from cdc_assets.materializer.corrections import refuse_uncorrectable
from cdc_assets.messages.texts import copy_anew
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.ctid import TID_RANGE_SCANS, CtidRange
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.row_filters import refuse_text
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.source import planning
from cdc_assets.verify.rows import comparable


def request(
    pipeline: Pipeline,
    table: TableId,
    predicate: str | None = None,
    *,
    replaces: bool = False,
    deletes: bool = False,
    by: str = "cdc-assets backfill",
) -> Backfill:
    """Record a backfill of the rows that ``predicate`` has, of all without one.

    ``replaces``: rows that only the lake has are removed; ``deletes``: that alone. Raises
    TableProblem or ConfigurationError if it can't be done.
    """
    lake = comparable(pipeline, table)
    refuse_uncorrectable(lake)
    replaces = replaces or deletes
    if replaces and predicate is not None:
        raise ConfigurationError(
            "where and replace exclude each other: which rows only the lake has is known of the"
            " whole table alone.",
            "Leave one of them out.",
        )
    if replaces:
        refuse_masked_key(lake)
    with pipeline.connect_source("backfill") as source:
        if source.info.server_version < TID_RANGE_SCANS:
            raise TableProblem(
                table,
                "its Postgres reads the whole table for each range of its pages, before version 14",
                copy_anew(table),
            )
        if predicate is not None:
            try:
                understood(source, table, predicate)
            except ConditionProblem as problem:  # whoever asks has written it
                raise ConfigurationError(problem.what, problem.remedy) from problem
    if deletes:
        predicate = record.NO_ROWS
    return record.request(pipeline.store, table, predicate, replaces=replaces, by=by)


def refuse_masked_key(lake: LakeTable) -> None:
    """Raise TableProblem for a table none of whose keys would be found at the source."""
    if any(column.mask is not None for column in lake.key):
        raise TableProblem(
            lake.row.table,
            "its key is masked, so that its rows can't be looked up at the source",
            copy_anew(lake.row.table),
        )


# The chunk of a condition that an index serves: all pages at once.
WHOLE = CtidRange(0, None)
# An index serves a condition if finding its rows costs this share of reading the table, by the
# planner; and they are few enough for one transaction.
_SHARE, _FEW_ROWS = 0.1, 100_000


def is_served(source: Connection, lake: LakeTable, predicate: str) -> bool:
    """Whether the rows of a condition are found by an index, so that not all pages are read."""
    cost, rows = _estimated(source, lake, predicate)
    all_of_it, _ = _estimated(source, lake, "true")
    return rows <= _FEW_ROWS and cost <= _SHARE * all_of_it


def _estimated(source: Connection, lake: LakeTable, condition: str) -> tuple[float, int]:
    """What a query costs, and how many rows it has, by the planner."""
    query = sql.SQL("explain (format json) select * from {} where {}")
    row = source.execute(query.format(lake.table.rows, sql.SQL(condition))).fetchone()
    assert row is not None
    found = row[0][0]["Plan"]
    return float(found["Total Cost"]), int(found["Plan Rows"])


def understood(source: Connection, table: TableId, predicate: str) -> str:
    """The condition as Postgres writes it. Raises ConditionProblem for what we don't run."""
    try:
        refuse_text(predicate)
    except ValueError as error:
        raise ConditionProblem(table, f"where: {error}") from error
    found = planning.understood(source, table, predicate)
    if found.mutable:
        raise ConditionProblem(
            table,
            f"where: {predicate} calls a function whose result may change, such as now()",
            "Compare with constants, like '2026-01-31'::timestamptz.",
        )
    return found.text
