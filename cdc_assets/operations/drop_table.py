"""Giving one table up, once it is out of the configuration: no change of it is staged any more.

It is taken out of the publication, and let go in the log, so that nothing stages or applies it.
Maintenance removes its staged files in time, as any others. The lake table stays as it is, unless
it is purged. Who names the table in the configuration again has it copied anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from pyiceberg.exceptions import NoSuchNamespaceError
from pyiceberg.table import Table

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import ConfigurationError, PreflightError, TableProblem
from cdc_assets.lake.catalog.catalog import every_namespace, open_catalog
from cdc_assets.lake.copies import drop_copy
from cdc_assets.lake.tables import COPYING, SOURCE, TABLE, LakeTable
from cdc_assets.log.locks import PINS_LOCK, write_lock
from cdc_assets.log.table_row import TableRow
from cdc_assets.log.tables import GIVEN_UP
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.changing import withdraw
from cdc_assets.postgres.publication.contents import (
    inserts_publication,
    published_in_bulk,
    published_tables,
)
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.relay.first import hold_nothing

_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class DroppedTable:
    """What was done.

    ``publications``: that it was taken out of; ``still_in``: that go on sending its changes, which
    nobody stages: they have all tables, or all of its schema, or are somebody else's. What its
    owner has to do then is in ``refused``, with the SQL. ``purged``: its lake tables,
    with those that it had under another name before.
    """

    publications: tuple[str, ...]
    still_in: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    purged: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0


def drop_table(pipeline: Pipeline, table: TableId, *, purge: bool = False) -> DroppedTable:
    """Give ``table`` up. If it was done half, another call does the rest.

    A purge that is killed may leave files of the lake table. Raises ConfigurationError if the table
    is configured, or the log doesn't know it; PreflightError if a lock is in the way, before
    anything is done; and TableProblem, at the end, if files of the lake table can't be removed.
    """
    row = _given_up(pipeline, table)
    with pipeline.connect_source("drop") as source:
        had = _published(source, pipeline, row) if pipeline.config.decodes else {}
        everything, refused = list[str](), dict[str, str]()
        for name, known in had.items():
            left = withdraw(source, name, [known])
            if known in left.busy:
                raise PreflightError(
                    f"a lock is in the way of taking {known} out of the publication {name}.",
                    "Try again.",
                )
            if known not in left.refused:
                continue
            if published_in_bulk(source, name, row.oid):
                everything.append(name)
            else:
                refused[name] = left.refused[known]
    if not pipeline.store.lock_within(PINS_LOCK, _PATIENCE_SECONDS):
        raise PreflightError(
            f"{table} isn't let go yet: a pin of another table is being made, which waits for"
            " transactions at the source.",
            "Try again; status says what it waits for.",
        )
    try:
        pipeline.store.let_go(table, GIVEN_UP)
        if (log := pipeline.config.log) is not None:
            hold_nothing(pipeline.store, log, table)
    finally:
        pipeline.store.unlock(PINS_LOCK)
    purged, files, size = _purge(pipeline, row, whole=purge)
    still_in = (*everything, *refused)
    taken = tuple(name for name in had if name not in still_in)
    return DroppedTable(taken, still_in, tuple(refused.values()), purged, files, size)


def _given_up(pipeline: Pipeline, table: TableId) -> TableRow:
    store, config = pipeline.store, pipeline.config
    known = {configured.id for configured in config.tables}
    if table in known:
        raise ConfigurationError(
            f"{table} is in the configuration of source {config.name}.",
            "Take it out of tables: (or name it in exclude:, where a pattern stands for it), and"
            " drop it then; the job takes a code location that was reloaded since.",
        )
    row = store.table(table)
    if row is None:
        left = ", ".join(str(r.table) for r in store.tables() if r.table not in known and r.oid)
        raise ConfigurationError(
            f"the log of source {config.name} has no table {table}.",
            f"Out of the configuration are: {left or 'none'}.",
        )
    return row


def _published(source: Connection, pipeline: Pipeline, row: TableRow) -> dict[str, TableId]:
    """The publications that have the table, with its name there: it may be another one by now."""
    main, found = pipeline.config.publication, dict[str, TableId]()
    configured = {table.id for table in pipeline.config.tables}
    for name in (main, inserts_publication(main)):
        for known, oid in (published_tables(source, name) or {}).items():
            if known not in configured and (oid == row.oid if row.oid else known == row.table):
                found[name] = known
    return found


def _purge(pipeline: Pipeline, row: TableRow, *, whole: bool) -> tuple[tuple[str, ...], int, int]:
    """Drop what copies of the table have left half done; ``whole``: its lake table, too."""
    purged, files, size = list[str](), 0, 0
    taken = {pipeline.config.lake_identifier(table.id) for table in pipeline.config.tables}
    with pipeline.store.locked(write_lock(row.table)):
        for lake, loaded in list(_candidates(pipeline.config, row, everywhere=whole)):
            told = loaded.properties
            ours = (told.get(SOURCE), told.get(TABLE)) == (pipeline.config.name, str(row.table))
            if ours and lake.identifier not in taken and (whole or COPYING in told):
                _refuse_shared(lake, loaded)
                done = drop_copy(lake, loaded)
                files, size = files + done[0], size + done[1]
                purged += [lake.sql_name] if COPYING not in told else []
    return tuple(purged), files, size


def _refuse_shared(lake: LakeTable, loaded: Table) -> None:
    """Raise TableProblem if another table has files in its folder, as one that was renamed has."""
    catalog = open_catalog(lake.config)
    for *namespace, name in catalog.list_tables((lake.namespace,)):
        place = catalog.load_table((*namespace, name)).location().rstrip("/")
        if name != lake.name and f"{place}/".startswith(f"{loaded.location().rstrip('/')}/"):
            raise TableProblem(
                lake.row.table,
                f"the lake table {name} has its files in the folder of {lake.name}",
                f"Drop it in the catalog, without purging its folder: drop table {lake.sql_name};",
            )


def _candidates(
    config: SourceConfig, row: TableRow, *, everywhere: bool
) -> Iterator[tuple[LakeTable, Table]]:
    """What may be its lake table: the one of its name, then every one of our namespaces.

    What it was called, and in which namespace, went with its entry in the configuration. So
    ``everywhere`` others are looked at, too, as far as the catalog shows them to us.
    """

    def called(name: str | None, namespace: str | None = None) -> LakeTable:
        settings = {"as_": name, "namespace": namespace}
        table = TableConfig(name=str(row.table)).model_copy(update=settings)
        with_it = config.model_copy(update={"tables": (*config.tables, table)})
        return LakeTable(with_it, table, row)

    first = called(None)
    if (loaded := first.load()) is not None:
        yield first, loaded
    catalog = open_catalog(config)
    spaces = every_namespace(config, catalog) if everywhere else sorted(config.namespaces)
    for namespace in spaces:
        # One of ours says what is amiss; of others' it says that they aren't ours.
        passed = (TableProblem,) if namespace in config.namespaces else (Exception,)
        there = list[tuple[str, ...]]()
        with suppress(NoSuchNamespaceError, *passed):  # nothing was ever copied
            there = list(catalog.list_tables((namespace,)))
        for *_, name in there:
            found = called(name, namespace)
            with suppress(*passed):  # another table's, which isn't where ours would be
                if found.identifier != first.identifier and (loaded := found.load()) is not None:
                    yield found, loaded
