"""Reading rows again from the source, where neither the log nor the lake has a column's value.

That is the case only where a copy was resumed on another snapshot: a row moved into a chunk that
was copied already, and its update left a TOAST column out; or a row got another key before that
snapshot, under which the lake may hold whose key it is by now (invariant 8). The row is read as it
is *now*, which may be later than the log's position; the changes in between are still to come and
end with the same row. A row that is gone needs nothing: its delete is still to come. Until the log
is applied to where the rows were read the table isn't whole: its ``complete_lsn`` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from psycopg import sql

from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import attributes
from cdc_assets.postgres.replication import current_lsn
from cdc_assets.postgres.types import text_form
from cdc_assets.spark.tables import LakeColumn, LakeTable

Key = tuple[str | None, ...]
Reread = Callable[[Sequence[Key]], list[str]]


def _escaped(part: sql.Composable) -> sql.Composable:
    """A part of a query with parameters, where a percent sign is doubled."""
    return sql.SQL(part.as_string(None).replace("%", "%%"))


def _select(lake: LakeTable, now: Mapping[int, str]) -> sql.Composed:
    """One row by its key; ``now``: what the source calls its columns, which may be ahead."""

    def text(column: LakeColumn) -> sql.Composable:
        if column.source.number not in now:
            return sql.SQL("null")
        return _escaped(text_form(sql.Identifier(now[column.source.number])))

    return sql.SQL("select {} from {} where {}").format(
        sql.SQL(", ").join(text(c) for c in lake.columns),
        _escaped(lake.table.rows),
        sql.SQL(" and ").join(
            sql.SQL("{} = %s").format(
                _escaped(sql.Identifier(now.get(c.source.number, c.source.name)))
            )
            for c in lake.key
        ),
    )


def rereader(pipeline: Pipeline, lake: LakeTable) -> Reread:
    """A function from keys to rows, both in text form; rows are JSON as in ``_data``.

    The table is remembered as not whole before the moment that they were read at.
    """

    def reread(keys: Sequence[Key]) -> list[str]:
        found: list[str] = []
        names = [c.source.name for c in lake.columns]
        with pipeline.connect_source("repair", reads=True) as source, source.cursor() as cursor:
            now = {a.number: a.name for a in attributes(source, lake.row.oid) if not a.dropped}
            select = _select(lake, now)
            for key in keys:
                cursor.execute(select, key)
                found.extend(json.dumps(dict(zip(names, row, strict=True))) for row in cursor)
            pipeline.store.not_whole_before(lake.row, current_lsn(source))
        return found

    return reread
