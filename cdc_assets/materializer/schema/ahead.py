"""A schema change that no row change has followed yet."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.relation import Told, told_by_catalog
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn

# A flusher that streams is at the end of the WAL within about its flush interval.
_CATCH_UP_SECONDS = 10.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Look:
    """A table's relation as the source's catalog had it before ``lsn``."""

    told: Told
    lsn: Lsn


def look(pipeline: Pipeline, table: TableId) -> Look | None:
    """Read the table's relation from the catalog; None if the lake has the same.

    Every row of another relation committed before the LSN. Raises TableProblem if the table is
    gone.
    """
    row = pipeline.store.table(table)
    if row is None or row.state != "streaming":
        return None
    with pipeline.connect_source("schema") as source:
        told = told_by_catalog(source, row, pipeline.config.publication)
        return None if told.same(row) else Look(told, current_lsn(source))


def relation_ahead(pipeline: Pipeline, lake: LakeTable, seen: Look | None) -> Told | None:
    """A relation of the catalog that no row of the log has yet, once no older row can come.

    An ALTER TABLE waits for all transactions that wrote to the table. So if the catalog had this
    relation before some LSN, and still has it, and the log is applied up to that LSN, no row of the
    previous relation is to come.
    """
    store, table = pipeline.store, lake.row.table
    if seen is None:
        with suppress(TableProblem):  # a table that is gone has no other relation
            seen = look(pipeline, table)
        if seen is None:
            return None
    deadline = time.monotonic() + _CATCH_UP_SECONDS
    while (flushed := store.flushed_lsn()) is None or flushed < seen.lsn:
        if time.monotonic() > deadline or not store.is_locked(f"flusher:{pipeline.config.name}"):
            return None  # the next one looks again
        time.sleep(_LOOK_SECONDS)
    if seen.told.same(lake.row):
        return None
    with pipeline.connect_source("schema") as source:
        now = told_by_catalog(source, lake.row, pipeline.config.publication)
    return now if now == seen.told else None
