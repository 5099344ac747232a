"""Correcting rows of a lake table that a comparison found to be wrong, or that are read once more.

A correction is what a key has to be at the table's cursor: a whole row, or nothing. It is applied
as a batch of the log is, in the same commit of a draft, but the cursor stays: the log goes on
where it was. Changes that are still to come are applied to it as to any row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.errors import Fenced, TableProblem
from cdc_assets.lake.lost_reply import healing
from cdc_assets.lake.publish import name_cursor
from cdc_assets.lake.spark.sending import sent
from cdc_assets.lake.standing import standing
from cdc_assets.lake.state import lake_state
from cdc_assets.lake.tables import LakeTable
from cdc_assets.lake.values import naming_refusals
from cdc_assets.log.batch import Facts
from cdc_assets.log.store import LogEntry
from cdc_assets.log.verified import note_written
from cdc_assets.materializer.actions.commit import Change
from cdc_assets.materializer.merge import merge
from cdc_assets.materializer.reread import Piece
from cdc_assets.materializer.schema.alter import current
from cdc_assets.messages.texts import copy_anew
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.lsn import Lsn

# Of texts that one statement carries along; the rest has commits of its own.
_TEXT_BYTES = 48 * 10**6


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrections as the events of a batch.

    ``data``: rows in text form, JSON as in ``_data``, or keys alone, as in a delete's; by
    ``stays``: whether it is a row. A deleted row is one as of now, where the table shows when rows
    were deleted.
    """

    data: pa.Array
    stays: pa.BooleanArray
    lsn: Lsn

    @staticmethod
    def of(rows: pa.Array, gone: Sequence[Key], key: Sequence[str], lsn: Lsn) -> Corrections:
        """``rows`` as JSON; the keys that have no row, and the names of the key's columns.

        What is gone goes first: another text of the same value may be a row's key.
        """
        keys = [json.dumps(dict(zip(key, one, strict=True))) for one in gone]
        data = pa.concat_arrays([pa.array(keys, pa.string()), rows])
        return Corrections(data, pa.array(np.arange(len(data)) >= len(gone)), lsn)

    def parts(self) -> Iterator[Corrections]:
        """In parts of _TEXT_BYTES, or of one row."""
        if not len(self.data):
            return
        sizes = pc.add(pc.binary_length(self.data), 1).to_numpy()
        numbers = np.cumsum(sizes) // _TEXT_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(self.data)]
        for begin, end in pairwise(cuts):
            some = slice(begin, end)
            yield Corrections(self.data[some], self.stays[some], self.lsn)

    @property
    def entries(self) -> Sequence[LogEntry]:
        """Of the log: none."""
        return ()

    def rows(self, most_bytes: int) -> pa.Table | None:
        """See ``events.Batch.rows``."""
        table = self._table().select(["off", "op", "unchanged", "data"])
        return table if table["data"].nbytes <= most_bytes else None

    def frame(self, session: SparkSession, tasks: int, *, whole: bool = False) -> DataFrame:  # noqa: ARG002 - as a batch's
        """See ``events.events``."""
        frame = sent(session, self._table())
        return frame if whole else frame.drop("lsn", "ts", "xid")

    def _table(self) -> pa.Table:
        count, lsn = len(self.data), int(self.lsn)
        now = int(datetime.now(UTC).timestamp() * 10**6)
        return pa.table(
            {
                "off": pa.array(range(count), pa.int64()),
                "op": pc.if_else(self.stays, "U", "D"),
                "commit_lsn": pa.array([lsn] * count, pa.int64()),
                "unchanged": pa.nulls(count, pa.string()),
                "data": self.data,
                "lsn": pa.array([lsn] * count, pa.int64()),
                "ts": pa.array([now] * count, pa.int64()),
                "xid": pa.array([0] * count, pa.int64()),
            }
        )


def refuse_uncorrectable(lake: LakeTable) -> None:
    """Raise TableProblem for a table whose rows can't be corrected one by one."""
    anew = copy_anew(lake.row.table)
    if not lake.config.streams:
        raise TableProblem(lake.row.table, "nothing is streamed, so that it isn't kept", anew)
    if lake.row.mode == "append":
        raise TableProblem(lake.row.table, "in append mode its rows are its history", anew)
    if not lake.key:
        raise TableProblem(lake.row.table, "it has no key, by which rows could be corrected", anew)


def correct(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    loaded: Table,
    corrections: Corrections,
) -> None:
    """Apply ``corrections``, which are right at the cursor of ``loaded``.

    The caller holds the table's writer lock. Raises TableProblem if the table's columns are being
    altered, or it has no cursor; Fenced if somebody else changed it since it was loaded.
    """
    store, begun = pipeline.store, lake_state(loaded)
    for number, some in enumerate(corrections.parts()):
        if number:
            loaded = lake.loaded()
        state = lake_state(loaded)
        # What is right at another cursor isn't known; and others may have the lock by now.
        if number and not (state.at_head and state.cursor == begun.cursor):
            raise Fenced(f"{lake.row.table}: somebody else changed its lake table meanwhile.")
        cursor = standing(store, lake, state, whatever_others_wrote=True)
        now, altering, loaded = current(pipeline, session, lake, state, loaded)
        if altering or now.row.columns != lake.row.columns:
            raise TableProblem(lake.row.table, "its columns are being altered", "Try again.")
        change = Change(
            session,
            lake,
            lake_state(loaded),
            loaded,
            some,
            pipeline.config.spark.cores,
            Facts(len(some.data), len(some.data), None, None, frozenset(), frozenset()),
            cursor,
            some.lsn,
            _never_read_again,
            mixed=False,
            inserts_add=lambda: False,
        )
        with healing(store, session, lake), naming_refusals(store, lake):
            merge(change)
        note_written(store, lake.row.table)


def forget_foreign(
    pipeline: Pipeline, session: SparkSession, lake: LakeTable, loaded: Table
) -> None:
    """Go on with a table that somebody else changed: all its rows are right, as ``loaded``.

    The caller holds its writer lock. Raises Fenced if it was changed since it was loaded.
    """
    state = lake_state(loaded)
    cursor = standing(pipeline.store, lake, state, whatever_others_wrote=True)
    with healing(pipeline.store, session, lake):
        name_cursor(session, lake, replace(state, foreign=None), cursor)
    pipeline.store.note_held_up(lake.row.table, None, lake.row.epoch)


def _never_read_again(keys: Sequence[Key]) -> Iterator[Piece]:
    raise AssertionError(f"{len(keys)} whole rows lack a column")
