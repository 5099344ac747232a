"""Whether each table that was copied has its lake table, under the name that it is given now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pyiceberg.exceptions import NoSuchNamespaceError

from cdc_assets.config.source import SourceConfig
from cdc_assets.lake.catalog.catalog import every_namespace, open_catalog
from cdc_assets.lake.standing import was_applied
from cdc_assets.lake.tables import COPYING, SOURCE, TABLE, LakeTable
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.findings import Finding
from cdc_assets.readiness.flushing import known_log
from cdc_assets.readiness.source.enrolment import made_otherwise

# Tables of a catalog that are looked at for one that has another name by now.
_LOOKS = 1_000


def lake_table_findings(config: SourceConfig) -> Iterator[Finding]:
    """One look at the catalog's list; only tables that lack theirs are looked for further."""
    configured = {table.id: table for table in config.tables}
    with known_log(config) as (store, _):
        rows = [] if store is None else store.tables(None, TableState.STREAMING, TableState.COPIED)
        rows = [row for row in rows if store is not None and _is_begun(store, row)]
    copied = [LakeTable(config, configured[r.table], r) for r in rows if r.table in configured]
    if not copied:
        return
    there = set[tuple[str, ...]]()
    for namespace in {lake.namespace for lake in copied}:
        with suppress(NoSuchNamespaceError):
            there |= set(open_catalog(config).list_tables((namespace,)))
    former = dict[str, str]()
    if any(lake.identifier not in there for lake in copied):
        former = _former_names(config)
    for lake in copied:
        if lake.row.state == TableState.COPIED:  # of one that streams, the review tells
            yield from filter(None, [made_otherwise(lake.row, config)])
        if lake.identifier not in there:
            problem = lake.gone(former.get(str(lake.row.table)))
            what = f"{lake.row.table}: {problem.what.removeprefix(f'{lake.row.table}: ')}"
            yield Finding("lake_table_gone", "error", what, problem.remedy)


def _is_begun(store: LogStore, row: TableRow) -> bool:
    """Whether a lake table was made: by a copy, or in mode never by the first merge."""
    landed = (chunk.state == "landed" for chunk in chunks(store, row.table, row.epoch))
    return was_applied(store, row) or any(landed)


def _former_names(config: SourceConfig) -> dict[str, str]:
    """By table, the name of a lake table that was made for it and that no table has now."""
    catalog, found, looks = open_catalog(config), dict[str, str](), _LOOKS
    taken = {config.lake_identifier(table.id) for table in config.tables}
    for namespace in every_namespace(config, catalog):
        listed = list[tuple[str, ...]]()
        with suppress(NoSuchNamespaceError):
            listed = [one for one in catalog.list_tables((namespace,)) if one not in taken]
        for identifier in listed[:looks]:
            looks -= 1
            with suppress(Exception):  # somebody's own, or dropped since: no other one suffers
                told = catalog.load_table(identifier).properties
                if told.get(SOURCE) == config.name and COPYING not in told:
                    found.setdefault(told[TABLE], ".".join(identifier))
    return found
