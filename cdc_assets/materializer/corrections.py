"""Correcting rows of a lake table that a comparison found to be wrong, without a copy.

A correction is what a key has to be at an LSN, by an exact snapshot of the source: a whole row, or
nothing. It is applied as a batch of the log is, in the same commit on a branch, but the cursor
stays: the log goes on where it was. So it must be right at the cursor, too: it is for a key that no
change of at or after that LSN was applied to. Changes that are still to come are applied to it as
to any row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa
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
from cdc_assets.materializer.actions.commit import Change
from cdc_assets.materializer.merge import merge
from cdc_assets.materializer.schema.alter import current
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.key_lookup import Key
from cdc_assets.postgres.lsn import Lsn

# Of texts that one statement carries along; the rest has commits of its own.
_TEXT_BYTES = 16 * 10**6


@dataclass(frozen=True, slots=True)
class Correction:
    """``row``: the whole row in text form, JSON as in ``_data``; None: no row has ``key``."""

    key: Key
    row: str | None


@dataclass(frozen=True, slots=True)
class Corrections:
    """Corrections as the events of a batch. ``key``: the names of the key's columns at the source.

    A deleted row is one as of now, where the table shows when rows were deleted.
    """

    some: Sequence[Correction]
    key: Sequence[str]
    lsn: Lsn

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
        count, lsn = len(self.some), int(self.lsn)
        now = int(datetime.now(UTC).timestamp() * 10**6)
        return pa.table(
            {
                "off": pa.array(range(count), pa.int64()),
                "op": pa.array(["D" if one.row is None else "U" for one in self.some], pa.string()),
                "commit_lsn": pa.array([lsn] * count, pa.int64()),
                "unchanged": pa.nulls(count, pa.string()),
                "data": pa.array([self._data(one) for one in self.some], pa.string()),
                "lsn": pa.array([lsn] * count, pa.int64()),
                "ts": pa.array([now] * count, pa.int64()),
                "xid": pa.array([0] * count, pa.int64()),
            }
        )

    def _data(self, one: Correction) -> str:
        if one.row is not None:
            return one.row
        return json.dumps(dict(zip(self.key, one.key, strict=True)))


def correct(
    pipeline: Pipeline,
    session: SparkSession,
    lake: LakeTable,
    loaded: Table,
    corrections: Sequence[Correction],
    lsn: Lsn,
) -> None:
    """Apply ``corrections``, which are right at ``lsn`` and at the cursor of ``loaded``.

    The caller holds the table's writer lock. Raises TableProblem if the table's columns are being
    altered, or it has no cursor; Fenced if somebody else changed it since it was loaded.
    """
    store, key = pipeline.store, [column.source.name for column in lake.key]
    for number, some in enumerate(_parts(corrections)):
        if number:
            loaded = lake.loaded()
        state = lake_state(loaded)
        if number and not state.at_head:
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
            Corrections(some, key, lsn),
            pipeline.config.spark.cores,
            Facts(len(some), len(some), None, None, frozenset(), frozenset()),
            cursor,
            lsn,
            _never_read_again,
            mixed=False,
            inserts_add=lambda: False,
        )
        with healing(store, session, lake), naming_refusals(store, lake):
            merge(change)


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


def _parts(corrections: Sequence[Correction]) -> list[list[Correction]]:
    parts, size = list[list[Correction]](), 0
    for one in corrections:
        own = len(one.row or "") + sum(len(text or "") for text in one.key)
        if not parts or size + own > _TEXT_BYTES:
            parts.append([])
            size = 0
        size += own
        parts[-1].append(one)
    return parts


def _never_read_again(keys: Sequence[Key]) -> list[str]:
    raise AssertionError(f"{len(keys)} whole rows lack a column")
