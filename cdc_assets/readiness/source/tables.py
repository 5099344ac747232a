"""Findings of ``check`` about one table: whether it can be followed, and as configured.

Nothing is changed. ``pins.enrol`` registers and publishes tables by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import yaml

from cdc_assets.config.source import SourceConfig
from cdc_assets.config.tables import TableConfig
from cdc_assets.errors import TableProblem
from cdc_assets.messages.findings import Finding
from cdc_assets.messages.texts import listed, named, one_line
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.publication.contents import GENERATED_COLUMNS
from cdc_assets.postgres.publication.identity import remedy, sentence
from cdc_assets.postgres.publication.shape import refuse_partial_publication
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.types import mapping
from cdc_assets.readiness.queries import query_findings
from cdc_assets.readiness.source.enrolment import (
    Facts,
    lake_names,
    refuse_excluded_key,
    refuse_inherited,
    refuse_made_from_masked,
    refuse_masks,
    refuse_mode,
    without_identity,
)
from cdc_assets.readiness.source.planning import filter_findings, refuse_unplannable
from cdc_assets.readiness.source.publications import publishable
from cdc_assets.readiness.source.rights import unlockable
from cdc_assets.readiness.strategy import why_pinned


def table_findings(
    connection: Connection, config: SourceConfig, table: TableConfig, facts: Facts
) -> Iterator[Finding]:
    """What is to be said of one of the tables that ``facts`` is about."""
    found = facts.tables[table.id]
    if isinstance(found, TableProblem):
        yield _error("table_missing", found)
        return
    follows = config.decodes
    yield from query_findings(connection, config, table, found, facts.unseen.get(found.oid))
    identity = [*_identity(connection, config, table, found, facts)] if follows else []
    yield from identity
    yield from _by_catalogs(found, table, facts)
    inserts_only = any(finding.code == "inserts_only" for finding in identity)
    if follows and not identity and found.replica_identity != "f":
        yield from _toast(connection, found, table)
    left_out = facts.unsent(found)
    names = {c.name for c in left_out}
    if not isinstance(parts := facts.heaps[found.id], TableProblem):
        filtering = [*filter_findings(connection, config, found, parts, inserts_only=inserts_only)]
        if not facts.missing[found.oid]:
            yield from _refused("table_unplannable", refuse_unplannable, connection, found, parts)
            yield from filtering
        # Published without its identity, or by such a filter, Postgres would refuse its changes.
        in_the_way = {"replica_identity", "row_filter"} & {f.code for f in [*identity, *filtering]}
        if follows and not in_the_way:
            yield from publishable(connection, config, found, facts, inserts_only=inserts_only)
        if table.where is not None and "row_filter" not in in_the_way:
            rows = f"{table.name}: only its rows where {one_line(table.where)} are replicated."
            yield Finding("filtered_rows", "info", rows, "")
        if follows:
            yield from _whole(facts, config, table, found, inserts_only=inserts_only)
    version = connection.info.server_version
    mode = "append" if inserts_only else table.mode or "mirror"
    why = why_pinned(config, mode, found.key_columns, version)
    in_parts = config.strategy(found.id) == "incremental"
    if in_parts and why is not None:
        yield Finding(
            "copy_pinned",
            "info",
            f"{table.name} is copied under one snapshot, and not incrementally: {why}.",
            "While it is copied, VACUUM keeps what was deleted meanwhile.",
        )
    if config.publishes and config.pin_by(found.id) == "lock" and not (in_parts and why is None):
        yield from unlockable(connection, {found.oid: found.id}).values()
    generated = [c.name for c in left_out if c.generated and c.name not in table.columns.exclude]
    if generated:
        yield Finding(
            "generated_columns",
            "info",
            f"{table.name} has generated columns that Postgres doesn't send"
            f" ({listed(generated)}); the lake table will lack them.",
            "Compute them in a view over the lake table"
            + (", or upgrade to Postgres 18." if version < GENERATED_COLUMNS else "."),
        )
    renamed, called_in_lake = table.columns.rename, lake_names(found, table)
    for name, other in called_in_lake.items():
        alike = {o for n, o in called_in_lake.items() if n != name and o.lower() == other.lower()}
        if name in renamed and alike:
            yield Finding(
                "column_renamed",
                "error",
                f"{table.name}: columns.rename calls {named(name)} {named(other)}, and the lake has"
                f" {named(min(alike))} beside it: most engines take the two for one.",
                "Choose a name that differs by more than upper and lower case.",
            )
    if called := [
        f"{named(name)} as {named(other)}"
        for name, other in called_in_lake.items()
        if name not in renamed and other != name
    ]:
        yield Finding(
            "column_renamed",
            "info",
            f"{table.name}: names of these columns are taken in the lake, so it has"
            f" {', '.join(called)}.",
            "",
        )
    yield from _types(found.without(names), table)
    unknown = {*table.columns.exclude, *table.columns.types, *renamed}
    unknown -= {c.name for c in found.columns}
    if unknown:
        yield Finding(
            "column_missing",
            "error",
            f"{table.name} has no column {listed(sorted(unknown))}, which columns: names.",
            "Correct columns.exclude, columns.types or columns.rename. If the source renamed a"
            " column, write its new name there.",
        )


def _as_text(column: str) -> str:
    """The part of a table's settings that keeps a column as text."""
    wanted = yaml.safe_dump({"types": {column: "string"}}, default_flow_style=True, width=10**6)
    return one_line(wanted)


def _types(found: SourceTable, table: TableConfig) -> Iterator[Finding]:
    """What becomes of columns that the lake has no type for, and of values that it can't hold."""
    kept = [column for column in found.columns if column.name not in table.columns.exclude]
    masks = table.columns.mask
    if masked := [f"{named(c.name)} ({masks[c.name]})" for c in kept if c.name in masks]:
        yield Finding(
            "masked_columns",
            "info",
            f"{table.name}: values of these leave the source masked: {', '.join(masked)}.",
            "",
        )
    kept = [column for column in kept if column.name not in masks]
    mapped = {c: mapping(c.type, table.columns.types.get(c.name)) for c in kept}
    if text := [c for c, m in mapped.items() if m.lake == "string" and not m.native]:
        shown = ", ".join(f"{named(c.name)} ({one_line(c.type)})" for c in text)
        yield Finding(
            "text_columns",
            "info",
            f"{table.name}: the lake has these as text, as Postgres prints it: {shown}.",
            "",
        )
    partial = [c.name for c, m in mapped.items() if m.fits is not None]
    if values := [name for name in partial if name not in found.key_columns]:
        becomes = {
            "null": "become NULL",
            "clamp": "become the nearest ones that it can, or NULL",
            "fail": "make the table fail",
        }[table.columns.unrepresentable]
        yield Finding(
            "unrepresentable_values",
            "info",
            f"{table.name}: values of {listed(values)} that the lake can't hold (infinity, NaN,"
            f" years beyond 1 to 9999, arrays of several dimensions) {becomes}.",
            f"columns: {_as_text(values[0])} keeps a column as text; or set"
            " columns.unrepresentable.",
        )
    if keys := [name for name in partial if name in found.key_columns]:
        yield Finding(
            "unrepresentable_keys",
            "info",
            f"{table.name}: its key has {listed(keys)}; a value there that the lake can't hold"
            " has a copy begin anew with the column as text, and parks the table if it comes with a"
            " change.",
            f"columns: {_as_text(keys[0])} keeps it as text from the start.",
        )


def obstacles(
    connection: Connection, config: SourceConfig, table: TableConfig, facts: Facts
) -> Iterator[Finding]:
    """The errors that ``facts`` alone show, for however many tables; ``check`` knows more."""
    found = facts.tables[table.id]
    if isinstance(found, TableProblem):
        yield _error("table_missing", found)
        return
    if config.decodes:
        about = (connection, config, facts, found)
        yield from _refused("replica_identity", without_identity, *about)
    yield from _by_catalogs(found, table, facts)


def _by_catalogs(found: SourceTable, table: TableConfig, facts: Facts) -> Iterator[Finding]:
    yield from _refused("table_mode", refuse_mode, found, table)
    yield from _refused("table_inherited", refuse_inherited, facts, found, table)
    if (problem := facts.under_root.get(found.id)) is not None:
        yield _error("table_under_root", problem)
    if (problem := facts.unlogged.get(found.id)) is not None:
        yield _error("table_unlogged", problem)
    if isinstance(parts := facts.heaps[found.id], TableProblem):
        yield _error("table_partial", parts)
    yield from _refused("key_excluded", refuse_excluded_key, found, table)
    yield from _refused("mask_refused", refuse_masks, found, table)
    yield from _refused("mask_refused", refuse_made_from_masked, facts, found, table)
    yield from facts.missing[found.oid]


def _whole(
    facts: Facts,
    config: SourceConfig,
    table: TableConfig,
    found: SourceTable,
    *,
    inserts_only: bool,
) -> Iterator[Finding]:
    """Whether the publication, if it has the table, has all of it."""
    try:
        refuse_partial_publication(
            facts.shapes,
            config.publication,
            found,
            table.columns.exclude,
            inserts_only=inserts_only,
            filtered=None if table.where is not None else False,
        )
    except TableProblem as problem:
        yield _error("table_partial", problem)


def _refused(code: str, refuse: Callable[..., object], *about: object) -> Iterator[Finding]:
    """A rule of enrolment that raises TableProblem, as a finding."""
    try:
        refuse(*about)
    except TableProblem as problem:
        yield _error(code, problem)


def _error(code: str, problem: TableProblem) -> Finding:
    return Finding(code, "error", f"{problem.what}.", problem.remedy)


def _identity(
    connection: Connection,
    config: SourceConfig,
    table: TableConfig,
    found: SourceTable,
    facts: Facts,
) -> Iterator[Finding]:
    """Whether Postgres would let changes through once they are published."""
    try:
        wrong = without_identity(connection, config, facts, found)
    except TableProblem as problem:
        yield _error("replica_identity", problem)
        return
    if wrong:
        yield Finding(
            "inserts_only",
            "warning",
            f"{table.name}: {sentence(found.id, wrong)}. Only its inserts and truncates are"
            " published, and get into the lake.",
            f"{remedy(wrong)} -- if its other changes are wanted",
        )
    elif (
        found.kind == "p"
        and not connection.execute(
            "select 1 from pg_catalog.pg_index where indrelid = %s and indisprimary and indisvalid"
            " and indimmediate",
            (found.oid,),
        ).fetchone()
    ):
        yield Finding(
            "partitions_to_come",
            "warning",
            f"{table.name} has no primary key, so a partition that is added later has no replica"
            " identity: Postgres refuses UPDATE and DELETE there until the table is withdrawn from"
            " the publication, which takes seconds while a flusher runs, and it is parked.",
            "Add a primary key; or give each new partition its replica identity (full) before it is"
            " attached.",
        )


def _toast(connection: Connection, found: SourceTable, table: TableConfig) -> Iterator[Finding]:
    """An update leaves out large values that it didn't change, unless the identity is FULL."""
    rows = connection.execute(
        "select attname from pg_catalog.pg_attribute where attrelid = %s and attnum > 0"
        " and not attisdropped and attstorage in ('x', 'e') order by attnum",
        (found.oid,),
    ).fetchall()
    beside = {*found.key_columns, *table.columns.exclude}
    large = [str(name) for (name,) in rows if name not in beside]
    if not large:
        return
    append = table.mode == "append"
    yield Finding(
        "toast_columns",
        "warning" if append else "info",
        f"{table.name}: updates leave large unchanged values of {listed(large)} out;"
        + (
            " they are read again from the source, which may have newer ones by then."
            if append
            else " they are completed from the lake's own row."
        ),
        f"alter table {table.name} replica identity full; -- sends them all, at more WAL"
        if append
        else "",
    )
