"""Comparing changing tables at one moment: a snapshot of the source, and one of the lake.

The source is read under the snapshot of a temporary slot, which shows exactly what committed below
the slot's consistent point c; a standby under one that was taken while its replay stood still at c.
The lake is read as of one of its own snapshots. Where that has more than what committed below c,
the log between the two names the rows that differ for that reason, and these aren't compared this
time: so no merge waits for a comparison.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cdc_assets.errors import TableProblem
from cdc_assets.lake.drafts.branches import patiently
from cdc_assets.lake.spark.sending import sent
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeColumn, LakeTable
from cdc_assets.log.batch import holds
from cdc_assets.log.sessions.workers import workers
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogStore
from cdc_assets.materializer.drain import drain
from cdc_assets.pins.holders import under
from cdc_assets.pins.on_standby import stopped_snapshot
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import create_slot, export_snapshot, on_standby
from cdc_assets.verify.canonical import comparable_text, lake_text
from cdc_assets.verify.rows import Beside, comparable, loses

_LOOK_SECONDS = 0.2
# The most changes between the two snapshots; only their keys are kept.
_MOST_MOVED = 200_000

Texts = tuple[str | None, ...]

# How long a table that is locked may wait for the log: its merges stand still meanwhile.
LOCKED_SECONDS = 60.0

READ_AGAIN = "rows that only the source has whole were read from it meanwhile"


class FlushTo(Protocol):
    """Returns once everything that committed below ``lsn`` is registered.

    Raises CdcError if that takes more than ``seconds``.
    """

    def __call__(self, lsn: Lsn, *, seconds: float | None = None) -> None: ...


def _on_standby(pipeline: Pipeline) -> bool:
    with pipeline.connect_source("verify") as source:
        return on_standby(source)


@contextmanager
def moment(
    pipeline: Pipeline, purpose: str, patience_seconds: int | None = None
) -> Iterator[tuple[Lsn, str]]:
    """A point of the source, and the name of a snapshot of what committed below it.

    A session holds the snapshot meanwhile: its slot would keep all WAL that is written. Where
    nothing is streamed there is no slot, and nothing relies on the point.
    """
    if not pipeline.config.streams:
        made = export_snapshot(pipeline.source_dsn)
    elif pipeline.config.postgres.standby and _on_standby(pipeline):
        made = stopped_snapshot(pipeline)
    else:
        name = f"{pipeline.config.slot[:48]}_{purpose}_{uuid.uuid4().hex[:8]}"
        made = create_slot(
            pipeline.replication_dsn, name, temporary=True, patience_seconds=patience_seconds
        )
    with ExitStack() as stack:
        stack.callback(made.connection.close)
        source = stack.enter_context(pipeline.connect_source(purpose))
        stack.enter_context(under(source, made.snapshot_name))
        made.connection.close()
        held = source.execute("select pg_export_snapshot()").fetchone()
        assert held is not None  # a function's result
        yield made.consistent_point, str(held[0])


def await_log(store: LogStore, table: TableId, point: Lsn, seconds: float) -> None:
    """Wait until everything that committed below ``point`` is registered."""
    if not store.await_flushed(point, seconds):
        raise TableProblem(
            table, "the flusher isn't level with the source", "Start it, or see its log."
        )


def await_lake(
    pipeline: Pipeline, session: SparkSession, table: TableId, point: Lsn, seconds: float
) -> tuple[LakeTable, LakeState]:
    """Wait until everything that committed below ``point`` is applied; the table as it is then.

    The table's worker merges it as ever; it is merged here only if it has no living worker.
    """
    deadline = time.monotonic() + seconds
    while True:
        lake = comparable(pipeline, table)
        state = lake.state()
        if not _lacks(pipeline.store, lake, state, point):
            return lake, state
        if time.monotonic() > deadline:
            raise TableProblem(
                table, "its merges aren't level with the log", "It is compared the next time."
            )
        if not any(known.alive and table in known.tables for known in workers(pipeline.store)):
            drain(pipeline, session, table, until_offset=pipeline.store.log_end(table))
        time.sleep(_LOOK_SECONDS)


def whole_at(store: LogStore, lake: LakeTable, point: Lsn) -> bool:
    """Whether ``lake``, in a state read before this call, has no rows of after ``point``.

    False, too, if it is copied anew by now: nothing is known of its earlier copy then. Where only
    the source has a value, a merge reads its rows as of now (``materializer.reread``).
    """
    row = store.table(lake.row.table)
    if row is None or row.epoch != lake.row.epoch:
        return False
    return (row.complete_lsn or Lsn.ZERO) <= point


def offset_of(state: LakeState) -> int:
    return state.cursor.offset if state.cursor is not None else 0


def _lacks(store: LogStore, lake: LakeTable, state: LakeState, point: Lsn) -> bool:
    """Whether a change that committed below ``point`` waits to be applied."""
    copied, offset = lake.row.snapshot_lsn or Lsn.ZERO, offset_of(state)
    storage = Storage.of(lake.config.s3)
    for entry in store.entries(lake.row.table, offset):
        if entry.flushable_lsn <= copied:
            continue  # the copy has it
        commits = entry.rows.read(storage, ["_commit_lsn"])["_commit_lsn"].to_pylist()
        for commit in commits[max(0, offset - entry.start_offset) :]:
            if commit >= int(copied):
                return bool(commit < int(point))
    return False


def moved(
    store: LogStore, beside: Beside, point: Lsn, offset: int, state: LakeState
) -> frozenset[Texts]:
    """Keys (whole rows if there is no key) that the lake changed from ``point`` on, by the log.

    ``offset``: up to where the log was applied at some moment before ``point``. Raises TableProblem
    if there are too many, or the table was truncated.
    """
    table, found, changes = beside.lake.row.table, set[Texts](), 0
    names = [beside.columns[i][0].source.name for i in beside.told_apart]
    for rows in _changes(store, beside.lake, point, offset, state):
        changes += len(rows)
        if changes > _MOST_MOVED:
            raise TableProblem(table, "it changes too fast", "It is compared the next time.")
        for operation, data in zip(rows["_op"].to_pylist(), rows["_data"].to_pylist(), strict=True):
            if operation == "T":
                raise TableProblem(
                    table, "it was truncated meanwhile", "It is compared the next time."
                )
            values = json.loads(data)
            found.add(tuple(values.get(name) for name in names))
    return frozenset(found)


def passed(store: LogStore, lake: LakeTable, point: Lsn, offset: int, state: LakeState) -> bool:
    """Whether the lake has anything that committed at ``point`` or later; see :func:`moved`."""
    return any(len(rows) for rows in _changes(store, lake, point, offset, state))


def _changes(
    store: LogStore, lake: LakeTable, point: Lsn, offset: int, state: LakeState
) -> Iterator[pa.Table]:
    """The rows of the log that committed from ``point`` on and that ``state`` has applied."""
    storage, until = Storage.of(lake.config.s3), offset_of(state)
    entries = store.entries(lake.row.table, offset)
    if not holds(entries, offset, until):
        what = "its log was removed while it was compared"
        raise TableProblem(lake.row.table, what, "It is compared the next time.")
    for entry in entries:
        if entry.start_offset < until and entry.flushable_lsn >= point:
            rows = entry.rows.read(storage, ["_op", "_commit_lsn", "_data"])
            rows = rows.slice(0, until - entry.start_offset)
            yield rows.filter(pc.greater_equal(rows["_commit_lsn"], int(point)))


def still(side: DataFrame, beside: Beside, keys: Collection[Texts]) -> DataFrame:
    """The rows of a side (``rows.digested``) without those of ``keys``."""
    if not keys:
        return side
    places = beside.told_apart
    schema = T.StructType([T.StructField(f"m{i}", T.StringType()) for i in places])
    there = side.sparkSession.createDataFrame([tuple(key) for key in keys], schema)
    texts = [F.expr(_of_log(f"m{i}", *beside.columns[i])) for i in places]
    marked = side.withColumn("mark", _mark([F.col("cells")[i] for i in places]))
    gone = F.broadcast(there.select(_mark(texts).alias("mark")).distinct())
    return marked.join(gone, "mark", "left_anti").drop("mark")


def as_in_lake(session: SparkSession, beside: Beside, keys: Collection[Texts]) -> frozenset[Texts]:
    """The texts of keys in the log, in the key's order, as ``rows.lake_expressions`` has them."""
    columns = [beside.columns[beside.lake.columns.index(column)] for column in beside.lake.key]
    texts = [_of_log(f"m{i}", *column) for i, column in enumerate(columns)]
    names = [f"m{i}" for i in range(len(columns))]
    if not keys or texts == names:
        return frozenset(keys)
    arrays = [pa.array(some, pa.string()) for some in zip(*keys, strict=True)]
    there = sent(session, pa.table(arrays, names))
    return frozenset(tuple(row) for row in there.select(*map(F.expr, texts)).collect())


def _of_log(text: str, column: LakeColumn, kind: T.DataType) -> str:
    """The comparable text of a value in the log; where the lake loses some, as the lake has it."""
    if loses(column, kind):
        return lake_text(column.mapping.cast(text, column.policy), kind)
    return comparable_text(text, kind)


def _mark(texts: Sequence[Column]) -> Column:
    named = [text.alias(f"c{i}") for i, text in enumerate(texts)]
    return F.to_json(F.struct(*named), {"ignoreNullFields": "false"})


@contextmanager
def kept(session: SparkSession, lake: LakeTable, snapshot_id: int | None) -> Iterator[None]:
    """Keep the snapshot from expiry: reading a large table takes longer than snapshots stay."""
    if snapshot_id is None:
        yield
        return
    tag = f"verify_{uuid.uuid4().hex[:8]}"
    patiently(
        session,
        lake,
        f"alter table {lake.sql_name} create tag {tag} as of version {snapshot_id} retain 7 days",
    )
    try:
        yield
    finally:
        with suppress(PySparkException):  # expiry removes it then
            patiently(session, lake, f"alter table {lake.sql_name} drop tag if exists {tag}")
