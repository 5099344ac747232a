"""Commits that landed although Iceberg takes them for failed ones, and deletes their files.

The server of a SQL catalog commits, and the connection ends before its reply. Iceberg's pool runs
the statement again over another connection: it changes no row any more. Iceberg tries the whole
commit again then. That ends well for most; what can't be repeated has failed for Iceberg, which
deletes the manifest list and the manifests of a snapshot that the catalog leads to. Nobody can read
that snapshot, or write after it.

- What is written to a draft (``lake.publish``) is never published then. Its files are orphans; of a
  branch, ``maintenance.expire`` removes the snapshots.
- A rewrite of manifests is on ``main``: ``set_back`` takes ``main`` back to the rewrite's parent,
  which has the same rows.
- A table that a copy replaces is replaced once more (``snapshot.swap``): the copy stays until
  ``is_readable`` says so of the table.
- A table that is created with its rows is there once. A second insert into the catalog breaks its
  key, and Iceberg deletes nothing after that; nor does pyiceberg after any error of a connection.
- The first, empty append to a table can be repeated, with the same snapshot.
- Changes of properties, columns, layout and references, and expiry, write no file but metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc_assets.lake.catalog.catalog import CATALOG
from cdc_assets.lake.drafts.branches import patiently
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.store import LogStore

logger = logging.getLogger(__name__)


def is_readable(loaded: Table) -> bool:
    """Whether the current snapshot's manifests are all there; asks for each of them."""
    current = loaded.current_snapshot()
    return current is None or (
        is_there(loaded, current.manifest_list)  # pyiceberg remembers what was in it
        and all(is_there(loaded, m.manifest_path) for m in current.manifests(loaded.io))
    )


def before_lost_rewrite(loaded: Table) -> int | None:
    """The id of the snapshot before a rewrite at the head of ``main`` whose manifest list is gone.

    None for any other head, which costs nothing; a rewrite costs one look at its file. Never the
    parent of a commit that changed rows.
    """
    head = loaded.current_snapshot()
    if head is None or head.summary is None or head.summary.operation is not Operation.REPLACE:
        return None
    parent = loaded.snapshot_by_id(head.parent_snapshot_id) if head.parent_snapshot_id else None
    if parent is None or is_there(loaded, head.manifest_list):
        return None
    # Without it, the warehouse is away, or somebody removed more than a clean-up does.
    return parent.snapshot_id if is_there(loaded, parent.manifest_list) else None


def set_back(store: LogStore, session: SparkSession, lake: LakeTable) -> None:
    """Set ``main`` back to the snapshot before a lost rewrite, if its head is one.

    The caller holds the table's writer lock. Raises psycopg.OperationalError if the session that
    has it is lost: a late statement would undo what another writer has published since.
    """
    loaded = lake.load()
    before = before_lost_rewrite(loaded) if loaded is not None else None
    if before is None:
        return
    store.server_now()
    patiently(
        session,
        lake,
        f"call {CATALOG}.system.set_current_snapshot({lake.procedure_name}, {before})",
    )
    logger.warning(
        "%s: a rewrite of its manifests was lost; its lake table is as before it", lake.row.table
    )


@contextmanager
def healing(store: LogStore, session: SparkSession, lake: LakeTable) -> Iterator[None]:
    """Around what writes the table: after an error, a lost rewrite isn't in the next one's way.

    As ``set_back``; costs nothing without an error.
    """
    try:
        yield
    except (PySparkException, FileNotFoundError):
        set_back(store, session, lake)
        raise


def is_there(loaded: Table, path: str) -> bool:
    """Whether a file of the table exists; one request."""
    return loaded.io.new_input(path).exists()
