"""The values that older rows show in an added column: Postgres never sends them.

A constant default is taken from the catalog. The values that a volatile one gave to each row are
read again from the source, by key. Either way the lake's rows are written anew in one commit, which
can be repeated with the same result: no row of the new relation is merged before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.lake.publish import published
from cdc_assets.lake.spark.session import summary
from cdc_assets.lake.spark.sql import ours, ticked
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.lake.values import naming_refusals, of_later, typed
from cdc_assets.materializer.reread import column_names, count_read, refuse_renamed
from cdc_assets.pins.reader import TextPlan, TextQuery, read_texts, share
from cdc_assets.pins.row_filter import row_filter
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import NO_FILE, check_oid, heaps
from cdc_assets.postgres.ctid import plan_chunks
from cdc_assets.postgres.publication.row_filters import and_filter
from cdc_assets.postgres.session.connect import uri
from cdc_assets.postgres.slots import export_snapshot
from cdc_assets.postgres.types import text_form


def fill(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    values: Mapping[int, str | None],
) -> None:
    """Write added columns' values into the existing rows, all anew, in one commit.

    ``values``: by attribute number, a text, or None where each row of the source has its own.
    ``state`` is the table's state before it is altered: raises Fenced if its rows have changed.
    """
    added = [c for c in lake.columns if c.source.number in values]
    if added and lake.has_rows(state):
        assert state.cursor is not None  # a table without a cursor gets no log applied
        with (
            naming_refusals(pipeline.store, lake),
            summary(session, lake.reached(state.cursor, state.foreign)),
            published(session, lake, state) as draft,
            ExitStack() as cleanup,
        ):
            filled = rows = session.table(draft.sql_name)
            # A delete has only a key, and a truncate no values.
            has_values = F.col("_op").isin("I", "U") if lake.row.mode == "append" else F.lit(True)
            for column in added:
                value = values[column.source.number]
                if value is not None:
                    literal = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
                    constant = F.expr(typed(column, literal))
                    filled = filled.withColumn(column.name, F.when(has_values, constant))
            again = [c for c in added if values[c.source.number] is None]
            if again:
                read = _read_again(pipeline, session, lake, again)
                cleanup.callback(read.unpersist)
                filled = _joined(filled, read, lake, again)
            filled = filled.select(*(ticked(name) for name in rows.columns))
            filled.writeTo(draft.sql_name).overwrite(F.lit(True))


def _joined(
    rows: DataFrame, read: DataFrame, lake: LakeTable, again: Sequence[LakeColumn]
) -> DataFrame:
    """``rows`` with the columns ``again`` from the row with the same key in ``read``."""
    condition = F.lit(True)
    for i, c in enumerate(lake.key):
        condition = condition & (rows[ticked(c.name)] == read[ours(f"k{i}")])
    both = rows.join(read, condition, "left")
    for i, c in enumerate(again):
        has_values = F.col("_op").isin("I", "U") if lake.row.mode == "append" else F.lit(True)
        both = both.withColumn(c.name, F.when(has_values, F.col(ours(f"v{i}"))))
    return both


def _read_again(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, again: Sequence[LakeColumn]
) -> DataFrame:
    """Key and some columns of every row of the source, as it is now.

    That may be later than the log's position; the changes in between are still to come. The table
    isn't whole before them: of a row whose key changes among them, the lake may have another one's
    value.
    """
    config, wanted = pipeline.config, [*lake.key, *again]
    slot = export_snapshot(pipeline.source_dsn)
    try:
        with pipeline.connect_source("schema", reads=True) as source:
            check_oid(source, lake.row.table, lake.row.oid)
            now = column_names(source, lake)
            listed = sql.SQL(", ").join(
                _text_of(now.get(c.source.number))
                + sql.SQL(" as {}").format(sql.Identifier(f"t{i}"))
                for i, c in enumerate(wanted)
            )
            masks = tuple((i, c.mask) for i, c in enumerate(wanted) if c.mask is not None)
            rows = and_filter(row_filter(source, config, lake.row))
            queries = [
                TextQuery(
                    sql.SQL("select {} from only {} where {}{}")
                    .format(
                        listed,
                        heap.id.identifier,
                        sql.SQL(chunk.predicate if heap.filenode != NO_FILE else "true"),
                        rows,
                    )
                    .as_string(source),
                    masks,
                )
                for heap in heaps(source, lake.row.table, lake.row.oid)
                for chunk in plan_chunks(heap.pages, lake.table.chunk_pages)
            ]
        tasks = min(config.snapshot.max_parallel_chunks, max(1, len(queries)))
        plan = TextPlan(
            uri(pipeline.source_dsn, f"cdc_assets {config.name} schema"),
            slot.snapshot_name,
            share(queries, tasks),
            tuple(f"t{i}" for i in range(len(wanted))),
        )
        keys = [ours(f"k{i}") for i in range(len(lake.key))]
        names = [*keys, *(ours(f"v{i}") for i in range(len(again)))]
        texts = read_texts(session, plan)
        for i, c in enumerate(lake.key):
            # The source may be ahead, and have a key that no row of the lake can have.
            if c.mapping.fits is not None:
                texts = texts.where(c.mapping.fits(f"t{i}"))
            texts = texts.where(f"{of_later(c, f't{i}')} is not null")
        read = texts.select(
            *(
                F.expr(of_later(c, f"t{i}")).alias(name)
                for i, (c, name) in enumerate(zip(wanted, names, strict=True))
            )
        )
        read = read.dropDuplicates(keys).persist()
        read.count()
        try:
            with pipeline.connect_source("schema") as source:
                refuse_renamed(source, lake, now)
                count_read(pipeline, source, lake)
        except BaseException:
            read.unpersist()
            raise
        return read
    finally:
        slot.connection.close()


def _text_of(name: str | None) -> sql.Composable:
    """A column in the text form that the log has; NULL for one that is gone."""
    return sql.SQL("null::text") if name is None else text_form(sql.Identifier(name))
