"""Changing a lake table in one step, by a writer that may die at any moment.

A Connect server goes on with a statement whose client was killed, so a dead writer's append may
land long after the next writer has read the table. So nothing is ever written to ``main``: a writer
makes a branch of its own from the snapshot it has read, writes there, and moves ``main`` forward as
its last statement. A dead writer's rows end on a branch that nobody publishes; and Iceberg refuses
to move ``main`` to a branch that it isn't an ancestor of, so of two writers that started from one
snapshot only one can publish. That is the fence behind the lock (invariants 6, 7 and 9).

A writer that was taken for dead may still go on, or wake up later. The next writer drops its
branch; but a commit to a branch that was dropped since the statement began makes the branch anew,
off ``main`` as it is then: without the rows written to it before, or on top of what the next writer
has published. So a writer marks the branch that it makes, by a setting that a branch made anew
lacks, and only a marked branch is published.

A statement on a branch costs as much as a tenth of a small merge. So a merge leaves its branch, at
the table's newest snapshot, to the next merge by the same process.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pyiceberg.table import Table
from pyiceberg.table.refs import SnapshotRef
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.errors import Fenced, first_line
from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.spark.session import SUMMARY_OPTION
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.cursors import Cursor
from cdc_assets.postgres.names import TableId

logger = logging.getLogger(__name__)

PREFIX = "cdc_"
_OURS = re.compile(PREFIX + "[0-9a-f]{32}")
# The mark: the branch's retention. Long enough for any merge; it is of no other use.
_MARK_DAYS = 3_650
# How appended files are compressed: for speed where they aren't sent anywhere, since every merge
# reads the keys of all files, and compaction soon writes them anew as the table's property says.
_LOCAL = {"compression-codec": "snappy"}
_REMOTE = {"compression-codec": "zstd", "compression-level": "1"}
# Iceberg's error if somebody else's commit came first.
_BESIDE = "CommitFailedException"
_TRIES, _PAUSE_SECONDS = 5, 0.3

# By source and table, the branch that this process published last, and has no statement on.
_left: dict[tuple[str, TableId], str] = {}


@contextmanager
def published(
    session: SparkSession, lake: LakeTable, state: LakeState, *, leaves: bool = False
) -> Iterator[str]:
    """Yield a branch of ``state``'s snapshot, as Spark SQL names it; at the end, publish it.

    The caller holds the table's writer lock. If the block raises, readers see nothing of it. Raises
    Fenced when somebody else moved ``main`` meanwhile. ``leaves``: the branch is left to the next.
    """
    branch = _branch(session, lake, state)
    yield lake.branch(branch)
    made = _marked(lake.load(), branch)
    if made is None or made.snapshot_id == state.snapshot_id:
        raise _fenced(lake)
    try:
        patiently(
            session,
            f"call {CATALOG}.system.fast_forward({lake.procedure_name}, 'main', '{branch}')",
        )
    except PySparkException as error:
        after = lake.load()
        now = after.metadata.current_snapshot_id if after is not None else None
        if now is None or now == state.snapshot_id:
            raise
        if now != made.snapshot_id:
            raise _fenced(lake) from error
    else:
        if leaves:
            _left[_of(lake)] = branch
            return
    try:
        patiently(session, f"alter table {lake.sql_name} drop branch {branch}")
    except PySparkException as error:  # it is published: the next writer drops the branch
        logger.warning("%s: branch %s stays: %s", lake.row.table, branch, first_line(error))


def _branch(session: SparkSession, lake: LakeTable, state: LakeState) -> str:
    """A marked branch at ``state``'s snapshot; all other branches of writers are dropped."""
    left, loaded = _left.pop(_of(lake), ""), lake.load()
    made = _marked(loaded, left)
    if made is not None and made.snapshot_id == state.snapshot_id:
        _drop(session, lake, [name for name in writers_branches(loaded) if name != left])
        return left
    _drop(session, lake, writers_branches(loaded))
    branch = f"{PREFIX}{uuid.uuid4().hex}"
    patiently(
        session,
        f"alter table {lake.sql_name} create branch {branch} as of version {state.snapshot_id}"
        f" retain {_MARK_DAYS} days",
    )
    return branch


def _of(lake: LakeTable) -> tuple[str, TableId]:
    return lake.config.name, lake.row.table


def _marked(loaded: Table | None, branch: str) -> SnapshotRef | None:
    """The branch if it is there, as its writer made it."""
    made = loaded.metadata.refs.get(branch) if loaded is not None else None
    return made if made is not None and made.max_ref_age_ms is not None else None


def append(
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    branch: str,
    cursor: Cursor | None,
    rows: DataFrame | None = None,
) -> None:
    """Append the last rows of a change to ``branch``, by the one commit that names the cursor.

    The branch's earlier commits don't name it: if somebody sets ``main`` back to one of them, the
    table isn't as of any cursor. Without ``rows`` the commit adds none.
    """
    new = rows if rows is not None else session.table(lake.sql_name).limit(0)
    said = lake.reached(cursor, state.foreign) if cursor is not None else {}
    options = _LOCAL if lake.config.warehouse.startswith("file:") else _REMOTE
    writer = new.writeTo(branch).options(**options)
    for key, value in said.items():
        writer = writer.option(SUMMARY_OPTION + key, value)
    writer.append()


def name_cursor(session: SparkSession, lake: LakeTable, state: LakeState, cursor: Cursor) -> None:
    """Publish a commit of no rows, so that the newest snapshot names the cursor (invariant 7).

    Never on ``main``: a late commit of a killed run would take the cursor back.
    """
    with published(session, lake, state) as branch:
        append(session, lake, state, branch, cursor)


def patiently(session: SparkSession, statement: str) -> None:
    """Run a statement on a branch or a tag, which fails if another commit comes at that moment.

    Expiry and changes of properties commit whatever lock is held. Iceberg retries all other changes
    of a table by itself; a failed statement on a branch or a tag changed nothing.
    """
    for left in reversed(range(_TRIES)):
        try:
            session.sql(statement)
        except PySparkException as error:
            if not left or _BESIDE not in str(error):
                raise
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _fenced(lake: LakeTable) -> Fenced:
    return Fenced(f"{lake.row.table}: another writer took over meanwhile; nothing was published.")


def drop_abandoned(session: SparkSession, lake: LakeTable) -> None:
    """Remove the branches of writers that died, and what a merge left to the next.

    The caller holds the table's writer lock, so nobody is at work on any of them.
    """
    _drop(session, lake, writers_branches(lake.load()))


def _drop(session: SparkSession, lake: LakeTable, branches: Iterable[str]) -> None:
    for name in branches:
        patiently(session, f"alter table {lake.sql_name} drop branch if exists {name}")


def writers_branches(loaded: Table | None) -> list[str]:
    """The branches that writers made; any other branch or tag is somebody else's."""
    refs = loaded.metadata.refs if loaded is not None else ()
    return [name for name in refs if _OURS.fullmatch(name)]
