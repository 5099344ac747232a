"""The two sides of a comparison, row by row: a key, and a digest of its comparable text.

``canonical`` makes the texts, ``source`` reads the source; ``compare``, ``sample`` and ``point``
decide which rows are compared, and at which point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_assets.config.tables import DELETED_AT
from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.sql import ours, ticked
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.log.relation import Told, told_by_catalog
from cdc_assets.log.states import TableState
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import Heap, describe, heaps
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.source.enrolment import made_otherwise
from cdc_assets.verify.canonical import comparable_text, lake_text, source_text

TIMES, _NEWEST = ours("times"), ours("newest")


@dataclass(frozen=True, slots=True)
class Shape:
    """The heaps of a table with their files, and its columns; a table that is gone has none."""

    heaps: frozenset[Heap]
    told: Told


def shapes(pipeline: Pipeline, tables: Sequence[TableId]) -> dict[TableId, Shape]:
    """Shapes by table. TRUNCATE, CLUSTER, VACUUM FULL change the files, ALTER TABLE the columns."""
    found = dict.fromkeys(tables, Shape(frozenset(), Told("n", ())))
    with pipeline.connect_source("verify", reads=True) as source:
        for row in pipeline.store.tables():
            with suppress(TableProblem):
                if row.table in found:
                    parts = heaps(source, row.table, describe(source, row.table).oid)
                    found[row.table] = Shape(
                        frozenset(parts),
                        told_by_catalog(source, row, pipeline.config.publication),
                    )
    return found


def comparable(pipeline: Pipeline, table: TableId) -> LakeTable:
    row = pipeline.store.table(table)
    if row is None or row.state in (TableState.WAITING, TableState.COPYING):
        raise TableProblem(table, "its copy isn't complete", "Run cdc-assets snapshot first.")
    if row.state == TableState.PARKED:
        raise TableProblem(table, row.reason or "it is parked")
    if (found := made_otherwise(row, pipeline.config)) is not None:  # nobody parks to look
        raise TableProblem(table, f"{found.code}: it was copied with other masks", found.remedy)
    return LakeTable(pipeline.config, pipeline.config.table(table), row)


@dataclass(frozen=True, slots=True)
class Beside:
    """A lake table as of a snapshot, to be compared with its source.

    ``columns``: those that the source has, each with its actual type in the lake. ``others``: the
    lake's columns that come neither from the source nor from the table's mode.
    """

    lake: LakeTable
    rows: DataFrame
    columns: tuple[tuple[LakeColumn, T.DataType], ...]
    others: tuple[str, ...]

    @property
    def told_apart(self) -> tuple[int, ...]:
        """The positions of the columns that identify a row: the key's; else all."""
        keyless = not self.lake.key
        return tuple(i for i, (column, _) in enumerate(self.columns) if keyless or column.is_key)


def loses(column: LakeColumn, kind: T.DataType) -> bool:
    """Whether the source's type has values that have no form in the lake's type."""
    return source_text(column.name, column.source.type, kind, column.policy).lost is not None


def as_of(session: SparkSession, lake: LakeTable, snapshot_id: int | None) -> Beside:
    """The rows of a snapshot in the columns of now, as readers see them.

    Raises TableProblem if the lake table lacks a column that the source has.
    """
    now = session.table(lake.sql_name)
    if lacking := [c.name for c in lake.columns if c.name not in now.columns]:
        raise TableProblem(
            lake.row.table,
            f"its lake table lacks {', '.join(lacking)}, which the source has"
            f" (it has {', '.join(now.columns)})",
            "If columns.rename was changed since a table was copied that no merge reaches"
            " (snapshot_only), or another writer renamed or dropped it: put it back, or resync the"
            " table.",
        )
    rows = now if snapshot_id is None else _rows_of(session, lake, snapshot_id, now.schema)
    types = {field.name: field.dataType for field in now.schema.fields}
    columns = tuple((column, types[column.name]) for column in lake.columns)
    ours = {column.name for column in lake.columns} | set(lake.extra)
    return Beside(lake, rows, columns, tuple(name for name in now.columns if name not in ours))


def _rows_of(
    session: SparkSession, lake: LakeTable, snapshot_id: int, now: T.StructType
) -> DataFrame:
    """Spark reads a snapshot in the columns of its time; a field's id doesn't change."""
    loaded = lake.load()
    snapshot = loaded.snapshot_by_id(snapshot_id) if loaded is not None else None
    if loaded is None or snapshot is None or snapshot.schema_id is None:
        raise TableProblem(lake.row.table, "the snapshot that is compared is gone; try again")
    names = {f.field_id: f.name for f in loaded.schemas()[snapshot.schema_id].fields}
    ids = {f.name: f.field_id for f in loaded.schema().fields}
    then = session.sql(f"select * from {lake.sql_name} version as of {snapshot_id}")

    def column(field: T.StructField) -> Column:
        name = names.get(ids.get(field.name, 0))
        value = F.lit(None) if name is None else F.col(ticked(name))
        return value.cast(field.dataType).alias(field.name)

    return then.select(*map(column, now.fields))


def source_side(texts: DataFrame, beside: Beside) -> DataFrame:
    """The source's rows, from the texts that it prints (columns ``t`` and the attribute number)."""
    return digested(
        texts, beside.lake, [comparable_text(f"t{c.source.number}", k) for c, k in beside.columns]
    )


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


def lake_side(beside: Beside, some: DataFrame | None = None) -> DataFrame:
    """The rows that the source should have; column ``lake``: how often each.

    ``some``: all rows that the lake table has of some keys, instead of all rows.
    """
    found = present(beside.rows if some is None else some, beside.lake, beside.rows)
    made = digested(found, beside.lake, lake_expressions(beside), TIMES)
    return made.withColumnRenamed(TIMES, "lake")


def lake_cells(beside: Beside, names: Sequence[str]) -> DataFrame:
    """The rows that the source should have, as texts called ``names``; ``lake``: how often each.

    NULL where there are more names than columns.
    """
    found = present(beside.rows, beside.lake, beside.rows)
    expressions = lake_expressions(beside)
    nothing = ["cast(null as string)"] * (len(names) - len(expressions))
    cells = zip(names, [*expressions, *nothing], strict=True)
    times = F.col(TIMES).cast("long").alias("lake")
    return found.select(times, *(F.expr(cell).alias(name) for name, cell in cells))


def lake_expressions(beside: Beside) -> list[str]:
    """The comparable text of each of the lake's columns."""
    return [lake_text(ticked(column.name), kind) for column, kind in beside.columns]


def present(rows: DataFrame, lake: LakeTable, whole: DataFrame) -> DataFrame:
    """The rows that the table shows now, by its mode; column TIMES: how often a row counts."""
    if lake.row.mode == "soft_delete":
        rows = rows.where(F.col(DELETED_AT).isNull())
    if lake.row.mode != "append":
        return rows.withColumn(TIMES, F.lit(1))
    # What was copied has no _xid, and is older than every change.
    age = F.struct(F.col("_xid").isNotNull().alias("changed"), F.col("_lsn").alias("lsn"))
    emptied = whole.where("_op = 'T'").agg(F.max("_lsn")).collect()[0][0]
    if emptied is not None:
        rows = rows.where(F.col("_xid").isNotNull() & (F.col("_lsn") > emptied))
    if not lake.key:
        return rows.withColumn(TIMES, F.when(F.col("_op") == "D", -1).otherwise(1))
    names = [c.name for c in lake.columns] + list(lake.extra)
    newest = rows.groupBy(*(F.col(ticked(c.name)) for c in lake.key)).agg(
        F.max_by(F.struct(*(F.col(ticked(name)) for name in names)), age).alias(_NEWEST)
    )
    return newest.select(f"{_NEWEST}.*").where("_op <> 'D'").withColumn(TIMES, F.lit(1))
