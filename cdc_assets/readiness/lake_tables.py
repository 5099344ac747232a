"""Whether each table that was copied has its lake table, under the name that it is given now."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pyiceberg.exceptions import NoSuchNamespaceError

from cdc_assets.config.source import SourceConfig
from cdc_assets.lake.catalog.catalog import open_catalog
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.states import TableState
from cdc_assets.messages.findings import Finding
from cdc_assets.readiness.flushing import known_log
from cdc_assets.readiness.source.enrolment import masked_otherwise


def lake_table_findings(config: SourceConfig) -> Iterator[Finding]:
    """One look at the catalog's list; only tables that lack theirs are looked for further."""
    configured = {table.id: table for table in config.tables}
    with known_log(config) as (store, _):
        rows = [] if store is None else store.tables(None, TableState.STREAMING, TableState.COPIED)
    copied = [LakeTable(config, configured[r.table], r) for r in rows if r.table in configured]
    if not copied:
        return
    there = set[tuple[str, ...]]()
    for namespace in {lake.namespace for lake in copied}:
        with suppress(NoSuchNamespaceError):
            there |= set(open_catalog(config).list_tables((namespace,)))
    for lake in copied:
        if lake.row.state == TableState.COPIED:  # of one that streams, the review tells
            yield from filter(None, [masked_otherwise(lake.row, config)])
        if lake.identifier not in there:
            problem = lake.gone()
            what = f"{lake.row.table}: {problem.what.removeprefix(f'{lake.row.table}: ')}"
            yield Finding("lake_table_gone", "error", what, problem.remedy)
