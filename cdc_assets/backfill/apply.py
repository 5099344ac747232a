"""Applying what was read to the lake, by the package's rule, under the table's writer lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.table import Table
from pyiceberg.table.snapshots import ancestors_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from cdc_assets.backfill.equal import equal
from cdc_assets.backfill.horizons import Proven
from cdc_assets.backfill.reader import Again, Rewritten
from cdc_assets.backfill.rule import changed_keys, counts
from cdc_assets.lake.state import lake_state
from cdc_assets.lake.tables import LakeTable
from cdc_assets.lake.values import naming_refusals
from cdc_assets.log.batch import Window, holds, selected
from cdc_assets.log.locks import write_lock
from cdc_assets.log.relation import told_by_file
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogStore
from cdc_assets.materializer.corrections import Corrections, correct
from cdc_assets.materializer.drain import drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.verify.point import FlushTo, as_in_lake, offset_of
from cdc_assets.verify.rows import Beside, as_of, comparable, lake_cells

# Of the log, that is looked at while the table is locked: of changes since a horizon; and of older
# ones, which are searched for what they left out, in steps.
_MOST_BYTES = 2**30
_AGAIN = "It is read again."


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found of some keys at the source: ``rows`` as JSON with their ``keys``; ``gone``.

    The keys of ``gone`` are as the lake has them (:func:`keys_of`). ``horizon`` and ``lsn``: as of
    a part of a chunk (``reader.Part``).
    """

    rows: pa.Array
    keys: Sequence[Key]
    gone: Sequence[Key]
    horizon: Proven
    lsn: Lsn


@dataclass(frozen=True, slots=True)
class Done:
    """Rows applied, and of these, how many the lake had otherwise, or not: these are written.

    Rows left to the stream, rows removed; the log is applied to ``offset``. ``partial``: keys of
    changes that left values out, each with the log offset of the last such change, about; up to
    ``searched`` they were searched for.
    """

    applied: int
    differed: int
    superseded: int
    removed: int
    offset: int
    partial: Mapping[Key, int]
    searched: int


def apply(
    pipeline: Pipeline,
    session: SparkSession,
    read_of: LakeTable,
    some: Looked,
    flush_to: FlushTo,
    since: int,
) -> Done:
    """Write what counts of ``some``, which was read with the columns of ``read_of``.

    ``since``: the offset from which on the log is searched for changes that left values out.

    Raises Again if it can't be known any more what counts; TableProblem, Fenced, and errors of
    Spark where nothing can be written.
    """
    store, table = pipeline.store, read_of.row.table
    compared = read_of.loaded()
    before = lake_state(compared).snapshot_id
    with naming_refusals(store, read_of):
        same = equal(session, read_of, compared, some.rows, some.keys)
    flush_to(some.lsn)
    with store.locked(write_lock(table)):
        # What a poll read before is in the log by now, though it may have a later LSN.
        below = some.lsn if pipeline.config.publishes else None
        drain(pipeline, session, table, below=below)
        lake = comparable(pipeline, table)
        if _columns(lake) != _columns(read_of):
            raise Again(table, "it was altered, or copied anew, since it was read", _AGAIN)
        loaded = lake.loaded()
        offset = offset_of(lake_state(loaded))
        changed, partial, searched = _changed(store, lake, some.horizon, since, offset)
        good = counts(some.keys, changed)
        if not _comes_from(loaded, before):
            same[:] = False
        rows = some.rows.filter(pa.array(good & ~same))
        gone = list[Key]()
        if some.gone:
            beside = as_of(session, lake, lake_state(loaded).snapshot_id)
            of_lake = None if changed is None else as_in_lake(session, beside, changed)
            going = counts(some.gone, of_lake)
            gone = _in_lake(beside, [k for k, goes in zip(some.gone, going, strict=True) if goes])
        names = [column.source.name for column in lake.key]
        correct(pipeline, session, lake, loaded, Corrections.of(rows, gone, names, some.lsn))
        applied = int(good.sum())
        superseded = len(good) - applied
        return Done(applied, len(rows), superseded, len(gone), offset, partial, searched)


def _comes_from(loaded: Table, snapshot_id: int | None) -> bool:
    """Whether the table is as it was in that snapshot, but for changes since."""
    history = ancestors_of(loaded.current_snapshot(), loaded.metadata)
    return any(snapshot.snapshot_id == snapshot_id for snapshot in history)


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


def _changed(
    store: LogStore, lake: LakeTable, horizon: Proven, since: int, until: int
) -> tuple[frozenset[Key] | None, Mapping[Key, int], int]:
    """The keys that the lake has changed since the horizon by the log up to ``until``; None: all.

    And ``Done.partial`` of changes from ``since`` on: what they left out (unchanged TOAST) the lake
    had, and may be damaged there. And ``Done.searched``.
    """
    table, at = lake.row.table, min(horizon.offset, since)
    window = Window(at, horizon.lsn, None, until)
    entries = store.entries(table, at)
    if not holds(entries, at, until):
        gone = Again if since >= horizon.offset else Rewritten
        raise gone(table, "its log since it was read is removed by now", _AGAIN)
    storage, key = Storage.of(lake.config.s3), [column.source.name for column in lake.key]
    changed, partial, emptied = set[Key](), dict[Key, int](), False
    searched, looked_at, later = since, 0, 0
    for entry in entries:
        if entry.start_offset >= until:
            break
        is_later = entry.end_offset > horizon.offset
        if searched >= entry.start_offset and looked_at <= _MOST_BYTES:
            searched = max(since, min(entry.end_offset, until))
        elif not is_later:
            continue
        opened = entry.rows.opened(storage)
        rows = opened.read(["_op", "_commit_lsn", "_unchanged_cols", "_data"])
        looked_at += (size := rows["_data"].nbytes)
        later += size if is_later else 0
        if later > _MOST_BYTES:
            raise Again(table, "it changed too much since it was read", _AGAIN)
        places, within = selected(rows, entry.start_offset, window)
        lacking = pc.and_(pc.is_valid(rows["_unchanged_cols"]), pc.less(places, searched))
        lacking = pc.and_(lacking, pc.greater_equal(places, since))
        if not told_by_file(opened.relation()).same(lake.row):
            # Its columns may have had each other's names for a while: keys can't be told.
            if entry.end_offset > horizon.offset:
                raise Again(table, "it was altered since it was read", _AGAIN)
            if pc.any(lacking).as_py():
                raise Rewritten(table, "it was altered since it began", _AGAIN)
            continue
        some = changed_keys(rows.filter(lacking), key) or ()
        partial |= dict.fromkeys(some, entry.start_offset)
        found = changed_keys(rows.filter(within), key)
        emptied = emptied or found is None
        changed |= found or set()
    return None if emptied else frozenset(changed), partial, searched
