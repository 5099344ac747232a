"""What ``check`` finds of one table: whether it can be followed, and as what one expects.

Nothing is changed. The same rules decide in ``enrol`` what is registered and published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import psycopg

from cdc_assets.config import SourceConfig
from cdc_assets.config_sections import TableConfig
from cdc_assets.errors import TableProblem
from cdc_assets.postgres.catalog import SourceTable, describe, heaps
from cdc_assets.postgres.enrol import OR_INSERTS, inherited, refuse_mode
from cdc_assets.postgres.findings import Finding
from cdc_assets.postgres.identity import children, remedy, sentence, troubles
from cdc_assets.postgres.names import lake_column
from cdc_assets.postgres.publications import (
    addition,
    inserts_publication,
    published_tables,
    refuse_partial_publication,
    sent_columns,
)
from cdc_assets.postgres.rights import missing_rights

Connection = psycopg.Connection[tuple[Any, ...]]


def table_findings(
    connection: Connection, config: SourceConfig, table: TableConfig, follows: bool
) -> Iterator[Finding]:
    publication = config.publication
    sent = sent_columns(connection, publication) if follows else frozenset(("", "s"))
    try:
        found = describe(connection, table.id)
    except TableProblem as problem:
        yield Finding("table_missing", "error", f"{problem.what}.", problem.remedy)
        return
    identity = [*_identity(connection, table, found, sent)] if follows else []
    yield from identity
    try:
        refuse_mode(found, table)
    except TableProblem as problem:
        yield Finding("table_mode", "error", f"{problem.what}.", problem.remedy)
    inserts_only = any(finding.code == "inserts_only" for finding in identity)
    if inserts_only:
        publication = inserts_publication(publication)
    if (inherit := children(connection, [found.oid])) and not table.only:
        why = inherited(found.id, inherit[found.oid])
        yield Finding("table_inherited", "error", f"{why.what}.", why.remedy)
    if follows and not identity and found.replica_identity != "f":
        yield from _toast(connection, found, table)
    unlogged, owner, role = connection.execute(
        "select c.relpersistence <> 'p', pg_has_role(c.relowner, 'USAGE')"
        " and not exists (select from pg_catalog.pg_publication p where p.pubname = %s"
        " and not pg_has_role(p.pubowner, 'USAGE')), quote_ident(current_user)"
        " from pg_catalog.pg_class c where c.oid = %s",
        (publication, found.oid),
    ).fetchone() or (False, True, "")
    if unlogged and follows:
        yield Finding(
            "table_unlogged",
            "error",
            f"{table.name} is unlogged or temporary: its changes aren't in the WAL.",
            f"alter table {table.name} set logged;",
        )
    yield from missing_rights(connection, found.oid)
    present = published_tables(connection, publication)
    if not owner and follows and present is not None and table.id not in present:
        yield Finding(
            "table_owner",
            "error",
            f"the role {role} can't publish {table.name}: it doesn't own the table, or the"
            f" publication {publication}.",
            f"{addition(connection, publication, [table.id])}; -- as an owner of both",
        )
    try:
        heaps(connection, found.id, found.oid)
        if follows:
            refuse_partial_publication(connection, publication, found, inserts_only=inserts_only)
    except TableProblem as problem:
        yield Finding("table_partial", "error", str(problem.what) + ".", problem.remedy)
    generated = [c.name for c in found.columns if c.generated not in sent]
    if generated:
        yield Finding(
            "generated_columns",
            "info",
            f"{table.name} has generated columns that Postgres doesn't send"
            f" ({', '.join(generated)}); the lake table will lack them.",
            "Compute them in a view over the lake table, or upgrade to Postgres 18 (stored ones).",
        )
    if renamed := [
        f"{c.name} as {lake_column(c.name)}"
        for c in found.columns
        if lake_column(c.name) != c.name and c.name not in table.columns.exclude
    ]:
        yield Finding(
            "column_renamed",
            "info",
            f"{table.name}: Iceberg has columns of these names of its own, so the lake has"
            f" {', '.join(renamed)}.",
            "",
        )
    unknown = set(table.columns.exclude) | set(table.columns.types)
    unknown -= {c.name for c in found.columns}
    if unknown:
        yield Finding(
            "column_missing",
            "error",
            f"{table.name} has no column {', '.join(sorted(unknown))}, which columns: names.",
            "Correct columns.exclude or columns.types.",
        )
    if set(table.columns.exclude) & set(found.key_columns):
        yield Finding(
            "key_excluded",
            "error",
            f"columns.exclude of {table.name} names a column of its key.",
            "Keep the key: rows can't be told apart without it.",
        )


def _identity(
    connection: Connection, table: TableConfig, found: SourceTable, sent: Collection[str]
) -> Iterator[Finding]:
    """Whether Postgres would let changes through once they are published."""
    wrong = troubles(connection, [found.oid], sent).get(found.oid, ())
    refused = any(trouble.refused for trouble in wrong)
    said = f"{table.name}: {sentence(found.id, wrong)}"
    if refused and table.mode == "append":
        yield Finding(
            "inserts_only",
            "warning",
            f"{said}. Only its inserts and truncates are published, and get into the lake.",
            f"{remedy(wrong)} -- if its other changes are wanted",
        )
    elif wrong:
        way_out = f"{remedy(wrong)} {OR_INSERTS}" if refused else remedy(wrong)
        yield Finding("replica_identity", "error", f"{said}.", way_out)
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
    """An update doesn't say large values that it left alone, unless the identity is FULL."""
    rows = connection.execute(
        "select attname from pg_catalog.pg_attribute where attrelid = %s and attnum > 0"
        " and not attisdropped and attstorage in ('x', 'e') order by attnum",
        (found.oid,),
    ).fetchall()
    large = [str(name) for (name,) in rows if name not in found.key_columns]
    if not large:
        return
    append = table.mode == "append"
    yield Finding(
        "toast_columns",
        "warning" if append else "info",
        f"{table.name}: updates leave large unchanged values of {', '.join(large)} out;"
        + (
            " they are read again from the source, which may have newer ones by then."
            if append
            else " they are completed from the lake's own row."
        ),
        f"alter table {table.name} replica identity full; sends them all, at more WAL."
        if append
        else "",
    )
