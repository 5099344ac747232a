"""Changing a lake table in one step, by a writer that may die at any moment.

A Connect server goes on with a statement whose client was killed, so a dead writer's append may
land long after the next writer has read the table. So nothing is ever written to the table itself:
a writer writes a draft (``lake.drafts``) of the snapshot that it has read, and publishes it as its
last step. A dead writer's rows end in a draft that nobody publishes; and a draft is published only
while ``main`` is at its snapshot, so of two writers that started from one snapshot only one can
publish. That is the fence behind the lock (invariants 6, 7 and 9).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol

from pyiceberg.table import Table
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.errors import TableProblem
from cdc_assets.lake.drafts.branches import branch_draft
from cdc_assets.lake.drafts.tables import table_draft
from cdc_assets.lake.spark.session import SUMMARY_OPTION
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.cursors import Cursor

# Iceberg's error if the last commit is dated more than a minute later: by another machine's clock.
_EARLIER = "Invalid update timestamp"


class Draft(Protocol):
    """Where a writer writes."""

    @property
    def sql_name(self) -> str:
        """For Spark SQL."""

    @property
    def catalog(self) -> str:
        """The catalog whose procedures take :attr:`arguments`."""

    @property
    def arguments(self) -> str:
        """The arguments of Iceberg's procedures that name the draft."""

    def summary(self) -> Mapping[str, str]:
        """The summary of the newest snapshot."""

    def publish(self) -> None:
        """Make it what readers see. Raises Fenced if the table isn't as it was."""

    def give_up(self) -> None:
        """Leave as little as can be of what won't be published."""


@contextmanager
def published(
    session: SparkSession, lake: LakeTable, state: LakeState, loaded: Table | None = None
) -> Iterator[Draft]:
    """Yield a draft of ``state``'s snapshot; at the end, publish it.

    The caller holds the table's writer lock, and may have ``loaded`` the table since it has. If the
    block raises, readers see nothing of it. Raises Fenced when somebody else moved ``main``
    meanwhile.
    """
    base = state.snapshot_id
    assert base is not None  # a table is made with a snapshot
    loaded = loaded if loaded is not None else lake.loaded()
    draft: Draft = table_draft(session, lake, base, loaded) or branch_draft(
        session, lake, base, loaded
    )
    try:
        yield draft
        draft.publish()
    except BaseException:
        draft.give_up()
        raise


def append(
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    draft: Draft,
    cursor: Cursor | None,
    rows: DataFrame | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Append the last rows of a change to ``draft``, by the one commit that names the cursor.

    The draft's earlier commits don't name it: if somebody sets ``main`` back to one of them, the
    table isn't as of any cursor. Without ``rows`` the commit adds none.
    """
    new = rows if rows is not None else session.table(lake.sql_name).limit(0)
    said = lake.reached(cursor, state.foreign) if cursor is not None else {}
    writer = new.writeTo(draft.sql_name).options(**options)
    for key, value in said.items():
        writer = writer.option(SUMMARY_OPTION + key, value)
    writer.append()


@contextmanager
def clocks_blamed(lake: LakeTable) -> Iterator[None]:
    """Raise TableProblem where Iceberg refuses a commit as earlier than the last one."""
    try:
        yield
    except PySparkException as error:
        if _EARLIER not in str(error):
            raise
        raise TableProblem(
            lake.row.table,
            "Spark's clock is behind that of another machine, which changed its lake table last",
            "Have all machines synchronize their clocks (chrony, NTP); it goes on once that time"
            " has come.",
        ) from error


def name_cursor(session: SparkSession, lake: LakeTable, state: LakeState, cursor: Cursor) -> None:
    """Publish a commit of no rows, so that the newest snapshot names the cursor (invariant 7).

    Never on ``main``: a late commit of a killed run would take the cursor back.
    """
    with published(session, lake, state) as draft:
        append(session, lake, state, draft, cursor)
