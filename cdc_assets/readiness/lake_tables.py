"""Whether each table that was copied has its lake table, under the name that it is given now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
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
_LOOKS, _LOOK_SECONDS = 1_000, 10.0


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
    # A catalog may list a name in lower case.
    gone = {
        lake.identifier
        for lake in copied
        if lake.identifier not in there and not open_catalog(config).table_exists(lake.identifier)
    }
    if gone:
        former = _former_names(
            config, {str(one.row.table) for one in copied if one.identifier in gone}
        )
    for lake in copied:
        if lake.row.state == TableState.COPIED:  # of one that streams, the review tells
            yield from filter(None, [made_otherwise(lake.row, config)])
        if lake.identifier in gone:
            problem = lake.gone(former.get(str(lake.row.table), ""))
            what = f"{lake.row.table}: {problem.what.removeprefix(f'{lake.row.table}: ')}"
            yield Finding("lake_table_gone", "error", what, problem.remedy)


def _is_begun(store: LogStore, row: TableRow) -> bool:
    """Whether a lake table was made: by a copy, or in mode never by the first merge."""
    return was_applied(store, row) or any(
        chunk.state == "landed" for chunk in chunks(store, row.table, row.epoch)
    )


def _former_names(config: SourceConfig, wanted: AbstractSet[str]) -> dict[str, str]:
    """By table, the name of a lake table that was made for it and that no table has now.

    As far as the catalog shows it to us in some seconds; ``wanted``: those that are looked for.
    """
    catalog, found, looks = open_catalog(config), dict[str, str](), _LOOKS
    ends = time.monotonic() + _LOOK_SECONDS
    taken = {config.lake_identifier(table.id) for table in config.tables}
    for namespace in every_namespace(config, catalog):
        listed = list[tuple[str, ...]]()
        with suppress(Exception):  # it may not be ours to see
            listed = [one for one in catalog.list_tables((namespace,)) if one not in taken]
        for identifier in listed[:looks]:
            if wanted <= found.keys() or time.monotonic() > ends:
                return found
            looks -= 1
            with suppress(Exception):  # somebody's own, or dropped since: no other one suffers
                told = catalog.load_table(identifier).properties
                if told.get(SOURCE) == config.name and COPYING not in told:
                    found.setdefault(told[TABLE], ".".join(identifier))
    return found
