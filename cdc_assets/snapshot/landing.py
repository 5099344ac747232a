"""Landing: the files of a copy become rows of the lake table, exactly once.

A copy's files land in its *target*. For a table that the lake doesn't have yet that is the lake
table itself. For one that readers use already (a re-sync), or one whose rows have to be sorted into
partitions first, it is a table beside it, ``<name>__copy_<epoch>``, which takes the lake table's
place in one atomic step when it is complete: until then readers see the old rows.

Keeps invariant 6. A commit names the chunks that it adds, and is refused by the catalog if the
table moved since its chunks were last looked at: of two coordinators, however late one of them
wakes up, one lands a chunk. pyiceberg commits, in 50 ms instead of a second through Spark, and on
the very condition that is needed. It doesn't write format version 3 yet, so a target is made as
version 2; the first merge upgrades it, which changes metadata only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import LiteralString

import pyarrow as pa
from psycopg import sql
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.types import ListType
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import Fenced, TableProblem, first_line
from cdc_assets.lake.catalog.files import PLACES
from cdc_assets.lake.columns import PROPERTY
from cdc_assets.lake.copies import (
    COPIED_AS,
    SUFFIX,
    create_for_copy,
    data_folder,
    drop_copy,
    is_copy,
    refuse_later,
    refuse_other_columns,
)
from cdc_assets.lake.lineage import foreign_change
from cdc_assets.lake.lost_reply import is_readable
from cdc_assets.lake.place import below
from cdc_assets.lake.publish import clocks_blamed
from cdc_assets.lake.state import CHUNKS, COPY, lake_state
from cdc_assets.lake.tables import COPYING, RETRIES, LakeTable
from cdc_assets.log.copies.chunks import (
    ChunkProgress,
    chunks,
    forget_landed,
    mark_landed,
    plan_again,
)
from cdc_assets.log.locks import CATALOG_LOCK
from cdc_assets.log.staged.places import ForeignPath
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.texts import copy_anew
from cdc_assets.snapshot.convert import LakeField
from cdc_assets.snapshot.swap import settle, swap

logger = logging.getLogger(__name__)

# The columns beside the source's that the copy fills, with the SQL of their values: in mode append
# each row is an insert at the snapshot's LSN, whose true time and transaction aren't known.
_COPIED: dict[str, tuple[str, LiteralString]] = {
    "_op": ("text", "'I'::pg_catalog.text"),
    "_lsn": ("int8", "{lsn}::pg_catalog.int8"),
    "_synced_at": ("timestamp", "pg_catalog.clock_timestamp()"),
}
# Properties of a catalog that concern files; others may be its password.
_OF_FILES = ("s3.", "gcs.", "adls.", "hdfs.", "client.", PY_IO_IMPL, PLACES)
# A power cut leaves some broken files; more than these have another cause.
_GIVE_UPS = 100


class Landing:
    """The target of one copy. The caller holds the table's writer lock for all but ``fields``."""

    def __init__(self, config: SourceConfig, store: LogStore, row: TableRow) -> None:
        self._config = config
        self._store = store
        self._row = row
        self.lake = LakeTable(config, config.table(row.table), row)
        self._keys = frozenset(c.key for c in chunks(store, row.table, row.epoch))
        self._target: LakeTable | None = None
        self._seen: Table | None = None  # the target as it was when last looked at
        self._given_up = 0

    def open(self) -> None:
        """Find the target or make it, and correct the progress by its landed chunks.

        Raises TableProblem if the lake has a table of that name that isn't ours, or if the copy was
        begun with other columns.
        """
        loaded = self._ours(self.lake)
        shadow = LakeTable(
            self._config, self.lake.table, self._row, suffix=f"{SUFFIX}{self._row.epoch}"
        )
        if loaded is not None and self._complete(loaded) and is_readable(loaded):
            self._target = self.lake
        elif self.lake.table.partition_by or not self._is_target(loaded):
            self._target, loaded = shadow, self._ours(shadow)
            if loaded is not None and not self._is_target(loaded):
                self._drop_stranger(shadow, loaded)
                loaded = None
        else:
            self._target = self.lake
        if loaded is None:
            with self._store.locked(CATALOG_LOCK):  # "if not exists" isn't atomic in every catalog
                loaded = create_for_copy(self._target)
        refuse_other_columns(self.lake, loaded)
        self._seen = loaded
        landed = self._landed(loaded)
        mark_landed(self._store, self._row.table, self._row.epoch, landed)
        forget_landed(self._store, self._row.table, self._row.epoch, landed)

    def fields(self) -> tuple[LakeField, ...]:
        """The lake's columns as the files have them, with the target's field ids."""
        schema, found = self._last_seen().schema(), []
        for column in self.lake.columns:
            field = schema.find_field(column.name)
            kind = field.field_type
            element = kind.element_id if isinstance(kind, ListType) else None
            found.append(
                LakeField(
                    column.name,
                    column.mapping.sent,
                    column.mapping.lake,
                    field.field_id,
                    element,
                    column.policy,
                    column.mask,
                )
            )
        for name in self.extra:
            field_id, sent = schema.find_field(name).field_id, _COPIED[name][0]
            found.append(LakeField(name, sent, self.lake.extra[name], field_id, None, "null"))
        return tuple(found)

    @property
    def extra(self) -> list[str]:
        """The columns beside the source's that the copy fills, in the order of :meth:`fields`."""
        there = self._last_seen().schema().column_names
        return [name for name in self.lake.extra if name in _COPIED and name in there]

    def extra_values(self) -> list[sql.Composed]:
        """What is selected for them, behind the source's columns."""
        lsn = sql.Literal(int(self._row.snapshot_lsn or 0))
        return [
            sql.SQL(_COPIED[name][1] + " as {name}").format(lsn=lsn, name=sql.Identifier(name))
            for name in self.extra
        ]

    def place(self) -> tuple[str, Mapping[str, str]]:
        """The folder of the target's data files, and the properties of the FileIO to get there."""
        loaded = self._loaded()  # asked anew: keys that a catalog lends end
        io = {k: v for k, v in loaded.io.properties.items() if k.startswith(_OF_FILES)}
        return data_folder(loaded), io

    def land(self, written: Sequence[ChunkProgress]) -> None:
        """Commit the files of ``written`` chunks, and mark these landed.

        Raises Fenced if another writer moved the table meanwhile; nothing is lost by that.
        """
        loaded = self._loaded()
        landed = self._landed(loaded)
        files, keys = self._outstanding(loaded, written, landed)
        if keys:
            if not self._is_target(loaded):
                raise Fenced(f"{self._row.table}: another copy of it is under way.")
            refuse_later(self.lake, loaded)
            transaction = _tried_once(loaded).transaction()
            properties = {COPY: self.lake.copy_id, CHUNKS: ",".join(sorted(keys))}
            if keys | landed >= self._keys:
                properties |= self._reached(loaded)
            with transaction.update_snapshot(properties).fast_append() as append:
                for file in files:
                    append.append_data_file(file)
            if keys | landed >= self._keys and self._target is self.lake:
                described = self.lake.described(loaded.schema())
                transaction.set_properties({PROPERTY: described.dump()})
                transaction.remove_properties(*({COPYING, COPIED_AS} & {*loaded.properties}))
            try:
                transaction.commit_transaction()
            except CommitFailedException as error:
                raise Fenced(f"{self._row.table}: another writer is at it.") from error
        mark_landed(self._store, self._row.table, self._row.epoch, keys | landed)

    def complete(self) -> bool:
        """Whether the target holds every chunk of the plan."""
        return self._complete(self._last_seen()) or self._complete(self._loaded())

    def publish(self, session: SparkSession) -> None:
        """Make the complete target the lake table, as configured. May be repeated."""
        target = self._loaded()
        with clocks_blamed(self.lake):
            if self._target is not None and self._target is not self.lake:
                said = {COPY: self.lake.copy_id, CHUNKS: ",".join(sorted(self._keys))}
                swap(session, self.lake, self._target, said | self._reached(target))
            settle(session, self.lake)
        self._drop_shadows()

    # --- parts ---

    def _ours(self, lake: LakeTable) -> Table | None:
        """The table if it exists. Raises TableProblem if somebody else made it."""
        if (loaded := lake.load()) is not None and not lake.is_made_by_us(loaded):
            raise TableProblem(
                self._row.table,
                f"the lake has a table {lake.sql_name} that wasn't made from it by this source",
                "Drop or rename it, or set lake.namespace to one of this source's own.",
            )
        return loaded

    def _is_target(self, loaded: Table | None) -> bool:
        return loaded is None or loaded.properties.get(COPYING) == self.lake.copy_id

    def _loaded(self) -> Table:
        assert self._target is not None  # open() comes first
        loaded = self._target.load()
        if loaded is None:
            raise TableProblem(
                self._row.table,
                f"the table {self._target.sql_name}, which its copy lands in, is gone",
                "Have it copied anew: cdc-assets resync.",
            )
        self._seen = loaded
        return loaded

    def _last_seen(self) -> Table:
        return self._seen if self._seen is not None else self._loaded()

    def _complete(self, loaded: Table | None) -> bool:
        return bool(self._keys) and loaded is not None and self._landed(loaded) >= self._keys

    def _landed(self, loaded: Table) -> frozenset[str]:
        state = lake_state(loaded, copying=True)
        found = state.landed if state.copy == self.lake.copy_id else frozenset[str]()
        if (
            state.snapshot_id is not None
            and not state.whole
            and not found >= self._keys
            and self._is_target(loaded)
        ):
            problem = TableProblem(
                self._row.table,
                "somebody expired snapshots of its lake table while it was copied: what has landed"
                " isn't known any more",
                copy_anew(self._row.table),
            )
            self._store.park(self._row.table, problem.reason, self._row.epoch)
            raise problem
        return found

    def _reached(self, loaded: Table) -> dict[str, str]:
        """The summary properties of the commit that completes the copy: its log's first cursor."""
        others = foreign_change(loaded, ours=COPY)
        return self.lake.reached(self._store.first_cursor(self._row), others)

    def _drop_stranger(self, shadow: LakeTable, loaded: Table) -> None:
        """Drop what another life of the source left under the target's name."""
        try:
            drop_copy(shadow, loaded)
        except TableProblem as problem:
            raise TableProblem(
                self._row.table,
                f"the lake has a table {shadow.sql_name} of an earlier copy, and it can't be"
                f" dropped here: {problem.what}",
                f"Drop it in the catalog: drop table {shadow.sql_name};",
            ) from problem

    def _drop_shadows(self) -> None:
        """Remove the tables that copies of this epoch and earlier ones landed in."""
        for epoch in range(1, self._row.epoch + 1):
            shadow = LakeTable(self._config, self.lake.table, self._row, suffix=f"{SUFFIX}{epoch}")
            loaded = shadow.load()
            if loaded is not None and is_copy(shadow, loaded):
                try:
                    drop_copy(shadow, loaded)
                except TableProblem as problem:  # maintenance reports it until it is mended
                    logger.warning("%s", problem)

    def _outstanding(
        self, loaded: Table, written: Iterable[ChunkProgress], landed: frozenset[str]
    ) -> tuple[list[DataFile], set[str]]:
        """The files to be added, and the chunks in them (or without rows).

        A file is given up, and its chunks are read again, if it shares a chunk with those that
        landed (its progress had been forgotten), or can't be read (the machine lost its power
        before the file was on disk).
        """
        by_file: dict[str | None, set[str]] = {}
        for chunk in written:
            by_file.setdefault(chunk.file, set()).add(chunk.key)
        files, keys = list[DataFile](), by_file.pop(None, set()) - landed
        for file, held in by_file.items():
            assert file is not None
            if held <= landed:
                continue
            found = None if held & landed else self._data_file(loaded, file)
            if found is None:
                logger.warning("%s: giving up %r; reading it again", self._row.table, file)
                plan_again(self._store, self._row.table, self._row.epoch, held - landed)
                continue
            files.append(found)
            keys |= held
        return files, keys

    def _data_file(self, loaded: Table, file: str) -> DataFile | None:
        """The file with its statistics; None if it isn't whole, or isn't in the data folder.

        Raises TableProblem if it can't be reached from here, or if too many files are like that.
        """
        try:
            if not below([folder := data_folder(loaded)], file):
                raise ForeignPath(file, folder)
            return parquet_file_to_data_file(loaded.io, loaded.metadata, file)
        except (FileNotFoundError, pa.ArrowInvalid, ForeignPath) as error:
            self._given_up += 1
            if self._given_up > _GIVE_UPS:
                raise TableProblem(
                    self._row.table,
                    f"files that its workers wrote can't be read here, like {file}:"
                    f" {first_line(error)}",
                    "Workers and this process must see the same warehouse: put it on S3, or on a"
                    " file system that all of them share.",
                ) from error
            return None
        except OSError as error:
            raise TableProblem(
                self._row.table, f"a file that was copied can't be read now: {first_line(error)}"
            ) from error


def _tried_once(loaded: Table) -> Table:
    """The table as one whose commits aren't tried again.

    Before each try, the chunks that landed would have to be looked at anew. The catalog keeps the
    metadata that was ``loaded``, and makes the next one from it, so it must not be changed itself.
    """
    once = {**loaded.metadata.properties, RETRIES: "0"}
    metadata = loaded.metadata.model_copy(update={"properties": once})
    assert loaded.catalog is not None
    return Table(loaded.name(), metadata, loaded.metadata_location, loaded.io, loaded.catalog)
