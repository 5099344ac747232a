"""A schema change that no row change has followed yet."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

import psycopg

from cdc_assets.errors import TableProblem
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.relation import Told, altered, told_by_catalog
from cdc_assets.log.states import TableState
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn

# How often the source's catalog is searched for schema changes that no row of the log has.
_CATALOG_SECONDS = 10.0
# A flusher that streams is at the end of the WAL within about its flush interval.
_CATCH_UP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Look:
    """A table's relation as the source's catalog had it before ``lsn``."""

    told: Told
    lsn: Lsn


class Altered:
    """The tables with a schema change that no row may have, looked for every ten seconds."""

    def __init__(self, pipeline: Pipeline, tables: Collection[TableId]) -> None:
        self._pipeline = pipeline
        self._tables = tables
        self._found = dict[TableId, Look]()
        self._ready = dict[TableId, Look]()
        self._looked_at = -_CATALOG_SECONDS

    def tables(self) -> frozenset[TableId]:
        """Those whose log is in the store up to the look that found them: nobody waits for it.

        Without those that were tried since the last look; a source that is down alters none.
        """
        if time.monotonic() - self._looked_at >= _CATALOG_SECONDS:
            self._looked_at = time.monotonic()
            self._found = self._search()
        store = self._pipeline.store
        flushed = (store.flushed_lsn() if self._found else None) or Lsn.ZERO
        self._ready = {table: look for table, look in self._found.items() if look.lsn <= flushed}
        if len(self._ready) < len(self._found):  # else an idle flusher would take its time
            store.note_awaited(min(one.lsn for one in self._found.values() if one.lsn > flushed))
        return frozenset(self._ready)

    def look(self, table: TableId) -> Look | None:
        """The look at a table of :meth:`tables`; None for any other."""
        return self._ready.get(table)

    def tried(self, table: TableId) -> None:
        """The table had a turn: with its look, if it had one; else that stands."""
        if self._ready.pop(table, None) is not None:
            del self._found[table]

    def _search(self) -> dict[TableId, Look]:
        """Looks at the tables that are altered now; those before it stand."""
        store, publication = self._pipeline.store, self._pipeline.config.publication
        rows = {row.table: row for row in store.tables() if row.table in self._tables}
        fresh = dict[TableId, Told]()
        try:
            with self._pipeline.connect_source("schema") as source:
                now = altered(source, list(rows.values()), publication)
                for table in now - self._found.keys():
                    with suppress(TableProblem):  # it is gone
                        told = told_by_catalog(source, rows[table], publication)
                        if not told.same(rows[table]):
                            fresh[table] = told
                # Only then, since it writes to the source's WAL.
                lsn = current_lsn(source) if fresh else Lsn.ZERO
        except (psycopg.OperationalError, psycopg.InternalError):  # a server in recovery has no WAL
            return {}
        standing = {table: self._found[table] for table in now & self._found.keys()}
        return standing | {table: Look(told, lsn) for table, told in fresh.items()}


def look(pipeline: Pipeline, table: TableId) -> Look | None:
    """Read the table's relation from the catalog; None if the lake has the same.

    Every row of another relation committed before the LSN. Raises TableProblem if the table is
    gone.
    """
    row = pipeline.store.table(table)
    if row is None or row.state != TableState.STREAMING:
        return None
    with pipeline.connect_source("schema") as source:
        told = told_by_catalog(source, row, pipeline.config.publication)
        return None if told.same(row) else Look(told, current_lsn(source))


def relation_ahead(pipeline: Pipeline, lake: LakeTable, seen: Look | None) -> Told | None:
    """A relation of the catalog that no row of the log has yet, once no older row can come.

    An ALTER TABLE waits for all transactions that wrote to the table. So if the catalog had this
    relation before some LSN, and still has it, and the log is applied up to that LSN, no row of the
    previous relation is to come.
    """
    store, table = pipeline.store, lake.row.table
    if seen is None:
        with suppress(TableProblem):  # a table that is gone has no other relation
            seen = look(pipeline, table)
        if seen is None:
            return None
    if not store.await_flushed(seen.lsn, _CATCH_UP_SECONDS, while_active=True):
        return None  # the next one looks again
    if seen.told.same(lake.row):
        return None
    try:
        with pipeline.connect_source("schema") as source:
            now = told_by_catalog(source, lake.row, pipeline.config.publication)
    except (psycopg.OperationalError, TableProblem):  # it is gone since
        return None
    return now if now == seen.told else None
