"""Counts of values that a lake table can't hold: infinite, BC, NaN, many-dimensional.

They are NULL or clamped in the lake, by the column's policy, and an array that doesn't begin at 1
does so there; a person should know. After a copy the source is asked once, with a count over the
table; from then on every staged change is looked at once. The numbers are totals: a value that is
gone again counts. No merge waits for this.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.log.batch import Window, take
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry, LogStore
from cdc_assets.maintenance.lost_care import surviving
from cdc_assets.materializer.events import events
from cdc_assets.materializer.fold import JSON, text_struct
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.publication.row_filters import and_filter
from cdc_assets.verify.source import parts, whole

# The log of one look: a backlog of days is looked at in several.
_LOOK_BYTES = 256 * 10**6
_CALENDAR = ("date", "timestamp_ntz", "timestamp")
_ARRAY = re.compile(r"\Aarray<(.+)>\Z")


def doubtful(lake: LakeTable) -> list[LakeColumn]:
    """The columns that may lose something, even if only where their arrays begin."""
    return [
        column
        for column in lake.columns
        if column.mapping.fits is not None
        and not column.is_key
        and (column.policy != "fail" or _ARRAY.match(column.mapping.lake))
    ]


def _lossy(lake_type: str) -> bool:
    return lake_type in _CALENDAR or lake_type.startswith("decimal(")


def unrepresentable(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable
) -> Mapping[str, int]:
    """By column, how many values were lost so far; looks at what is new since the last time."""
    store, columns = pipeline.store, doubtful(lake)
    row = lake.row
    if not columns or row.snapshot_lsn is None:
        return {}
    offset, lost = _known(store, lake)
    if offset is None:
        with pipeline.connect_source("values", reads=True) as source:
            lost = _at_source(source, lake, columns, row_filter(source, pipeline.config, row))
        offset = 0
    names = {column.name for column in columns}
    new = store.entries(row.table, offset)
    entries = take(new, _LOOK_BYTES, math.inf) if new else []
    if entries:
        window, storage = Window(offset, row.snapshot_lsn), Storage.of(pipeline.config.s3)
        tasks = pipeline.config.spark.cores
        with surviving(store, row.table, "a count of its values"):
            lost += Counter(_in_log(session, entries, window, storage, columns, tasks))
        offset = entries[-1].end_offset
    lost = Counter({name: count for name, count in lost.items() if count and name in names})
    _remember(store, lake, offset, lost)
    return dict(lost)


def _known(store: LogStore, lake: LakeTable) -> tuple[int | None, Counter[str]]:
    found = store.connection.execute(
        'select "offset", lost from unrepresentable'
        " where source = %s and table_name = %s and epoch = %s",
        (store.source, str(lake.row.table), lake.row.epoch),
    ).fetchone()
    return (int(found[0]), Counter(found[1])) if found is not None else (None, Counter())


def _remember(store: LogStore, lake: LakeTable, offset: int, lost: Mapping[str, int]) -> None:
    store.connection.execute(
        'insert into unrepresentable (source, table_name, epoch, "offset", lost)'
        " values (%s, %s, %s, %s, %s) on conflict (source, table_name) do update"
        ' set epoch = excluded.epoch, "offset" = excluded."offset", lost = excluded.lost',
        (store.source, str(lake.row.table), lake.row.epoch, offset, json.dumps(lost)),
    )


def _at_source(
    source: psycopg.Connection[Any],
    lake: LakeTable,
    columns: Sequence[LakeColumn],
    where: str | None,
) -> Counter[str]:
    """Counted by range: one count of all would hold the table's lock, and vacuum, throughout."""
    counts = sql.SQL(", ").join(
        sql.SQL("count(*) filter (where {})").format(_odd_at_source(column)) for column in columns
    )
    lost = Counter[str]()
    found = parts(source, lake.row.oid, only=lake.table.only)
    for pages in whole(found, lake.table.chunk_pages):
        query = sql.SQL("select {} from {} where {}{}").format(
            counts, lake.table.rows, sql.SQL(pages.predicate), and_filter(where)
        )
        counted = source.execute(query).fetchone()
        assert counted is not None  # an aggregate without grouping has one row
        lost.update(dict(zip((column.name for column in columns), map(int, counted), strict=True)))
    return lost


def _odd_at_source(column: LakeColumn) -> sql.Composable:
    name = sql.Identifier(column.source.name)
    array = _ARRAY.match(column.mapping.lake)
    if array is None:
        return _odd_scalar(name, column.mapping.lake)
    odd = sql.SQL(
        "(coalesce(pg_catalog.array_ndims({0}), 1) <> 1"
        " or coalesce(pg_catalog.array_lower({0}, 1), 1) <> 1)"
    ).format(name)
    if _lossy(array[1]):
        odd += sql.SQL(" or exists (select from pg_catalog.unnest({}) as e(v) where {})").format(
            name, _odd_scalar(sql.SQL("e.v"), array[1])
        )
    return odd


def _odd_scalar(value: sql.Composable, lake_type: str) -> sql.Composable:
    if lake_type.startswith("decimal("):
        return sql.SQL("{} = 'NaN'").format(value)  # numeric(p, s) has no infinity
    # As text: the end of the calendar has to be compared in UTC, wherever the session is.
    zone = "+00" if lake_type == "timestamp" else ""
    begin, end = f"0001-01-01 00:00:00{zone}", f"10000-01-01 00:00:00{zone}"
    if lake_type == "date":
        begin, end = "0001-01-01", "10000-01-01"
    return sql.SQL("({0} < {1} or {0} >= {2})").format(value, sql.Literal(begin), sql.Literal(end))


def _in_log(
    session: SparkSession,
    entries: Sequence[LogEntry],
    window: Window,
    storage: Storage,
    columns: Sequence[LakeColumn],
    tasks: int,
) -> dict[str, int]:
    rows = events(session, entries, window, storage, tasks).where("op in ('I', 'U')")
    named = [column.source.name for column in columns]
    texts = rows.select(F.from_json("data", text_struct(named), JSON).alias("row")).select(
        *(F.col(f"row.{ticked(name)}").alias(f"t{i}") for i, name in enumerate(named))
    )
    odd = [f"not {c.mapping.fits(f't{i}')}" for i, c in enumerate(columns) if c.mapping.fits]
    found = texts.agg(*(F.count_if(F.expr(each)) for each in odd))
    counts = found.collect()[0]
    return {column.name: int(counts[i]) for i, column in enumerate(columns)}
