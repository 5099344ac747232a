"""The rows that a group begins with: one snapshot of the lake table. The source isn't asked.

The snapshot is the table's current one. Its history names the offset up to which the log is applied
to it, and the group reads the log from there on. So it has to be the table's own cursor, of its
present copy, and nobody else's rows may be among its own; and the table has to equal the source at
that offset: a copy that was read in parts doesn't, until the log is applied past its end
(``complete_lsn``).

The order of the steps, see ``Stream``: the claim holds the log before the lake table is loaded.
Maintenance reads the lake's cursor first and the claims after it (``maintenance.staged``), so what
it removes without knowing of a claim is below a cursor that the table had before, and the offset
that is found here can't be lower. While a process reads a snapshot, maintenance expires none of
the table. If somebody else does, the table begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from cdc_assets.config.tables import DELETED_AT
from cdc_assets.consumers.rows import BATCH_BYTES, BATCH_ROWS, Shape, read_rows, shape_of
from cdc_assets.lake.standing import log_from
from cdc_assets.lake.state import lake_state
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.states import TableState
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.keys import DataFileTask, data_files

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A snapshot of a lake table that is the table at ``offset``, where the log is at ``lsn``."""

    lake: LakeTable
    loaded: Table
    snapshot_id: int
    offset: int
    lsn: Lsn

    @property
    def shape(self) -> Shape:
        return shape_of(self.lake)

    def rows(self) -> Iterator[pa.Table]:
        """The rows, a data file in memory at a time.

        Rows that are only marked as deleted are left out. Raises FileNotFoundError if somebody has
        removed a file.
        """
        mode = self.lake.row.mode
        kept = [c.name for c in self.lake.columns]
        # Of a history each row says what happened; other modes add nothing that counts here.
        extra = [n for n in self.lake.extra if mode == "append" or n == DELETED_AT]
        there = self.loaded.schema().column_names
        schema = self.loaded.schema().select(*kept, *(n for n in extra if n in there))
        loaded, files = self._despite_keys(self.loaded, lambda table: data_files(table, schema))
        for file in files:
            loaded, found = self._despite_keys(loaded, partial(_read, schema, file))
            if mode == "soft_delete":
                found = found.filter(pc.is_null(found[DELETED_AT]))
            step = max(1, min(BATCH_ROWS, BATCH_BYTES * len(found) // max(1, found.nbytes)))
            for first in range(0, len(found), step):
                piece = found.slice(first, step)
                yield read_rows(self.shape, piece, is_history=mode == "append")

    def _despite_keys(self, loaded: Table, read: Callable[[Table], T]) -> tuple[Table, T]:
        """What ``read`` returns, and the table with keys by which it can be read.

        Those that a catalog lent may be over: then it is read once more, with others.
        """
        try:
            return loaded, read(loaded)
        except FileNotFoundError:
            raise
        except OSError:
            now = self.lake.loaded()
            at = (loaded.name(), loaded.metadata, loaded.metadata_location)
            loaded = Table(*at, now.io, now.catalog)
        return loaded, read(loaded)


def _read(schema: Schema, file: DataFileTask, loaded: Table) -> pa.Table:
    return ArrowScan(loaded.metadata, loaded.io, schema, AlwaysTrue()).to_table([file.task])


def choose(pipeline: Pipeline, table: TableId, at_least: int) -> Chosen | str:
    """The snapshot to begin with; or why there is none yet, for a person.

    ``at_least``: an offset that the lake table must hold the log up to.
    """
    store = pipeline.store
    row = store.table(table)
    if row is None or row.state != TableState.STREAMING or row.snapshot_lsn is None:
        return f"it is {row.state if row is not None else 'not registered yet'}"
    flushed = store.flushed_lsn() or Lsn.ZERO
    lake = LakeTable(pipeline.config, pipeline.config.table(table), row)
    if (loaded := lake.load()) is None:
        return "its lake table isn't there yet"
    state, known = lake_state(loaded), lake.recorded(loaded)
    cursor = state.cursor
    if cursor is None or state.snapshot_id is None or state.epoch not in (None, row.epoch):
        return "its lake table's first merge is still to come"
    if state.foreign is not None:
        return f"somebody else changed rows of its lake table: {state.foreign}"
    if known.altering or known.fill:
        return "its lake table is being altered"
    # Read after the table: whoever reads rows of a later moment into it raises this one first.
    now = store.table(table)
    if now is None or (now.epoch, now.state, now.snapshot_lsn) != (
        *(row.epoch, row.state),
        row.snapshot_lsn,
    ):
        return "it is copied anew"
    entries, lost = log_from(store, table, cursor.offset)
    whole = now.complete_lsn or now.snapshot_lsn or Lsn.ZERO
    reached = max(cursor.applied_lsn, flushed) if not entries else cursor.applied_lsn
    if cursor.offset < at_least:
        return "its lake table isn't that far yet"
    if reached < whole:
        return f"its lake table equals the source only from {whole} on"
    if lost is not None:
        return lost
    made = replace(now, columns=known.columns, key_columns=known.key)
    lake = LakeTable(pipeline.config, lake.table, made)
    return Chosen(lake, loaded, state.snapshot_id, cursor.offset, reached)
