"""Repairing a table whose rows differ: the keys that do are corrected in place, without a copy.

A comparison knows both sides at one LSN c, exactly. Under the table's writer lock, the keys that
the lake has changed since are left out: their changes of after c would be undone. Every other key
has to be in the lake as it is in the source's snapshot of c, and is read there. What changes after
c and isn't applied yet comes later, as ever. A change by somebody else is forgotten once a
comparison has found all rows equal after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc_assets.errors import TableProblem
from cdc_assets.lake.lineage import foreign_since
from cdc_assets.lake.state import lake_state
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.locks import write_lock
from cdc_assets.materializer.corrections import (
    Corrections,
    correct,
    forget_foreign,
    refuse_uncorrectable,
)
from cdc_assets.materializer.reread import rows_of
from cdc_assets.messages.texts import command, copy_anew
from cdc_assets.pins.holders import under
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import check_oid
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.verify.difference import Compared, Mend, odd_keys
from cdc_assets.verify.point import READ_AGAIN, moved, still, whole_at
from cdc_assets.verify.rows import comparable, shapes
from cdc_assets.verify.source import REWRITTEN

# Keys that are corrected one by one, by lookups in the source; a table with more is copied anew.
MOST_KEYS = 100_000


def repairer(pipeline: Pipeline, session: SparkSession) -> Mend:
    """Corrects the keys that differ in a table that was compared; returns how many."""

    def repair(compared: Compared) -> int:
        table = compared.beside.lake.row.table
        refuse_uncorrectable(compared.beside.lake)
        with pipeline.store.locked(write_lock(table)):
            return _repaired(pipeline, session, compared)

    return repair


def _repaired(pipeline: Pipeline, session: SparkSession, compared: Compared) -> int:
    beside, point, store = compared.beside, compared.point, pipeline.store
    table = beside.lake.row.table
    lake = comparable(pipeline, table)
    if _copy_of(lake) != _copy_of(beside.lake):
        raise TableProblem(table, "it was altered or copied anew meanwhile", "Try again.")
    loaded = lake.loaded()
    state = lake_state(loaded)
    if not whole_at(store, lake, point):
        raise TableProblem(table, READ_AGAIN, "Try again.")
    others = state.foreign
    if compared.state.foreign is not None:  # since then no merge of ours has added commits
        others = foreign_since(loaded, compared.state.snapshot_id)
    if others is not None:
        raise TableProblem(table, f"somebody else changes its rows: {others}", "Try again.")
    gone = moved(store, beside, point, compared.offset, state)
    ours, theirs = (still(side, beside, gone) for side in (compared.read, compared.theirs))
    places = [beside.lake.columns.index(column) for column in beside.lake.key]  # in its order
    keys = odd_keys(ours, theirs, places, MOST_KEYS + 1) if compared.balance.differing else {}
    if nameless := [key for key in keys if None in key]:
        raise TableProblem(
            table,
            f"{len(nameless):,} rows of its lake table have NULL in their key, which no row of the"
            " source has",
            f"Delete them there, or copy it anew: {command('resync', table)}",
        )
    if len(keys) > MOST_KEYS:
        raise TableProblem(
            table,
            f"more than {MOST_KEYS:,} keys differ",
            copy_anew(table),
        )
    corrections = _corrections(pipeline, lake, keys, compared)
    if shapes(pipeline, [table])[table] != compared.shape:
        raise TableProblem(table, REWRITTEN, "Try again.")
    if compared.balance.differing:
        correct(pipeline, session, lake, loaded, corrections)
    else:
        forget_foreign(pipeline, session, lake, loaded)
    return len(keys)


def _copy_of(lake: LakeTable) -> tuple[object, ...]:
    return lake.row.epoch, lake.row.columns, lake.row.key_columns


def _corrections(
    pipeline: Pipeline, lake: LakeTable, keys: Mapping[Key, bool], compared: Compared
) -> Corrections:
    """The keys as the source has them under the snapshot; ``keys``: whether it has a row of it.

    A key that only the lake has isn't looked up: it may be no value of the column's type.
    """
    there = [key for key, at_source in keys.items() if at_source]
    rows = list[tuple[int, str]]()
    if there:
        with (
            closing(pipeline.connect_source("repair", reads=True)) as source,
            under(source, compared.snapshot_name),
        ):
            check_oid(source, lake.row.table, lake.row.oid)
            rows = rows_of(pipeline, source, lake, there)
    if len(rows) != len(there):
        raise TableProblem(lake.row.table, REWRITTEN, "Try again.")
    gone = [key for key, at_source in keys.items() if not at_source]
    names = [column.source.name for column in lake.key]
    return Corrections.of(
        pa.array([row for _, row in rows], pa.string()), gone, names, compared.point
    )
