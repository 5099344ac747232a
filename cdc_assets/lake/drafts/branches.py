"""A draft that is a branch of the lake table, where it can't be a table of its own.

Iceberg refuses to move ``main`` to a branch that it isn't an ancestor of. A dead writer's rows end
on a branch that nobody publishes.

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
from collections.abc import Mapping
from dataclasses import dataclass

from pyiceberg.table import Table
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.errors import Fenced, first_line
from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.catalog.commits import Metadata
from cdc_assets.lake.lineage import said
from cdc_assets.lake.tables import LakeTable

logger = logging.getLogger(__name__)

PREFIX = "cdc_"
_OURS = re.compile(PREFIX + "[0-9a-f]{32}")
# The mark: the branch's retention. Long enough for any merge; it is of no other use.
_MARK_DAYS = 3_650
# Iceberg's error if somebody else's commit came first.
_BESIDE = "CommitFailedException"
# Spark's, if the catalog couldn't be opened: Iceberg then takes its name for a namespace.
_UNPLANNED = "[INTERNAL_ERROR]"
_TRIES, _PAUSE_SECONDS = 5, 0.3


@dataclass(frozen=True, slots=True)
class BranchDraft:
    """A branch ``name`` of the lake table's snapshot ``base``."""

    session: SparkSession
    lake: LakeTable
    base: int
    name: str

    @property
    def sql_name(self) -> str:
        """For Spark SQL."""
        return self.lake.branch(self.name)

    @property
    def catalog(self) -> str:
        """The catalog whose procedures take :attr:`arguments`."""
        return CATALOG

    @property
    def arguments(self) -> str:
        """The arguments of Iceberg's procedures that name the draft."""
        return f"table => {self.lake.procedure_name}, branch => '{self.name}'"

    def summary(self) -> Mapping[str, str]:
        """The summary of the newest snapshot; without the operation."""
        loaded = self.lake.load()
        snapshot = loaded.snapshot_by_name(self.name) if loaded is not None else None
        return said(snapshot) if snapshot is not None else {}

    def publish(self) -> None:
        """Move ``main`` there, if it is where it was. Raises Fenced if it isn't."""
        session, lake, name = self.session, self.lake, self.name
        loaded = lake.load()
        made = loaded.metadata.refs.get(name) if loaded is not None else None
        if made is None or made.max_ref_age_ms is None or made.snapshot_id == self.base:
            raise fenced(lake)
        try:
            patiently(
                session,
                lake,
                f"call {CATALOG}.system.fast_forward({lake.procedure_name}, 'main', '{name}')",
            )
        except PySparkException as error:
            after = lake.load()
            now = after.metadata.current_snapshot_id if after is not None else None
            if now is None or now == self.base:
                raise
            if now != made.snapshot_id:
                raise fenced(lake) from error
        try:
            patiently(session, lake, f"alter table {lake.sql_name} drop branch {name}")
        except PySparkException as error:  # it is published: the next writer drops the branch
            logger.warning("%s: branch %s stays: %s", lake.row.table, name, first_line(error))

    def give_up(self) -> None:
        """Nothing is done: the next writer drops the branch."""


def branch_draft(
    session: SparkSession, lake: LakeTable, base: int, loaded: Table | None
) -> BranchDraft:
    """Make a branch of the snapshot ``base``, and drop those of dead writers."""
    drop_abandoned(session, lake, loaded)
    name = f"{PREFIX}{uuid.uuid4().hex}"
    patiently(
        session,
        lake,
        f"alter table {lake.sql_name} create branch {name} as of version {base}"
        f" retain {_MARK_DAYS} days",
    )
    return BranchDraft(session, lake, base, name)


def fenced(lake: LakeTable) -> Fenced:
    """The error of a writer whose change isn't published."""
    return Fenced(f"{lake.row.table}: another writer took over meanwhile; nothing was published.")


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


def drop_abandoned(session: SparkSession, lake: LakeTable, loaded: Table | None = None) -> None:
    """Remove the branches of writers that died.

    The caller holds the table's writer lock, so none of them is alive.
    """
    loaded = loaded if loaded is not None else lake.load()
    if loaded is None:
        return
    for name in writers_branches(loaded):
        patiently(session, lake, f"alter table {lake.sql_name} drop branch if exists {name}")


def drop_all(metadata: Metadata) -> None:
    """Take the branches of writers out of a table's metadata."""
    for name in list(filter(_OURS.fullmatch, metadata["refs"])):
        del metadata["refs"][name]


def writers_branches(loaded: Table) -> list[str]:
    """The branches that writers made; any other branch or tag is somebody else's."""
    return [name for name in loaded.metadata.refs if _OURS.fullmatch(name)]
