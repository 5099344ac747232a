"""Applying what was read to the lake, by the package's rule, under the table's writer lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from cdc_assets.backfill.horizons import Proven
from cdc_assets.backfill.reader import Again
from cdc_assets.backfill.rule import changed_keys, counts
from cdc_assets.lake.state import lake_state
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.batch import Window
from cdc_assets.log.locks import write_lock
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogStore
from cdc_assets.materializer.corrections import Corrections, correct
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.events import Batch
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.verify.point import READ_AGAIN, FlushTo, as_in_lake, offset_of, whole_at
from cdc_assets.verify.rows import Beside, as_of, comparable, lake_cells

# Of changes since a horizon: their keys are looked at while the table is locked.
_MOST_BYTES = 2**30
_AGAIN = "It is read again."


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found of some keys at the source: ``rows`` as JSON with their ``keys``; ``gone``.

    The keys of ``gone`` are as the lake has them (:func:`keys_of`).
    ``horizon`` and ``lsn``: as of a part of a chunk (``reader.Part``).
    """

    rows: pa.Array
    keys: Sequence[Key]
    gone: Sequence[Key]
    horizon: Proven
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class Done:
    """Rows written, rows left to the stream, rows removed; the log is applied to ``offset``."""

    applied: int
    superseded: int
    removed: int
    offset: int


def apply(
    pipeline: Pipeline,
    session: SparkSession,
    read_of: LakeTable,
    some: Looked,
    flush_to: FlushTo,
) -> Done:
    """Write what counts of ``some``, which was read with the columns of ``read_of``.

    Raises Again if it can't be known any more what counts; TableProblem, Fenced, and errors of
    Spark where nothing can be written.
    """
    store, table = pipeline.store, read_of.row.table
    flush_to(some.lsn)
    with store.locked(write_lock(table)):
        drain(pipeline, session, table, below=some.lsn)
        lake = comparable(pipeline, table)
        if _columns(lake) != _columns(read_of):
            raise Again(table, "it was altered, or copied anew, since it was read", _AGAIN)
        loaded = lake.loaded()
        if not whole_at(store, lake, some.lsn):
            raise Again(table, READ_AGAIN, _AGAIN)
        offset = offset_of(lake_state(loaded))
        changed = _changed(store, lake, Window(some.horizon.offset, some.horizon.lsn, None, offset))
        rows = some.rows.filter(pa.array(counts(some.keys, changed)))
        gone = list[Key]()
        if some.gone:
            beside = as_of(session, lake, lake_state(loaded).snapshot_id)
            of_lake = None if changed is None else as_in_lake(session, beside, changed)
            going = counts(some.gone, of_lake)
            gone = _in_lake(beside, [k for k, goes in zip(some.gone, going, strict=True) if goes])
        names = [column.source.name for column in lake.key]
        correct(pipeline, session, lake, loaded, Corrections.of(rows, gone, names, some.lsn))
        return Done(len(rows), len(some.rows) - len(rows), len(gone), offset)


def _in_lake(beside: Beside, keys: Sequence[Key]) -> list[Key]:
    """Those that the lake has a row of; the stream may have taken it away by now."""
    if not keys:
        return []
    schema = T.StructType([T.StructField(f"k{i}", T.StringType()) for i in range(len(keys[0]))])
    asked = beside.rows.sparkSession.createDataFrame([tuple(key) for key in keys], schema)
    there = keys_of(beside)
    condition = [asked[a] == there[b] for a, b in zip(asked.columns, there.columns, strict=True)]
    return [tuple(row) for row in asked.join(there, condition, "left_semi").collect()]


def keys_of(beside: Beside) -> DataFrame:
    """The texts of the keys of the rows that the source should have; none with NULL."""
    names = [f"c{i}" for i in range(len(beside.columns))]
    places = [beside.lake.columns.index(column) for column in beside.lake.key]
    return lake_cells(beside, names).select(*(names[place] for place in places)).dropna()


def _columns(lake: LakeTable) -> tuple[object, ...]:
    return lake.row.epoch, lake.row.columns, lake.row.key_columns


def _changed(store: LogStore, lake: LakeTable, window: Window) -> frozenset[Key] | None:
    """The keys that the lake has changed by what is in the window of the log; None: all of them."""
    table, at, until = lake.row.table, window.offset, window.until
    assert until is not None
    entries = store.entries(table, at)
    for entry in entries:
        if entry.start_offset <= at:
            at = max(at, entry.end_offset)
    if at < until:
        raise Again(table, "its log since it was read is removed by now", _AGAIN)
    within = [e for e in entries if e.start_offset < until and e.flushable_lsn >= window.above]
    if not within:
        return frozenset()
    batch = Batch(within, window, Storage.of(lake.config.s3))
    events = batch.rows(_MOST_BYTES)
    if events is None:
        raise Again(table, "it changed too much since it was read", _AGAIN)
    return changed_keys(events, [column.source.name for column in lake.key])
