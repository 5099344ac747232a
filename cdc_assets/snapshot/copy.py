"""Copying one table: waves of chunks, each landing with one commit that names them.

Keeps invariants 6, 9 and 10. The Iceberg table says which chunks it holds, so a run that was killed
costs at most the wave it was writing: the next one reads the table and goes on. A chunk is read
under the table's pin whoever reads it, so it doesn't matter which run copies which chunk. The
table's writer lock is held throughout.

A pin that was lost makes a new epoch (see ``postgres.pins``): its first wave removes the rows of
the old one, because a chunk of the old snapshot and one of the new don't fit together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.errors import Fenced, TableProblem
from cdc_assets.log.progress import ChunkProgress, chunks, mark_landed
from cdc_assets.pipeline import Pipeline, coordination_dsn
from cdc_assets.postgres.connect import uri
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.pins import Holder, join_pin
from cdc_assets.postgres.types import select_expression
from cdc_assets.snapshot.reader import ReadPlan, chunk_reader
from cdc_assets.spark.publish import published
from cdc_assets.spark.session import summary
from cdc_assets.spark.tables import CHUNKS, EPOCH, LakeTable, cursor_properties, ticked

logger = logging.getLogger(__name__)

# Chunks a commit, for each task: with 16 MB chunks a wave is some seconds of work, which is what a
# crash costs, and 2,000 chunks are at most some hundred commits.
CHUNKS_A_TASK = 8

_ARROW = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp_ntz": pa.timestamp("us"),
    "timestamp": pa.timestamp("us", "UTC"),
}
_CALENDAR = ("date", "timestamp_ntz", "timestamp")


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How far a table's copy is; ``landed`` are the chunks of the last wave, as measured."""

    table: TableId
    landed: tuple[ChunkProgress, ...]
    chunks_done: int
    chunks_total: int
    rows: int
    bytes: int
    seconds: float

    @property
    def sentence(self) -> str:
        """For a run's log: percent, rate and the time that remains."""
        rate = self.rows / self.seconds if self.seconds else 0.0
        left = self.chunks_total - self.chunks_done
        done_here = max(1, self.chunks_done)
        return (
            f"{self.table}: {self.chunks_done}/{self.chunks_total} chunks"
            f" ({100 * self.chunks_done / max(1, self.chunks_total):.0f} %), {self.rows:,} rows,"
            f" {self.bytes / 1e6:,.1f} MB, {rate:,.0f} rows/s,"
            f" about {self.seconds / done_here * left:,.0f} s left"
        )


def copy_table(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    *,
    only: Iterable[str] | None = None,
    on_progress: Callable[[CopyProgress], None] = lambda _: None,
) -> list[ChunkProgress]:
    """Land the outstanding chunks of ``table`` (``only``: of these keys) and return the whole plan.

    A table that is complete already is left alone. Raises TableProblem when the table isn't pinned
    yet, SnapshotLost when its pin is gone, Fenced when another writer took over.
    """
    store = pipeline.store
    row = store.table(table)
    if row is None or row.state == "waiting":
        raise TableProblem(
            table,
            "it has no pinned snapshot yet",
            "The flusher pins it within seconds of its start: see the sensor"
            f" flusher_{pipeline.config.name}, or run cdc-assets snapshot.",
        )
    if row.state == "parked":
        raise TableProblem(table, row.reason or "it is parked")
    lock = f"write:{table}"
    store.lock(lock)
    try:
        lake = LakeTable(pipeline.config, pipeline.config.table(table), row)
        plan = chunks(store, table, row.epoch)
        if row.state == "copying":
            assert row.pin is not None and row.snapshot_lsn is not None
            store.lock("catalog")  # "if not exists" isn't atomic in every catalog
            try:
                lake.create(session)
            finally:
                store.unlock("catalog")
            state = lake.state()
            landed = state.landed if state.epoch == row.epoch else frozenset()
            mark_landed(store, table, row.epoch, landed)
            wanted = set(only) if only is not None else None
            todo = [
                c.key for c in plan if c.key not in landed and (wanted is None or c.key in wanted)
            ]
            if todo:
                with join_pin(store, pipeline.source_dsn, row.pin) as holder:
                    _copy_waves(pipeline, session, lake, holder, todo, on_progress)
            plan = chunks(store, table, row.epoch)
            if lake.state().landed >= {c.key for c in plan}:
                # One pin for every chunk: no chunk was read later than its consistent point.
                store.finish_copy(table, row.epoch, row.snapshot_lsn)
        return plan
    finally:
        store.unlock(lock)


def _copy_waves(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    holder: Holder,
    todo: Sequence[str],
    on_progress: Callable[[CopyProgress], None],
) -> None:
    store, row = pipeline.store, lake.row
    tasks = min(pipeline.config.snapshot.max_parallel_chunks, len(todo))
    wave_size = tasks * CHUNKS_A_TASK
    began = time.monotonic()
    done: list[ChunkProgress] = []
    for first in range(0, len(todo), wave_size):
        wave = todo[first : first + wave_size]
        state = lake.state()
        properties = {EPOCH: str(row.epoch), CHUNKS: ",".join(wave)}
        if state.cursor is not None:
            properties |= cursor_properties(state.cursor)
        frame = read_chunks(session, _read_plan(pipeline, lake, holder, wave, tasks))
        casts = [
            F.col(ticked(c.name))
            if c.mapping.native
            else F.expr(c.mapping.cast(ticked(c.name), c.policy)).alias(c.name)
            for c in lake.columns
        ]
        current = store.table(row.table)
        if current is None or current.epoch != row.epoch or not holder.alive():
            raise Fenced(f"{row.table}: its copy was started again elsewhere; this run stops.")
        with summary(session, properties), published(session, lake, state) as branch:
            if state.epoch != row.epoch:
                session.sql(f"delete from {branch}")  # what an earlier epoch left
            frame.select(*casts).writeTo(branch).append()
        mark_landed(store, row.table, row.epoch, wave)
        by_key = {c.key: c for c in chunks(store, row.table, row.epoch)}
        landed = tuple(by_key[key] for key in wave)
        done.extend(landed)
        on_progress(
            CopyProgress(
                row.table,
                landed,
                sum(c.state == "landed" for c in by_key.values()),
                len(by_key),
                sum(c.rows or 0 for c in done),
                sum(c.bytes or 0 for c in done),
                time.monotonic() - began,
            )
        )


def read_chunks(session: SparkSession, plan: ReadPlan) -> DataFrame:
    """The rows of the plan's chunks, in the plan's schema; one Spark task for each of its tasks."""
    names = {arrow: name for name, arrow in _ARROW.items()}
    ddl = ", ".join(f"{ticked(f.name)} {names[f.type]}" for f in plan.schema)
    tasks = len(plan.tasks)
    return session.range(0, tasks, 1, tasks).mapInArrow(chunk_reader(plan), ddl)


def share(chunks: Sequence[tuple[str, str]], tasks: int) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Deal chunks out to ``tasks`` tasks in turn, so that their ends come close together."""
    return tuple(tuple(chunks[number::tasks]) for number in range(tasks))


def _read_plan(
    pipeline: Pipeline, lake: LakeTable, holder: Holder, wave: Sequence[str], tasks: int
) -> ReadPlan:
    store, row, config = pipeline.store, lake.row, pipeline.config
    listed = sql.SQL(", ").join(
        select_expression(c.source, config.table(row.table).columns.types.get(c.name))
        for c in lake.columns
    )
    select = sql.SQL("select {} from only {}").format(listed, row.table.identifier)
    progress = sql.SQL(
        "update {} set state = 'claimed', rows = $1::bigint, bytes = $2::bigint,"
        " seconds = $3::float8, heartbeat_at = now()"
        " where source = {} and table_name = {} and epoch = {} and chunk = $4::text"
    ).format(
        sql.Identifier(config.state.schema_, "snapshot_progress"),
        sql.Literal(config.name),
        sql.Literal(str(row.table)),
        sql.Literal(row.epoch),
    )
    ranges = [(key, CtidRange.parse(key)[1].predicate) for key in wave]
    return ReadPlan(
        source_uri=uri(pipeline.source_dsn, f"cdc_assets {config.name} copy"),
        snapshot_name=holder.snapshot_name,
        select=select.as_string(store.connection),
        tasks=share(ranges, tasks),
        schema=pa.schema(
            [
                pa.field(c.name, _ARROW[c.mapping.lake] if c.mapping.native else pa.string())
                for c in lake.columns
            ]
        ),
        policies=tuple(
            (c.name, c.policy)
            for c in lake.columns
            if c.mapping.native and c.mapping.lake in _CALENDAR
        ),
        log_uri=uri(coordination_dsn(config), f"cdc_assets {config.name} copy progress"),
        progress=progress.as_string(store.connection),
    )
