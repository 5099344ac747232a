"""Giving one table up, once it is out of the configuration: no change of it is staged any more.

It is let go in the log first, so that nothing stages or applies it, and taken out of the
publication then. Maintenance removes its staged files in time, as any others. The lake table stays
as it is, unless it is purged. Who names the table in the configuration again has it copied anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import ConfigurationError, PreflightError
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.copies import drop_copy
from cdc_assets.lake.tables import COPYING, SOURCE, TABLE, LakeTable
from cdc_assets.log.locks import PINS_LOCK, write_lock
from cdc_assets.log.tables import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publications import inserts_publication, published_tables
from cdc_assets.postgres.publishing import withdraw


@dataclass(frozen=True, slots=True)
class DroppedTable:
    """What was done: the publications that had it, and what was purged of the lake."""

    publications: tuple[str, ...]
    purged: str | None = None
    files: int = 0
    bytes: int = 0


def drop_table(pipeline: Pipeline, table: TableId, *, purge: bool = False) -> DroppedTable:
    """Give ``table`` up. If it was done half, another call does the rest.

    Raises ConfigurationError if it is configured, or the log doesn't know it; TableProblem if files
    of the lake table can't be removed; and PreflightError, once all else is done, with the SQL for
    a publication that somebody else owns, or if a lock is in the way there.
    """
    store, config = pipeline.store, pipeline.config
    if any(table == configured.id for configured in config.tables):
        raise ConfigurationError(
            f"{table} is in the configuration of source {config.name}.",
            "Take it out of tables: (or name it in exclude:, where a pattern stands for it), reload"
            " the code location, and drop it then.",
        )
    row = store.table(table)
    if row is None:
        known = {configured.id for configured in config.tables}
        left = ", ".join(str(r.table) for r in store.tables() if r.table not in known and r.oid)
        raise ConfigurationError(
            f"the log of source {config.name} has no table {table}.",
            f"Out of the configuration are: {left or 'none'}.",
        )
    with store.locked(PINS_LOCK):
        store.let_go(table, "it was dropped.")
    done = _purge(pipeline, row) if purge else DroppedTable(())
    names, in_the_way = _withdraw(pipeline, table)
    if in_the_way:
        too = f", and {done.purged} dropped" if done.purged else ""
        raise PreflightError(f"{table} is let go{too}; but {in_the_way}")
    return DroppedTable(names, done.purged, done.files, done.bytes)


def _withdraw(pipeline: Pipeline, table: TableId) -> tuple[tuple[str, ...], str]:
    """The publications that had the table, and why one still has it."""
    main, said, had = pipeline.config.publication, list[str](), list[str]()
    with pipeline.connect_source("drop") as source:
        for name in (main, inserts_publication(main)):
            if table not in (published_tables(source, name) or {}):
                continue
            had.append(name)
            left = withdraw(source, name, [table])
            said += left.refused.values()
            if table in left.busy:
                said.append(f"a lock is in the way of taking it out of {name}: try again.")
    return tuple(had), " ".join(said)


def _purge(pipeline: Pipeline, row: TableRow) -> DroppedTable:
    """Drop the lake table that the source made of the table, with its files, if it is there."""
    with pipeline.store.locked(write_lock(row.table)):
        for lake in _candidates(pipeline.config, row):
            loaded = lake.load()
            told = loaded.properties if loaded is not None else {}
            ours = (told.get(SOURCE), told.get(TABLE)) == (pipeline.config.name, str(row.table))
            if loaded is not None and ours and COPYING not in told:
                return DroppedTable((), lake.sql_name, *drop_copy(lake, loaded))
    return DroppedTable(())


def _candidates(config: SourceConfig, row: TableRow) -> Iterator[LakeTable]:
    """What may be its lake table: the one of its name, then every one of the namespace."""

    def called(name: str | None) -> LakeTable:
        table = TableConfig.model_validate({"name": str(row.table), "as": name})
        with_it = config.model_copy(update={"tables": (*config.tables, table)})
        return LakeTable(with_it, table, row)

    first = called(None)
    yield first
    for *_, name in open_catalog(config).list_tables((config.namespace,)):
        if name != first.name:
            yield called(name)
