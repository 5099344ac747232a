"""The two sides of a comparison, row by row: the source's as text, the lake's rendered as text.

A side's row becomes its key and a digest of its comparable text (``canonical``). What does not
belong: which rows are compared, and at which point (``compare``, ``sample``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from psycopg import sql
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.config_sections import DELETED_AT
from cdc_assets.errors import TableProblem
from cdc_assets.materializer.relation import Told, told_by_catalog
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import Heap, attributes, describe, heaps
from cdc_assets.postgres.connect import uri
from cdc_assets.postgres.ctid import CtidRange, plan_chunks
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.reader import TextPlan, read_texts, share
from cdc_assets.spark.tables import LakeTable, ticked
from cdc_assets.verify.canonical import lake_expression

Cut = Callable[[Sequence[Heap]], Iterable[tuple[Heap, CtidRange]]]
"""Which pages of a table's heaps are read."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The heaps of a table with their files, and its columns; a table that is gone has none."""

    heaps: frozenset[Heap]
    told: Told


def shapes(pipeline: Pipeline, tables: Sequence[TableId]) -> dict[TableId, Shape]:
    """TRUNCATE, CLUSTER and VACUUM FULL change a table's files, ALTER TABLE its columns."""
    found = dict.fromkeys(tables, Shape(frozenset(), Told("n", ())))
    with pipeline.connect_source("verify", reads=True) as source:
        for row in pipeline.store.tables():
            with suppress(TableProblem):
                if row.table in found:
                    parts = heaps(source, row.table, describe(source, row.table).oid)
                    found[row.table] = Shape(
                        frozenset(replace(heap, pages=0) for heap in parts),
                        told_by_catalog(source, row, pipeline.config.publication),
                    )
    return found


def comparable(pipeline: Pipeline, table: TableId) -> LakeTable:
    row = pipeline.store.table(table)
    if row is None or row.state in ("waiting", "copying"):
        raise TableProblem(table, "its copy isn't complete", "Run cdc-assets snapshot first.")
    if row.state == "parked":
        raise TableProblem(table, row.reason or "it is parked")
    return LakeTable(pipeline.config, pipeline.config.table(table), row)


def digested(
    frame: DataFrame, lake: LakeTable, expressions: Sequence[str], *keep: str
) -> DataFrame:
    """``key`` (a readable text), ``digest`` and ``cells`` of each row, from a text a column."""
    texts = frame.select(*(F.expr(e).alias(f"c{i}") for i, e in enumerate(expressions)), *keep)
    cells = [F.col(f"c{i}") for i in range(len(expressions))]
    everything = {"ignoreNullFields": "false"}
    return texts.select(
        as_key(lake, dict(enumerate(cells))).alias("key"),
        F.md5(F.to_json(F.struct(*cells), everything)).alias("digest"),
        F.array(*cells).alias("cells"),
        *keep,
    )


def as_key(lake: LakeTable, texts: Mapping[int, Column]) -> Column:
    """The readable text of a row's key; ``texts``: its columns' texts, by their place."""
    keys = [i for i, c in enumerate(lake.columns) if c.is_key] or list(range(len(lake.columns)))
    return F.to_json(
        F.struct(*(texts[i].alias(lake.columns[i].name) for i in keys)),
        {"ignoreNullFields": "false"},
    )


def lake_side(rows: DataFrame, lake: LakeTable, whole: DataFrame | None = None) -> DataFrame:
    """The rows that the source should have; ``lake``: how often each.

    ``rows`` are the lake table's, or all that it has of some keys: then ``whole`` is the table.
    """
    found = present(rows, lake, rows if whole is None else whole)
    return digested(found, lake, [lake_expression(c) for c in lake.columns], "lake")


def present(rows: DataFrame, lake: LakeTable, whole: DataFrame) -> DataFrame:
    """The state that the table's mode has as of its newest change, with how often a row counts."""
    if lake.row.mode == "soft_delete":
        rows = rows.where(F.col(DELETED_AT).isNull())
    if lake.row.mode != "append":
        return rows.withColumn("lake", F.lit(1))
    # What was copied has no _xid, and is older than every change.
    age = F.struct(F.col("_xid").isNotNull().alias("changed"), F.col("_lsn").alias("lsn"))
    emptied = whole.where("_op = 'T'").agg(F.max("_lsn")).collect()[0][0]
    if emptied is not None:
        rows = rows.where(F.col("_xid").isNotNull() & (F.col("_lsn") > emptied))
    if not lake.key:
        return rows.withColumn("lake", F.when(F.col("_op") == "D", -1).otherwise(1))
    names = [c.name for c in lake.columns] + list(lake.extra)
    newest = rows.groupBy(*(F.col(ticked(c.name)) for c in lake.key)).agg(
        F.max_by(F.struct(*(F.col(ticked(name)) for name in names)), age).alias("r")
    )
    return newest.select("r.*").where("_op <> 'D'").withColumn("lake", F.lit(1))


def source_texts(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    snapshot_name: str,
    cut: Cut | None = None,
) -> DataFrame:
    """The source's rows under a snapshot, all or those of the pages that ``cut`` says.

    Their columns are text, named ``t`` and the attribute number.
    """
    config, excluded = pipeline.config, lake.table.columns.exclude
    with pipeline.connect_source("verify", reads=True) as source:
        found = heaps(source, lake.row.table, lake.row.oid)
        told = told_by_catalog(source, lake.row, config.publication)
        names = {c.name for c in told.columns} - set(excluded)
        columns = [a for a in attributes(source, lake.row.oid) if a.name in names and not a.dropped]
        listed = sql.SQL(", ").join(
            # format('%s') calls the type's output function: the very text that the log has.
            sql.SQL("case when {0} is not null then pg_catalog.format('%s', {0}) end").format(
                sql.Identifier(a.name)
            )
            + sql.SQL(" as {}").format(sql.Identifier(f"t{a.number}"))
            for a in columns
        )
        queries = [
            sql.SQL("select {} from only {} where {}")
            .format(listed, heap.id.identifier, sql.SQL(chunk.predicate))
            .as_string(source)
            for heap, chunk in (
                cut(found)
                if cut is not None
                else (
                    (heap, chunk)
                    for heap in found
                    for chunk in plan_chunks(heap.pages, config.table(lake.row.table).chunk_pages)
                )
            )
        ]
    tasks = min(config.snapshot.max_parallel_chunks, max(1, len(queries)))
    plan = TextPlan(
        uri(pipeline.source_dsn, f"cdc_assets {config.name} verify"),
        snapshot_name,
        share(queries, tasks),
        tuple(f"t{a.number}" for a in columns),
    )
    return read_texts(session, plan)
