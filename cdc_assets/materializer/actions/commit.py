"""A change of a lake table, and the one commit that every action ends with.

Keeps invariant 7 and never writes equality deletes. In a draft (``lake.publish``): delete rows (by
a MERGE with the keys broadcast, so the table is never shuffled, or by a condition of its own),
append the new ones. Readers see one step, and each commit carries the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.config.tables import LSN, SYNCED_AT
from cdc_assets.lake.lineage import count, said
from cdc_assets.lake.publish import append, published
from cdc_assets.lake.spark.session import row_by_row, unshuffled
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.lake.values import names_of
from cdc_assets.log.batch import Facts
from cdc_assets.log.cursors import Cursor
from cdc_assets.materializer.events import Events
from cdc_assets.materializer.reread import Reread
from cdc_assets.postgres.lsn import Lsn

# A batch of 64 MB has at most some millions of keys; broadcasting them costs less than a shuffle of
# the table.
_KEYS = "cdc_keys"
# From this version of Iceberg's format on, deletes are vectors; before, files are written anew.
_VECTORS = 3
# Iceberg splits no table into tasks of fewer bytes, so that one of these reads each file.
_SMALL_BYTES = 16 * 2**20
_DISTRIBUTIONS = {"write.delete.distribution-mode", "write.merge.distribution-mode"}
# How appended files are compressed: for speed where they aren't sent anywhere, since every merge
# reads the keys of all files, and compaction soon writes them anew as the table's property says.
_CODEC, _LEVEL = "compression-codec", "compression-level"
_LOCAL, _REMOTE = {_CODEC: "snappy"}, {_CODEC: "zstd", _LEVEL: "1"}


@dataclass(frozen=True, slots=True)
class Deletion:
    """The table's rows ``t`` for which ``condition`` holds; for some row ``s`` of ``keys``, if any.

    Names a column of ``t`` as the lake does. ``scattered``: of several rows, which are all that a
    file has as good as never.
    """

    condition: str
    keys: DataFrame | None = None
    scattered: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A batch of the log, to be applied to ``lake`` so that its cursor becomes ``cursor``.

    ``state``: the table's state that the batch was cut for, ``loaded``: the table then. ``facts``
    decide how the batch's rows are folded; Spark reads them with ``tasks`` tasks. ``lsn``: one that
    all of them committed below. ``mixed``: the table's rows may be of several moments, the last of
    which is ``complete_lsn``. ``inserts_add``: whether a key that is inserted surely has no row in
    the table.
    """

    session: SparkSession
    lake: LakeTable
    state: LakeState
    loaded: Table
    batch: Events
    tasks: int
    facts: Facts
    cursor: Cursor
    lsn: Lsn
    reread: Reread
    mixed: bool
    inserts_add: Callable[[], bool]

    @property
    def emptying(self) -> Deletion | None:
        """Every row, if the batch has a truncate; its events before that are passed over."""
        return Deletion("true") if self.facts.truncate is not None else None

    @property
    def events(self) -> DataFrame:
        """The batch's rows; of WHOLE_SCHEMA where the mode shows when a row was changed."""
        return self.batch.frame(self.session, self.tasks, whole=self.lake.row.mode != "mirror")


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a change: keys written, keys deleted, rows read again from the source."""

    upserted: int
    deleted: int
    repaired: int = 0

    def __add__(self, other: Merged) -> Merged:
        return Merged(
            self.upserted + other.upserted,
            self.deleted + other.deleted,
            self.repaired + other.repaired,
        )


def commit(
    change: Change,
    *,
    delete: Deletion | None = None,
    new: DataFrame | None,
    again: Generator[DataFrame] | None = None,
) -> None:
    """Delete the rows of ``delete``, then append ``new``, and what is read ``again``, in pieces.

    All have the table's columns. What is read again is read meanwhile, and counts once no piece is
    left: before the last rows are appended.
    """
    session, lake = change.session, change.lake
    with published(session, lake, change.state, change.loaded) as draft:
        if delete is not None:
            with _settings(change, delete):
                _delete(session, draft.sql_name, delete)
        options = _compressed(change)
        if again is not None:
            with closing(again):
                last = next(again, None)
                for piece in again:
                    assert last is not None
                    append(session, lake, change.state, draft, None, _whole(change, last), options)
                    last = piece
            new = last if new is None else new.unionByName(last) if last is not None else new
        # Even without rows: a delete of whole files or of nothing doesn't carry the cursor.
        rows = _whole(change, new) if new is not None else None
        append(session, lake, change.state, draft, change.cursor, rows, options)


@contextmanager
def _settings(change: Change, delete: Deletion) -> Iterator[None]:
    """What makes the statement cheaper, while it lasts."""
    with ExitStack() as cleanup:
        if _is_small(change.loaded):
            cleanup.enter_context(unshuffled(change.session))
        # A partition may be of a key, and of whole files.
        if delete.scattered and change.loaded.spec().is_unpartitioned():
            cleanup.enter_context(row_by_row(change.session))
        yield


def _is_small(loaded: Table) -> bool:
    """Whether each task that deletes writes few vectors, and no other of the same files.

    Not where somebody has chosen how this table's deletes are distributed.
    """
    snapshot = loaded.current_snapshot()
    size = count(said(snapshot), "total-files-size") if snapshot is not None else 0
    return (
        loaded.format_version >= _VECTORS
        and loaded.spec().is_unpartitioned()
        and not _DISTRIBUTIONS & set(loaded.properties)
        and 0 < size < _SMALL_BYTES
    )


def _delete(session: SparkSession, table: str, delete: Deletion) -> None:
    if delete.keys is None:
        session.sql(f"delete from {table} t where {delete.condition}")
        return
    delete.keys.createOrReplaceTempView(_KEYS)
    session.sql(
        f"merge into {table} t using (select /*+ broadcast({_KEYS}) */ * from {_KEYS}) s"
        f" on {delete.condition} when matched then delete"
    )


def _compressed(change: Change) -> Mapping[str, str]:
    """Options of the append; none where somebody has set another compression than ours."""
    properties, prefix = change.loaded.properties, "write.parquet."
    ours = change.lake.properties()
    if any(properties.get(prefix + name) != ours.get(prefix + name) for name in (_CODEC, _LEVEL)):
        return {}
    return _LOCAL if change.lake.config.warehouse.startswith("file:") else _REMOTE


def _whole(change: Change, rows: DataFrame) -> DataFrame:
    """``rows`` with what metadata adds, and NULL in columns that the source has dropped."""
    lake = change.lake
    if lake.table.metadata:
        lsn = F.lit(int(change.lsn)).cast("bigint")
        told = {SYNCED_AT: F.current_timestamp(), LSN: lsn}
        rows = rows.withColumns({name: told[name] for name in lake.table.metadata})
    # Not ``rows.columns``: a server would be asked, and sent all of them.
    if {f.name for f in change.loaded.schema().fields} <= {*names_of(lake), *lake.extra}:
        return rows
    return rows.to(change.session.table(lake.sql_name).schema)
