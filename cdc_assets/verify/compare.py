"""Comparing every row of source and lake at one LSN.

A temporary slot gives a consistent point c and a snapshot that shows exactly what committed before
it. The log is applied up to c and no further (it is cut by commit LSN), under the tables' writer
locks. Then both sides must hold the same rows, however busy the source is.

A side's row becomes its key and a digest of its comparable text; a row that doesn't occur equally
often on both sides differs. That finds missing, surplus, changed and duplicate rows in one pass.
TRUNCATE isn't MVCC-safe: a table that gets a new file while it is read is compared again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.config import DELETED_AT
from cdc_assets.errors import CdcError, TableProblem
from cdc_assets.materializer.drain import Look, drain
from cdc_assets.materializer.relation import Told, told_by_catalog
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import Heap, attributes, describe, heaps
from cdc_assets.postgres.connect import uri
from cdc_assets.postgres.ctid import plan_chunks
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.replication import create_slot, export_snapshot
from cdc_assets.snapshot.reader import TextPlan, read_texts, share
from cdc_assets.spark.tables import LakeTable, ticked
from cdc_assets.verify.canonical import lake_expression, source_expression

# As many differing keys as a person will read; the count is of all.
SHOWN_KEYS = 20
# Who truncates a table more often than this while it is read has to be asked to pause.
ROUNDS = 10
REWRITTEN = "it was truncated or rewritten while it was read"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing one table found. ``keys`` are some of the rows that differ."""

    table: TableId
    lsn: Lsn
    source_rows: int
    lake_rows: int
    differing: int
    keys: tuple[str, ...]
    problem: str | None
    seconds: float

    @property
    def equal(self) -> bool:
        return self.differing == 0 and self.problem is None


def verify(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Sequence[TableId],
    flush_to: Callable[[Lsn], None],
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Compare ``tables`` at one LSN.

    ``flush_to`` returns once everything that committed below an LSN is registered. A table that
    can't be compared (its copy isn't complete, it is parked) is reported with its problem. One that
    is truncated or rewritten while it is read is compared again, at a later LSN.
    """
    store = pipeline.store
    locks = [f"write:{table}" for table in sorted(tables)]  # in one order: no two wait in a circle
    for lock in locks:
        store.lock(lock)
    try:
        found: dict[TableId, Comparison] = {}
        left = list(tables)
        for _ in range(ROUNDS):
            found |= {c.table: c for c in _round(pipeline, session, left, flush_to, on_progress)}
            left = [table for table in left if found[table].problem == REWRITTEN]
            if not left:
                break
        return [found[table] for table in tables]
    finally:
        for lock in reversed(locks):
            store.unlock(lock)


def _round(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Sequence[TableId],
    flush_to: Callable[[Lsn], None],
    on_progress: Callable[[str], None],
) -> list[Comparison]:
    """One consistent point: read the source's side of every table under it, then compare."""
    shapes = _shapes(pipeline, tables)
    name = f"{pipeline.config.slot[:48]}_verify_{uuid.uuid4().hex[:8]}"
    follows = pipeline.config.snapshot.mode != "snapshot_only"
    slot = (
        create_slot(pipeline.source_dsn, name, temporary=True)
        if follows
        else export_snapshot(pipeline.source_dsn)
    )
    with ExitStack() as cleanup:
        cleanup.callback(slot.connection.finish)
        point = slot.consistent_point
        on_progress(f"comparing at {point}; reading the source")
        sides: dict[TableId, _Side | TableProblem] = {}
        for table in tables:
            try:
                lake = _comparable(pipeline, table)
                texts = _source_texts(pipeline, session, lake, slot.snapshot_name).persist()
                cleanup.callback(texts.unpersist)
                texts.count()
                sides[table] = _Side(texts, Look(shapes[table].told, point) if follows else None)
            except TableProblem as problem:
                sides[table] = problem
        for table, after in _shapes(pipeline, tables).items():
            # A snapshot doesn't protect from TRUNCATE: the table looks empty to older ones, too.
            # Nor from ALTER TABLE: a column is found by the name that it has now.
            if after != shapes[table]:
                sides[table] = TableProblem(table, REWRITTEN)
        if follows:
            flush_to(point)
        found = []
        for table, read in sides.items():
            comparison = _compare(pipeline, session, table, point, read)
            found.append(comparison)
            on_progress(
                f"{table}: {comparison.source_rows:,} rows, {comparison.differing:,} differ"
                f" ({comparison.seconds:.1f} s) {comparison.problem or ''}".rstrip()
            )
        return found


@dataclass(frozen=True, slots=True)
class _Shape:
    """The heaps of a table with their files, and its columns; a table that is gone has none."""

    heaps: frozenset[Heap]
    told: Told


@dataclass(frozen=True, slots=True)
class _Side:
    """The source's rows: their columns as text, named ``t`` and the attribute number.

    ``look``: how the catalog told them, for what the log hasn't told by then.
    """

    texts: DataFrame
    look: Look | None


def _shapes(pipeline: Pipeline, tables: Sequence[TableId]) -> dict[TableId, _Shape]:
    """TRUNCATE, CLUSTER and VACUUM FULL change a table's files, ALTER TABLE its columns."""
    found = dict.fromkeys(tables, _Shape(frozenset(), Told("n", ())))
    with pipeline.connect_source("verify") as source:
        for row in pipeline.store.tables():
            with suppress(TableProblem):
                if row.table in found:
                    parts = heaps(source, row.table, describe(source, row.table).oid)
                    found[row.table] = _Shape(
                        frozenset(replace(heap, pages=0) for heap in parts),
                        told_by_catalog(source, row, pipeline.config.publication),
                    )
    return found


def _comparable(pipeline: Pipeline, table: TableId) -> LakeTable:
    row = pipeline.store.table(table)
    if row is None or row.state in ("waiting", "copying"):
        raise TableProblem(table, "its copy isn't complete", "Run cdc-assets snapshot first.")
    if row.state == "parked":
        raise TableProblem(table, row.reason or "it is parked")
    return LakeTable(pipeline.config, pipeline.config.table(table), row)


def _compare(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    point: Lsn,
    source_side: _Side | TableProblem,
) -> Comparison:
    began = time.monotonic()

    def result(
        source: int, lake: int, differing: int, keys: Sequence[str], why: str | None = None
    ) -> Comparison:
        return Comparison(
            table, point, source, lake, differing, tuple(keys), why, time.monotonic() - began
        )

    if isinstance(source_side, TableProblem):
        why = REWRITTEN if source_side.what.endswith(REWRITTEN) else str(source_side)
        return result(0, 0, 0, [], why)
    try:
        drain(pipeline, session, table, below=point, look=source_side.look)
        lake = _comparable(pipeline, table)
        numbers = {f"t{c.source.number}" for c in lake.columns}
        if source_side.look is not None and numbers != set(source_side.texts.columns):
            return result(0, 0, 0, [], REWRITTEN)  # its columns aren't those that were read
        lake_side = _lake_side(session, lake)
        read = _digested(
            source_side.texts,
            lake,
            [source_expression(c, f"t{c.source.number}") for c in lake.columns],
        )
    except CdcError as problem:
        return result(0, 0, 0, [], str(problem))
    both = read.withColumns({"source": F.lit(1), "lake": F.lit(0)}).unionByName(
        lake_side.withColumn("source", F.lit(0))
    )
    grouped = (
        both.groupBy("key", "digest")
        .agg(F.sum("source").alias("source"), F.sum("lake").alias("lake"))
        .withColumn("balance", F.col("source") - F.col("lake"))
        .persist()
    )
    try:
        totals = grouped.agg(
            F.coalesce(F.sum("source"), F.lit(0)),
            F.coalesce(F.sum("lake"), F.lit(0)),
            F.count_if(F.col("balance") != 0),
        ).collect()[0]
        if not int(totals[2]):
            return result(int(totals[0]), int(totals[1]), 0, [])
        odd = grouped.where("balance != 0")
        shown = (
            odd.groupBy("key")
            .agg(F.sum("source").alias("source"), F.sum("lake").alias("lake"))
            .orderBy("key")
            .limit(SHOWN_KEYS)
            .collect()
        )
        keys = [f"{r.key} (source {r.source}, lake {r.lake})" for r in shown]
        differing = odd.select("key").distinct().count()
        return result(int(totals[0]), int(totals[1]), differing, keys)
    finally:
        grouped.unpersist()


def _digested(
    frame: DataFrame, lake: LakeTable, expressions: Sequence[str], *keep: str
) -> DataFrame:
    """``key`` (a readable text) and ``digest`` of each row, from one text expression a column."""
    texts = frame.select(*(F.expr(e).alias(f"c{i}") for i, e in enumerate(expressions)), *keep)
    keys = [i for i, c in enumerate(lake.columns) if c.is_key] or list(range(len(lake.columns)))
    everything = {"ignoreNullFields": "false"}
    return texts.select(
        F.to_json(
            F.struct(*(F.col(f"c{i}").alias(lake.columns[i].name) for i in keys)), everything
        ).alias("key"),
        F.md5(F.to_json(F.struct(*(f"c{i}" for i in range(len(expressions)))), everything)).alias(
            "digest"
        ),
        *keep,
    )


def _lake_side(session: SparkSession, lake: LakeTable) -> DataFrame:
    """The rows that the source should have; ``lake``: how often each."""
    rows = _present(session.table(lake.sql_name), lake)
    return _digested(rows, lake, [lake_expression(c) for c in lake.columns], "lake")


def _present(rows: DataFrame, lake: LakeTable) -> DataFrame:
    """The state that the table's mode has as of its newest change, with how often a row counts."""
    if lake.row.mode == "soft_delete":
        rows = rows.where(F.col(DELETED_AT).isNull())
    if lake.row.mode != "append":
        return rows.withColumn("lake", F.lit(1))
    # What was copied has no _xid, and is older than every change.
    age = F.struct(F.col("_xid").isNotNull().alias("changed"), F.col("_lsn").alias("lsn"))
    emptied = rows.where("_op = 'T'").agg(F.max("_lsn")).collect()[0][0]
    if emptied is not None:
        rows = rows.where(F.col("_xid").isNotNull() & (F.col("_lsn") > emptied))
    if not lake.key:
        return rows.withColumn("lake", F.when(F.col("_op") == "D", -1).otherwise(1))
    whole = F.struct(*(F.col(ticked(name)) for name in rows.columns))
    newest = rows.groupBy(*(ticked(c.name) for c in lake.key)).agg(F.max_by(whole, age).alias("r"))
    return newest.select("r.*").where("_op <> 'D'").withColumn("lake", F.lit(1))


def _source_texts(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, snapshot_name: str
) -> DataFrame:
    config, excluded = pipeline.config, lake.table.columns.exclude
    with pipeline.connect_source("verify") as source:
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
            for heap in found
            for chunk in plan_chunks(heap.pages, config.table(lake.row.table).chunk_pages)
        ]
    tasks = min(config.snapshot.max_parallel_chunks, max(1, len(queries)))
    plan = TextPlan(
        uri(pipeline.source_dsn, f"cdc_assets {config.name} verify"),
        snapshot_name,
        share(queries, tasks),
        tuple(f"t{a.number}" for a in columns),
    )
    return read_texts(session, plan)
