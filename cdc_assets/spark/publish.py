"""Changing a lake table in one step, by a writer that may die at any moment.

A Connect server goes on with a statement whose client was killed, so a dead writer's append may
land long after the next writer has read the table. So nothing is ever written to ``main``: a writer
makes a branch of its own from the snapshot it has read, writes there, and moves ``main`` forward as
its last statement. A dead writer's rows end on a branch that nobody publishes; and Iceberg refuses
to move ``main`` to a branch that it isn't an ancestor of, so of two writers that started from one
snapshot only one can publish. That is the fence behind the advisory lock (invariants 6, 7 and 9).

A writer that was taken for dead may still go on, or wake up later. The next one drops its branch;
but a commit to a branch that was dropped since the statement began makes it anew, off ``main`` as
it is then: without what was written to it before, or on top of what the next writer has published.
So a branch is marked when it is made, by a setting that one that came into being so doesn't have,
and only a marked one is published.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced
from cdc_assets.spark.catalog import CATALOG
from cdc_assets.spark.tables import LakeState, LakeTable

PREFIX = "cdc_"
# The mark: how long the branch may be kept. Long enough for any merge; it is of no other use.
_MARK_DAYS = 3_650


@contextmanager
def published(session: SparkSession, lake: LakeTable, state: LakeState) -> Iterator[str]:
    """Yield a branch of ``state``'s snapshot, as Spark SQL names it; at the end it is ``main``.

    The caller holds the table's writer lock. If the block raises, readers see nothing of it. Raises
    Fenced when somebody else moved ``main`` meanwhile.
    """
    drop_abandoned(session, lake)
    branch = f"{PREFIX}{uuid.uuid4().hex}"
    session.sql(
        f"alter table {lake.sql_name} create branch {branch} as of version {state.snapshot_id}"
        f" retain {_MARK_DAYS} days"
    )
    yield lake.branch(branch)
    loaded = lake.load()
    made = loaded.metadata.refs.get(branch) if loaded is not None else None
    if made is None or made.max_ref_age_ms is None or made.snapshot_id == state.snapshot_id:
        raise _fenced(lake)
    try:
        session.sql(
            f"call {CATALOG}.system.fast_forward({lake.procedure_name}, 'main', '{branch}')"
        )
    except PySparkException as error:
        after = lake.load()
        if after is None or after.metadata.current_snapshot_id == state.snapshot_id:
            raise
        raise _fenced(lake) from error
    session.sql(f"alter table {lake.sql_name} drop branch {branch}")


def _fenced(lake: LakeTable) -> Fenced:
    return Fenced(f"{lake.row.table}: another writer took over meanwhile; nothing was published.")


def drop_abandoned(session: SparkSession, lake: LakeTable) -> None:
    """Remove the branches of writers that died.

    The caller holds the table's writer lock, which says that none of them is alive.
    """
    loaded = lake.load()
    if loaded is None:
        return
    for name in loaded.metadata.refs:
        if name.startswith(PREFIX):
            session.sql(f"alter table {lake.sql_name} drop branch if exists {name}")
