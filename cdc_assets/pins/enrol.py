"""Enrolment: the configured tables that are followed, their modes, and their publications.

A table is described, judged and registered; then it is published, and waits for its pin (``pins``).
A table that can't be followed is parked by name with the way out, and the others go on. A table is
never published if Postgres would then refuse its UPDATE or DELETE (``postgres.identity``): with
``mode: append`` it goes into the publication of inserts, in any other mode it is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import psycopg

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import PreflightError, TableProblem
from cdc_assets.log.states import SETTLED, TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.masks import rules_of
from cdc_assets.pins.markers import publish_markers
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.changing import Publishing, publish, withdraw
from cdc_assets.postgres.publication.contents import (
    inserts_publication,
    publication_oid,
    published_tables,
    row_filters,
)
from cdc_assets.postgres.publication.row_filters import is_published
from cdc_assets.postgres.publication.shape import refuse_partial_publication
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.session.waits import locked
from cdc_assets.postgres.slots import on_standby
from cdc_assets.readiness.queries import refuse_watermark
from cdc_assets.readiness.source.enrolment import (
    Facts,
    facts_of,
    refuse_excluded_key,
    refuse_inherited,
    refuse_made_from_masked,
    refuse_made_otherwise,
    refuse_masks,
    refuse_mode,
    refuse_unmasked_name,
    without_identity,
)
from cdc_assets.readiness.source.planning import plannable, refuse_row_filter, refuse_unplannable
from cdc_assets.relay.first import logged_inserts

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OTHERS_WISH = (
    "its copy was asked for with another columns.mask, mask_salt or where than this process has:"
    " restart the flusher with that configuration, or ask for the copy again (resync) with this one"
)


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A table as it is to be registered."""

    table: SourceTable
    mode: str
    inserts_only: bool
    left_out: tuple[str, ...]
    """Generated columns that Postgres doesn't send; ``table`` is without them."""
    withheld: tuple[int, ...]
    """Numbers of excluded columns that the publication doesn't send; ``table`` is without them."""


def described(
    source: Connection,
    config: SourceConfig,
    tables: Sequence[TableId],
    filtered: Collection[TableId] = (),
    *,
    again: bool = False,
) -> dict[TableId, Enrolled | TableProblem | psycopg.errors.LockNotAvailable]:
    """Each table as the source has it now, without the columns that the stream doesn't carry.

    A TableProblem is anything that would make the copy or the stream wrong, or break others.
    ``filtered``: the tables whose row filter in the publication is known to be ours. ``again``:
    under a snapshot, where nothing can be tried; their filters were.
    """
    facts = facts_of(source, config, tables)
    planned = plannable(source, _readable(facts))
    found = dict[TableId, Enrolled | TableProblem | psycopg.errors.LockNotAvailable]()
    for table in tables:
        try:
            ours = table in filtered
            found[table] = _judged(
                source, config, table, facts, planned, filtered=ours, again=again
            )
        except (TableProblem, psycopg.errors.LockNotAvailable) as problem:
            found[table] = problem
    return found


def _readable(facts: Facts) -> list[TableId]:
    """The heaps of tables that the role may read, as far as the catalog tells."""
    return [
        heap
        for table, names in facts.heaps.items()
        if not isinstance(names, TableProblem)
        and isinstance(found := facts.tables[table], SourceTable)
        and not facts.missing[found.oid]
        for heap in names
    ]


def _judged(
    source: Connection,
    config: SourceConfig,
    table: TableId,
    facts: Facts,
    planned: Collection[TableId],
    *,
    filtered: bool,
    again: bool,
) -> Enrolled:
    """Raises TableProblem or LockNotAvailable. ``planned``: the heaps that can be planned."""
    found, wanted = _there(facts.tables[table]), config.table(table)
    refuse_mode(found, wanted)
    refuse_watermark(config, found, facts.unseen.get(found.oid))
    refuse_excluded_key(found, wanted)
    refuse_masks(found, wanted)
    parts = _there(facts.heaps[table])
    unsent = facts.unsent(found)
    for missing in facts.missing[found.oid]:
        raise TableProblem(table, missing.message.removesuffix("."), missing.remedy)
    refuse_unplannable(source, found, [heap for heap in parts if heap not in planned])
    refuse_inherited(facts, found, wanted)
    refuse_made_from_masked(facts, found, wanted)
    inserts_only = config.publishes and bool(without_identity(source, config, facts, found))
    if not again:
        refuse_row_filter(source, config, found, parts, inserts_only=inserts_only)
    for problems in (facts.under_root, facts.unlogged):
        if (problem := problems.get(table)) is not None:
            raise problem
    if config.publishes:
        excluded = wanted.columns.exclude
        refuse_partial_publication(
            facts.shapes,
            config.publication,
            found,
            excluded,
            inserts_only=inserts_only,
            filtered=None if filtered or wanted.where is not None else False,
        )
    return Enrolled(
        found.without([c.name for c in unsent]),
        wanted.mode or "mirror",
        inserts_only,
        tuple(c.name for c in unsent if c.generated),
        tuple(c.number for c in unsent if not c.generated),
    )


def _there(found: T | TableProblem) -> T:
    if isinstance(found, TableProblem):
        raise found
    return found


def _to_be_described(row: TableRow | None) -> bool:
    return row is None or not row.oid or (row.state == TableState.WAITING and not row.snapshot_lsn)


def _waits_for(who: str) -> str:
    return f"somebody has locked it, or is about to: {who}; it goes on once that is over"


def register_tables(source: Connection, config: SourceConfig, store: LogStore) -> None:
    """Describe every unknown table, and again every waiting table that has no chunk read yet."""
    known = {row.table: row for row in store.tables()}
    for row in known.values():
        if row.state in (TableState.COPYING, *SETTLED):
            with suppress(TableProblem):
                refuse_made_otherwise(store, row, config)
    configured = {table.id for table in config.tables}
    # In the order of who marks them as followed, all in one commit, too, and new ones in one that
    # no configuration has a say in: else two of them may deadlock.
    ordered = [*(table for table in known if table in configured), *sorted(configured - {*known})]
    wanted = [table for table in ordered if _to_be_described(known.get(table))]
    if not wanted:
        return
    busy = locked(source, wanted)
    filtered = {row.table for row in known.values() if row.row_filter is not None}
    asked = [table for table in wanted if table not in busy]
    free = described(source, config, asked, filtered)
    for enrolled in [found for found in free.values() if isinstance(found, Enrolled)]:
        try:
            refuse_unmasked_name(enrolled.table, config, known.values())
        except TableProblem as problem:
            free[enrolled.table.id] = problem
    for table, alone in logged_inserts(config, store).items():
        if isinstance(found := free.get(table), Enrolled):
            free[table] = replace(found, inserts_only=alone)
    # One commit, and few round trips, however many they are.
    with store.connection.transaction(), store.connection.pipeline():
        for table in wanted:
            if table in busy:
                store.note_waiting(table, _waits_for(busy[table]))
            else:
                _register(config, store, table, free[table], known.get(table))


def _register(
    config: SourceConfig,
    store: LogStore,
    table: TableId,
    found: Enrolled | TableProblem | psycopg.errors.LockNotAvailable,
    row: TableRow | None,
) -> None:
    if isinstance(found, psycopg.errors.LockNotAvailable):  # since just now
        store.note_waiting(table, _waits_for("another session"))
    elif isinstance(found, TableProblem):
        if row is None or row.reason != found.reason:
            logger.warning("%s", found)
        if row is None or not row.oid:
            store.park_unknown(table, found.reason)
        else:
            store.park(table, found.reason)
    elif row is not None and not _as_wished(config, row):
        if row.reason != _OTHERS_WISH:
            logger.warning("%s: %s", table, _OTHERS_WISH)
        store.note_waiting(table, _OTHERS_WISH)
    else:
        if found.left_out and (row is None or row.left_out != found.left_out):
            logger.warning(
                "%s: Postgres doesn't send its generated columns (%s); the lake table lacks them",
                table,
                ", ".join(found.left_out),
            )
        store.add_table(
            found.table,
            config.table(table).columns.exclude,
            found.mode,
            masks=rules_of(config.masks(table) or {}),
            where=config.row_filters.get(table),
            inserts_only=found.inserts_only,
            left_out=found.left_out,
            withheld=found.withheld,
        )


def _as_wished(config: SourceConfig, row: TableRow) -> bool:
    """Whether a copy by this configuration is as whoever asked for it wanted it."""
    masks, where = rules_of(config.masks(row.table) or {}), config.row_filters.get(row.table)
    return replace(row, masks=masks, filter_wanted=where).as_wished


def publish_tables(
    source: Connection, config: SourceConfig, store: LogStore, told: Collection[TableId] = ()
) -> list[TableRow]:
    """Complete the publications and return the tables that wait for a pin, and may be given one.

    ``told``: tables whose row says what else they wait for.

    Raises PreflightError if there is no publication and the role can't make it.
    """
    configured = {table.id for table in config.tables}
    rows = [
        row
        for row in store.tables()
        if row.table in configured and row.state != TableState.PARKED and row.oid
    ]
    # Each locked table would cost a wait.
    away = locked(source, [row.table for row in rows if row.state == TableState.WAITING])
    rows = [row for row in rows if row.table not in away]
    inserts = inserts_publication(config.publication)
    first = publication_oid(source, config.publication) is None
    whole = [row.table for row in rows if not row.inserts_only]
    alone = [row.table for row in rows if row.inserts_only]
    # The configuration's: what the log says of a filter is compared, and never made a statement.
    filters = config.row_filters
    settled = {row.table for row in rows if row.snapshot_lsn is not None}
    main = publish(source, config.publication, whole, filters=filters, settled=settled)
    publish_markers(source, config)
    refused, busy = dict(main.refused), set(main.busy)
    # If both are made before the slot, the stream can ask for both from its beginning on.
    if first or alone:
        try:
            beside = publish(
                source,
                inserts,
                alone,
                beside=config.publication,
                filters=filters,
                settled=settled,
            )
        except PreflightError as error:
            beside = Publishing(dict.fromkeys(alone, str(error)))
        refused |= beside.refused
        busy |= beside.busy
    for name, elsewhere in ((config.publication, alone), (inserts, whole)):
        present = published_tables(source, name) or {}
        moved = withdraw(source, name, [table for table in elsewhere if table in present])
        busy |= moved.busy
        refused |= moved.refused
    on_primary = refused if on_standby(source) else {}  # they go on once that is done there
    for table, why in refused.items():
        if table in on_primary:
            store.note_waiting(table, why)
            continue
        logger.error("parked: %s: %s", table, why)
        store.park(table, why)
    holders = locked(source, sorted(busy), against_alter=True) if busy else {}
    for table in busy:
        store.note_waiting(table, _waits_for(holders.get(table, "another session")))
    for table, who in away.items():
        store.note_waiting(table, _waits_for(who))
    for row in rows:
        waits = row.state == TableState.WAITING and row.as_wished
        known = row.table in busy or row.table in told or row.table in on_primary
        if waits and row.reason and not known:
            store.note_waiting(row.table, None)
    ready = [
        row
        for row in rows
        if row.state == TableState.WAITING
        and row.as_wished
        and row.table not in refused
        and row.table not in busy
    ]
    return as_published(source, config, ready)


def as_published(
    source: Connection, config: SourceConfig, rows: Sequence[TableRow]
) -> list[TableRow]:
    """Those whose row filter is theirs in the publication, which ``row_filter`` has from there."""
    both = (config.publication, inserts_publication(config.publication))
    main, beside = (row_filters(source, name, [row.oid for row in rows]) for name in both)
    found = list[TableRow]()
    for row in rows:
        now = (beside if row.inserts_only else main).get(row.oid)
        if row.snapshot_lsn is not None:
            found.append(row)
        elif is_published(source, row.table, config.row_filters.get(row.table), now):
            found.append(replace(row, row_filter=now))
    return found
