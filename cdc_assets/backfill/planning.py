"""What a backfill has to read: the chunks of its table that aren't applied yet."""

from __future__ import annotations

from cdc_assets.backfill.reader import Plan, are_same, files_of
from cdc_assets.backfill.request import WHOLE, is_served, understood
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log import backfills as record
from cdc_assets.log.backfills import Backfill
from cdc_assets.pipeline import Pipeline
from cdc_assets.verify.source import parts, whole

# Chunks of so many pages at least: 8 MB; and so many chunks at most, as they are counted often.
_CHUNK_PAGES, _MOST_CHUNKS = 1024, 10_000


def planned(
    pipeline: Pipeline, backfill: Backfill, lake: LakeTable, offset: int, *, scans: bool
) -> Plan:
    """What is left to be read; planned if that wasn't done, or the table has other files.

    ``offset``: from where the log is searched, if it is planned: the first horizon's. ``scans``: no
    index is looked for, though one may be thought to serve the condition.
    """
    store, number = pipeline.store, backfill.number
    with pipeline.connect_source("backfill") as source:
        files = files_of(source, lake)
        predicate = backfill.predicate
        if predicate is not None:
            predicate = understood(source, lake.row.table, predicate)
        by_index = predicate is not None and not scans and is_served(source, lake, predicate)
        begun = record.backfill(store, number)
        if begun.chunks and begun.heaps and are_same(begun.heaps, files):
            files = begun.heaps
        else:
            found = parts(source, lake.row.oid, only=lake.table.only)
            few = sum(part.pages for part in found) // _MOST_CHUNKS
            pages = max(_CHUNK_PAGES, lake.table.chunk_pages, few)
            chunks = [WHOLE] if by_index else whole(found, pages)
            record.plan(store, number, lake.row.epoch, files, chunks, offset)
    hold = pipeline.config.snapshot.hold_at_most.total_seconds()
    return Plan(lake, files, predicate, hold, record.planned(store, number), by_index)
