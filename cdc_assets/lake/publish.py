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
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from pyiceberg.table import Table
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cdc_assets.errors import Fenced, TableProblem, first_line
from cdc_assets.lake.catalog.catalog import CATALOG, open_catalog, reached
from cdc_assets.lake.catalog.refs import Edit, Metadata, descends, edited, main_of, move_main
from cdc_assets.lake.spark.session import SUMMARY_OPTION
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.cursors import Cursor

logger = logging.getLogger(__name__)

PREFIX = "cdc_"
_OURS = re.compile(PREFIX + "[0-9a-f]{32}")
# The mark: the branch's retention. Long enough for any merge; it is of no other use.
_MARK, _MARK_DAYS, _DAY_MS = "max-ref-age-ms", 3_650, 86_400_000
# Iceberg's error if somebody else's commit came first.
_BESIDE = "CommitFailedException"
# Spark's, if the catalog couldn't be opened: Iceberg then takes its name for a namespace.
_UNPLANNED = "[INTERNAL_ERROR]"
# Iceberg's, if the last commit is dated more than a minute later: by another machine's clock.
_EARLIER = "Invalid update timestamp"
_TRIES, _PAUSE_SECONDS = 5, 0.3


@contextmanager
def published(
    session: SparkSession, lake: LakeTable, state: LakeState, loaded: Table | None = None
) -> Iterator[str]:
    """Yield a branch of ``state``'s snapshot, as Spark SQL names it; at the end, publish it.

    The caller holds the table's writer lock, and may have ``loaded`` the table since it has. If the
    block raises, readers see nothing of it. Raises Fenced when somebody else moved ``main``
    meanwhile.
    """
    loaded = loaded if loaded is not None else lake.loaded()
    branch = f"{PREFIX}{uuid.uuid4().hex}"
    make_branch(session, lake, state, branch, loaded)
    yield lake.branch(branch)
    publish_branch(session, lake, state, branch, loaded)


def make_branch(
    session: SparkSession, lake: LakeTable, state: LakeState, branch: str, loaded: Table
) -> None:
    """Make a marked branch of ``state``'s snapshot, and drop those of writers that died."""

    def edit(metadata: Metadata) -> bool:
        if main_of(metadata) != state.snapshot_id:
            raise _fenced(lake)
        _drop_all(metadata)
        made = {"snapshot-id": state.snapshot_id, "type": "branch", _MARK: _MARK_DAYS * _DAY_MS}
        metadata["refs"][branch] = made
        return True

    if _edited(lake, loaded, edit):
        return
    drop_abandoned(session, lake, loaded)
    patiently(
        session,
        lake,
        f"alter table {lake.sql_name} create branch {branch} as of version {state.snapshot_id}"
        f" retain {_MARK_DAYS} days",
    )


def publish_branch(
    session: SparkSession, lake: LakeTable, state: LakeState, branch: str, loaded: Table
) -> None:
    """Move ``main`` from ``state``'s snapshot to the branch's, and drop the branch.

    Raises Fenced unless it is the branch that was marked, and has a commit.
    """
    head: int | None = None

    def edit(metadata: Metadata) -> bool:
        nonlocal head
        main, made = main_of(metadata), metadata["refs"].get(branch)
        if made is None and main == head is not None:
            return False  # it is done, and the answer was lost
        if made is None or _MARK not in made or main is None or main != state.snapshot_id:
            raise _fenced(lake)
        head = int(made["snapshot-id"])
        if head == main or not descends(metadata, head, main):
            raise _fenced(lake)
        move_main(metadata, head)
        del metadata["refs"][branch]
        return True

    if not _edited(lake, loaded, edit):
        _fast_forward(session, lake, state, branch)


def _edited(lake: LakeTable, loaded: Table, edit: Edit) -> bool:
    with reached():
        return edited(open_catalog(lake.config), loaded, edit)


def _drop_all(metadata: Metadata) -> bool:
    """Drop all writers' branches; whether there were any."""
    names = list(filter(_OURS.fullmatch, metadata["refs"]))
    for name in names:
        del metadata["refs"][name]
    return bool(names)


def _fast_forward(session: SparkSession, lake: LakeTable, state: LakeState, branch: str) -> None:
    """:func:`publish_branch` by Spark."""
    loaded = lake.load()
    made = loaded.metadata.refs.get(branch) if loaded is not None else None
    if made is None or made.max_ref_age_ms is None or made.snapshot_id == state.snapshot_id:
        raise _fenced(lake)
    try:
        patiently(
            session,
            lake,
            f"call {CATALOG}.system.fast_forward({lake.procedure_name}, 'main', '{branch}')",
        )
    except PySparkException as error:
        after = lake.load()
        now = after.metadata.current_snapshot_id if after is not None else None
        if now is None or now == state.snapshot_id:
            raise
        if now != made.snapshot_id:
            raise _fenced(lake) from error
    try:
        patiently(session, lake, f"alter table {lake.sql_name} drop branch {branch}")
    except PySparkException as error:  # it is published: the next writer drops the branch
        logger.warning("%s: branch %s stays: %s", lake.row.table, branch, first_line(error))


def append(
    session: SparkSession,
    lake: LakeTable,
    state: LakeState,
    branch: str,
    cursor: Cursor | None,
    rows: DataFrame | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Append the last rows of a change to ``branch``, by the one commit that names the cursor.

    The branch's earlier commits don't name it: if somebody sets ``main`` back to one of them, the
    table isn't as of any cursor. Without ``rows`` the commit adds none.
    """
    new = rows if rows is not None else session.table(lake.sql_name).limit(0)
    said = lake.reached(cursor, state.foreign) if cursor is not None else {}
    writer = new.writeTo(branch).options(**options)
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
    with published(session, lake, state) as branch:
        append(session, lake, state, branch, cursor)


def patiently(session: SparkSession, lake: LakeTable, statement: str) -> None:
    """Run a statement on a branch or a tag, which fails if another commit comes at that moment.

    Expiry and changes of properties commit whatever lock is held. Iceberg retries all other changes
    of a table by itself; a failed statement on a branch or a tag changed nothing. Raises what the
    catalog said if it couldn't be opened, unless it can be now.
    """
    for left in reversed(range(_TRIES)):
        try:
            session.sql(statement)
        except PySparkException as error:
            unplanned = _UNPLANNED in str(error)
            if not left or not (unplanned or _BESIDE in str(error)):
                raise
            if unplanned:
                _ = session.table(lake.sql_name).schema
            time.sleep(_PAUSE_SECONDS)
        else:
            return


def _fenced(lake: LakeTable) -> Fenced:
    return Fenced(f"{lake.row.table}: another writer took over meanwhile; nothing was published.")


def drop_abandoned(session: SparkSession, lake: LakeTable, loaded: Table | None = None) -> None:
    """Remove the branches of writers that died.

    The caller holds the table's writer lock, so none of them is alive; see :func:`published`.
    """
    loaded = loaded if loaded is not None else lake.load()
    if loaded is None or not writers_branches(loaded):
        return
    if _edited(lake, loaded, _drop_all):
        return
    for name in writers_branches(loaded):
        patiently(session, lake, f"alter table {lake.sql_name} drop branch if exists {name}")


def writers_branches(loaded: Table) -> list[str]:
    """The branches that writers made; any other branch or tag is somebody else's."""
    return [name for name in loaded.metadata.refs if _OURS.fullmatch(name)]
