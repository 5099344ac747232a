"""The changes of one table from a place in its log on, as events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pyarrow as pa

from cdc_assets.consumers.events import Changes, Event, Schema, Truncate
from cdc_assets.consumers.place import Place
from cdc_assets.consumers.rows import is_known, pieces, shape_told, typed, without_moves
from cdc_assets.lake.standing import log_from
from cdc_assets.log.batch import Window, selected
from cdc_assets.log.relation import told_by_file
from cdc_assets.log.staged.storage import Storage
from cdc_assets.log.store import LogEntry
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn

logger = logging.getLogger(__name__)


def changes(
    pipeline: Pipeline,
    place: Place,
    act: Callable[..., Event],
    target: Callable[[], float],
) -> Iterator[Event]:
    """The events from ``place`` on, up to the log's end as it is when it is reached, or a target.

    ``act`` makes an event at the place's offset. Columns that the lake table doesn't know yet end
    it: their types, and whether they are masked, are known once it has followed. So does a gap of
    the log, and ``place.copy`` is None then.
    """
    store, storage = pipeline.store, Storage.of(pipeline.config.s3)
    while place.offset < target():
        entries, lost = log_from(store, place.table, place.offset)
        if lost is not None:
            logger.warning("%s: it begins anew: %s", place.table, lost)
            place.forget()
            return
        for entry in entries:
            row = store.table(place.table)
            if row is None or row.snapshot_lsn is None:
                return
            yield from _of_entry(pipeline, place, act, storage, entry, row)
            if place.waits is not None or place.offset < entry.end_offset:
                return
        if not entries:
            return


def _of_entry(
    pipeline: Pipeline,
    place: Place,
    act: Callable[..., Event],
    storage: Storage,
    entry: LogEntry,
    row: TableRow,
) -> Iterator[Event]:
    opened = entry.rows.opened(storage)
    told, rows = told_by_file(opened.relation()), opened.read()
    assert row.snapshot_lsn is not None  # it streams
    offsets, mask = selected(rows, entry.start_offset, Window(place.offset, row.snapshot_lsn))
    rows = without_moves(rows.append_column("_offset", offsets).filter(mask))
    place.waits = None
    if not len(rows):
        place.reached(entry.end_offset)
        return
    if told != place.told:
        first = rows["_offset"][0].as_py()
        if not is_known(row, told) and place.held.lake <= first:
            place.wait("its lake table hasn't followed a change of its columns yet")
            return
        before, shape = place.shape, shape_told(pipeline.config, row, told)
        place.told, place.shape = told, shape
        if before is None or (before.schema, before.key_names) != (shape.schema, shape.key_names):
            place.least = first + 1
            yield act(Schema, since=place.token, schema=shape.schema, key=shape.key_names)
    assert place.shape is not None  # it was told
    found = pieces(rows)
    piece = next(found, None)
    while piece is not None:
        after, since = next(found, None), place.token
        place.reached(entry.end_offset if after is None else _last(piece, "_offset") + 1)
        lsn = Lsn(_last(piece, "_commit_lsn"))
        if piece["_op"][0].as_py() == "T":
            yield act(Truncate, since=since, lsn=lsn)
        else:
            yield act(Changes, since=since, rows=typed(place.shape, row, piece), lsn=lsn)
        piece = after


def _last(rows: pa.Table, name: str) -> int:
    return int(rows[name][len(rows) - 1].as_py())
