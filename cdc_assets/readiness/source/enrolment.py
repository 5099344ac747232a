"""Rules that keep a table from being enrolled, shared by ``check`` and ``pins.enrol``.

What they ask of the source is read for many tables at once (:func:`facts_of`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import TableProblem
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.masks import makes, rules_of
from cdc_assets.messages.findings import Finding
from cdc_assets.messages.texts import command
from cdc_assets.poller.relations import described, unseen
from cdc_assets.postgres.catalog import Column, SourceTable, heap_names
from cdc_assets.postgres.generated import made_from
from cdc_assets.postgres.names import TableId, lake_column
from cdc_assets.postgres.publication.contents import (
    SentColumns,
    filter_columns,
    inserts_publication,
    published_in_bulk,
    published_tables,
    sent_columns,
)
from cdc_assets.postgres.publication.identity import Trouble, children, remedy, sentence, troubles
from cdc_assets.postgres.publication.row_filters import same_text
from cdc_assets.postgres.publication.shape import Published, published_shapes
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.source.partitions import under_roots, unlogged
from cdc_assets.readiness.source.rights import missing_rights

# The alternative, appended to the SQL of the first way out.
OR_INSERTS = "-- or set mode: append, which then gets inserts and truncates alone"

# A copy alone has every column with stored values.
_STORED = SentColumns(("", "s"), {})


@dataclass(frozen=True, slots=True)
class Facts:
    """What the source's catalogs have on some tables, by name or oid."""

    tables: Mapping[TableId, SourceTable | TableProblem]
    heaps: Mapping[TableId, Sequence[TableId] | TableProblem]
    sent: SentColumns
    missing: Mapping[int, Sequence[Finding]]
    """Rights that the role lacks."""
    heirs: Mapping[int, Sequence[TableId]]
    troubles: Mapping[int, Sequence[Trouble]]
    under_root: Mapping[TableId, TableProblem]
    unlogged: Mapping[TableId, TableProblem]
    published: Mapping[str, Mapping[TableId, int] | None]
    """The tables of both publications; None for one that isn't there."""
    shapes: Mapping[str, Published]
    """What both send, if they are there."""
    unseen: Mapping[int, TableId]
    """In query mode: by oid, what transactions that aren't seen here write to."""
    made_from: Mapping[int, Mapping[str, AbstractSet[str]]]
    """By oid and generated column, the columns that it is made from; of tables with masks."""

    def unsent(self, table: SourceTable) -> list[Column]:
        """Columns that the stream lacks: generated ones, and those that a list leaves out."""
        return [
            column
            for column in table.columns
            if not self.sent.has(table.oid, column.number, column.generated)
        ]


def facts_of(source: Connection, config: SourceConfig, tables: Sequence[TableId]) -> Facts:
    """Read them: a dozen statements, which wait for no lock, for however many tables."""
    found = described(source, config, tables)
    there = [table for table in found.values() if isinstance(table, SourceTable)]
    oids = [table.oid for table in there]
    sent = sent_columns(source, config.publication, oids) if config.publishes else _STORED
    both = (config.publication, inserts_publication(config.publication))
    facts = Facts(
        found,
        heap_names(source, there),
        sent,
        {},
        children(source, oids),
        _troubles(source, config, oids, sent) if config.publishes else {},
        under_roots(source, config, there) if config.publishes else {},
        unlogged(source, there) if config.publishes else {},
        {name: published_tables(source, name) for name in both} if config.publishes else {},
        published_shapes(source, both, oids) if config.publishes else {},
        unseen(source, oids) if config.query is not None else {},
        made_from(source, [t.oid for t in there if config.table(t.id).columns.mask]),
    )
    wanted = {t.oid: unread(config.table(t.id), facts.unsent(t)) for t in there}
    by_query = config.query is not None
    return replace(facts, missing=missing_rights(source, wanted, by_query=by_query))


def _troubles(
    source: Connection, config: SourceConfig, oids: Sequence[int], sent: SentColumns
) -> Mapping[int, Sequence[Trouble]]:
    filtered = filter_columns(source, config.publication, oids)
    return troubles(source, oids, sent.generated, sent.listed, filtered)


def unread(table: TableConfig, unsent: Collection[Column]) -> set[str]:
    """The columns that no statement of ours reads."""
    return {*table.columns.exclude, *(c.name for c in unsent if c.generated)}


def inherited(table: TableId, found: Sequence[TableId]) -> TableProblem:
    """The problem of a table that others inherit from, unless ``only`` is set."""
    listed = ", ".join(map(str, found[:5])) + (", …" if len(found) > 5 else "")
    return TableProblem(
        table,
        f"a query of it shows rows of tables that inherit from it ({listed}), whose changes are"
        " their own",
        "Replicate those as tables of their own, and set only: true for the rows of this one.",
    )


def refuse_inherited(facts: Facts, found: SourceTable, table: TableConfig) -> None:
    """Raise TableProblem if others inherit from the table, unless ``only`` is set."""
    if (heirs := facts.heirs.get(found.oid)) and not table.only:
        raise inherited(found.id, heirs)


def without_identity(
    source: Connection, config: SourceConfig, facts: Facts, found: SourceTable
) -> Sequence[Trouble]:
    """Why only its inserts can be published, if so; raises TableProblem unless mode allows that."""
    if not (wrong := facts.troubles.get(found.oid, ())):
        return ()
    what, way_out = sentence(found.id, wrong), remedy(wrong)
    if any(trouble.refused for trouble in wrong):
        if config.table(found.id).mode != "append":
            way_out = f"{way_out} {OR_INSERTS}"
        elif not published_in_bulk(source, config.publication, found.oid):
            return wrong
        else:
            what += (
                f"; and the publication {config.publication} has it with all tables, or its"
                " schema, so that it can't be withdrawn alone"
            )
    raise TableProblem(found.id, what, way_out)


def lake_names(found: SourceTable, table: TableConfig) -> Mapping[str, str]:
    """What its columns are called in the lake."""
    names = {c.name for c in found.columns} - {*table.columns.exclude}
    return {name: lake_column(name, table.columns.rename) for name in names}


def refuse_mode(found: SourceTable, table: TableConfig) -> None:
    """Raise TableProblem if the table has a column that its mode adds, or lacks its key."""
    mode = table.mode or "mirror"
    kept = {*lake_names(found, table).values()}
    if taken := kept & set(table.added_columns(mode)):
        by = "metadata" if min(taken) in table.metadata else f"mode {mode}"
        raise TableProblem(
            found.id,
            f"it has a column {min(taken)}, which {by} adds",
            "Name it in columns.exclude or columns.rename, or choose another mode.",
        )
    if mode == "soft_delete" and not found.key_columns:
        raise TableProblem(
            found.id,
            "without a key no row can be marked as deleted",
            "Add a primary key, or choose mode append or mirror.",
        )


def refuse_masks(found: SourceTable, table: TableConfig) -> None:
    """Raise TableProblem if a masked column is missing, or belongs to the key."""
    masked = set(table.columns.mask)
    if unknown := masked - {column.name for column in found.columns}:
        raise TableProblem(
            found.id,
            f"columns.mask names {min(unknown)}, and it has no such column",
            "Correct columns.mask: if the column was renamed, it would be replicated as it is.",
        )
    if hidden := masked & set(found.key_columns):
        raise TableProblem(
            found.id,
            f"columns.mask names a column of its key ({min(hidden)})",
            "Rows are found by their key, in the source too. Mask other columns, or give the table"
            " a key without it.",
        )


def made_otherwise(row: TableRow, config: SourceConfig) -> Finding | None:
    """Why a table's log and lake can't be continued: it is masked or filtered otherwise now."""
    return _masked_otherwise(row, config) or _filtered_otherwise(row, config)


def _filtered_otherwise(row: TableRow, config: SourceConfig) -> Finding | None:
    if config.masks(row.table) is None:
        return None  # it isn't configured
    where = config.table(row.table).where
    if same_text(where, row.filter_wanted) or (where and same_text(where, row.row_filter)):
        return None
    return Finding(
        "filtered_otherwise",
        "error",
        f"{row.table}: where isn't what it was when it was copied, which was"
        f" {row.filter_wanted or 'nothing'}: the lake would have rows of both.",
        "Put it back, or copy it anew: what the lake had before stays in its older snapshots until"
        f" these expire. {command('resync', row.table)}",
    )


def _masked_otherwise(row: TableRow, config: SourceConfig) -> Finding | None:
    wanted, there = config.masks(row.table), {column.name for column in row.columns}
    salts = makes(row.masks.values(), config.salt)
    had, has = (
        {name: rule for name, rule in rules.items() if name in there}
        for rules in (row.masks, rules_of(wanted or {}))
    )
    if salts and (wanted is None or had == has):
        return None
    what = "mask_salt is another one than" if not salts else "columns.mask isn't what it was"
    way_out = (
        "Put it back, or copy it anew: what the lake had before stays in its older snapshots until"
        " these expire; under another name (as:, namespace:) it stays until you drop that table."
        f" {command('resync', row.table)}"
    )
    if wanted is None:
        way_out = (
            "It is out of the configuration: put mask_salt back, or give it up:"
            f" {command('drop-table', row.table)}"
        )
    return Finding(
        "masked_otherwise",
        "error",
        f"{row.table}: {what} when it was copied: its rows would be masked in two ways.",
        way_out,
    )


def refuse_made_otherwise(store: LogStore, row: TableRow, config: SourceConfig) -> None:
    """Park the table and raise TableProblem if it was masked or filtered otherwise than now.

    The log learns masks of columns that the table doesn't have yet, or has no more.
    """
    if row.state == TableState.PARKED:
        return
    if (found := made_otherwise(row, config)) is None:
        wanted = config.masks(row.table)
        if wanted is not None and rules_of(wanted) != row.masks:
            store.set_masks(row.table, rules_of(wanted))
        return
    what = found.message.removeprefix(f"{row.table}: ").removesuffix(".")
    problem = TableProblem(row.table, f"{found.code}: {what}", found.remedy)
    store.park(row.table, problem.reason, row.epoch)
    raise problem


def refuse_unmasked_name(
    found: SourceTable, config: SourceConfig, known: Iterable[TableRow]
) -> None:
    """Raise TableProblem if the table, or a column of it, was masked under another name."""
    masked = config.table(found.id).columns.mask
    for row in (row for row in known if row.oid == found.oid and row.masks):
        if row.table != found.id and not masked:
            raise TableProblem(
                found.id,
                f"it was called {row.table}, of which columns are masked, and under its new name"
                " none is",
                "Name it in tables: with columns.mask, or in exclude:.",
            )
        names = {column.number: column.name for column in row.columns}
        for column in found.columns:
            before = names.get(column.number, column.name)
            if before == column.name or column.number not in row.mask_numbers:
                continue
            if column.name not in {*masked, *config.table(found.id).columns.exclude}:
                raise TableProblem(
                    found.id,
                    f"its column {before}, which is masked, is called {column.name} now, which"
                    " columns.mask doesn't name",
                    f"Name {column.name} there. To have it as it is: take the table out of tables:,"
                    f" and put it in again after: {command('drop-table', found.id)}",
                )


def refuse_made_from_masked(
    facts: Facts, found: SourceTable, table: TableConfig, masked: Collection[str] = ()
) -> None:
    """Raise TableProblem if a generated column shows what a masked one has.

    ``masked``: columns that are masked beside those that the configuration names.
    """
    hidden = {*table.columns.mask, *masked}
    covered = {*hidden, *table.columns.exclude}
    sent = {c.name for c in found.columns} - {c.name for c in facts.unsent(found)}
    for name, others in facts.made_from.get(found.oid, {}).items():
        if (shown := others & hidden) and name in sent - covered:
            raise TableProblem(
                found.id,
                f"its generated column {name} is made from {min(shown)}, which is masked",
                f"Name {name} in columns.mask or columns.exclude, too.",
            )


def shown_by_generated(
    source: Connection, config: SourceConfig, rows: Sequence[TableRow]
) -> Iterator[tuple[TableRow, Finding]]:
    """Tables that stream, and of which a generated column shows a masked one since then."""
    masked = {row.oid: row for row in rows if config.masks(row.table)}
    made = made_from(source, [*masked]) if masked else {}
    if not made:
        return
    facts = facts_of(source, config, [masked[oid].table for oid in made])
    for row in masked.values():
        found = facts.tables.get(row.table)
        if isinstance(found, SourceTable):
            names = [c.name for c in found.columns if c.number in row.mask_numbers]
            try:
                refuse_made_from_masked(facts, found, config.table(row.table), names)
            except TableProblem as problem:
                message = f"{row.table}: {problem.what}."
                yield row, Finding("mask_refused", "error", message, problem.remedy)


def refuse_excluded_key(found: SourceTable, table: TableConfig) -> None:
    """Raise TableProblem if a column of its key is excluded."""
    if hidden := set(table.columns.exclude) & set(found.key_columns):
        raise TableProblem(
            found.id,
            f"columns.exclude names a column of its key ({min(hidden)})",
            "Keep the key: rows can't be told apart without it.",
        )
