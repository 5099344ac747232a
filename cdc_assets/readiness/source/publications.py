"""Findings of ``check`` about the publication: whether it, and a table in it, is there or can be.

Nothing is changed. ``tables`` judges how a publication sends a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import LiteralString

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import (
    inserts_publication,
    publication_of,
    published_tables,
    row_filters,
)
from cdc_assets.postgres.publication.identity import unidentified
from cdc_assets.postgres.publication.row_filters import is_published
from cdc_assets.postgres.publication.statements import (
    addition,
    creation,
    pasted,
    placement,
    removal,
)
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import on_standby
from cdc_assets.readiness.source.enrolment import Facts, facts_of
from cdc_assets.readiness.source.planning import refuse_row_filter

# The tables of these names that exist, and whether this role owns them all.
_WANTED: LiteralString = """
  from unnest(%(schemas)s::text[], %(names)s::text[]) w (schema_name, table_name)
  join pg_catalog.pg_namespace n on n.nspname = w.schema_name
  join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.table_name
   and c.relkind in ('r', 'p')
"""
_THERE = f"select w.schema_name, w.table_name {_WANTED} order by 1, 2"
_OWNED = f"""
select pg_catalog.array_agg(c.oid::bigint),
       pg_catalog.bool_and(pg_catalog.pg_has_role(c.relowner, 'USAGE'))
       and pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE'),
       current_user::text
{_WANTED}"""


def _named(tables: Sequence[TableId]) -> dict[str, list[str]]:
    return {"schemas": [t.schema for t in tables], "names": [t.name for t in tables]}


def publication_findings(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """Whether the publication is there, or can be made with all tables by this role."""
    name, tables = config.publication, [table.id for table in config.tables]
    published = published_tables(connection, name)
    if published is not None:
        beside = published_tables(connection, inserts_publication(name)) or {}
        lacking = [t for t in tables if t not in published and t not in beside]
        there = connection.execute(_THERE, _named(lacking)).fetchall() if lacking else []
        listed = ", ".join(str(TableId(schema, table)) for schema, table in there)
        if listed and not on_standby(connection):  # there, ``publishable`` has the SQL
            message = f"the publication {name} lacks {listed}; will be added."
            yield Finding("publication", "info", message, "")
        return
    row = connection.execute(_OWNED, _named(tables)).fetchone()
    oids, may_make, role = row or (None, True, "")
    if oids is None or (may_make and not on_standby(connection)):
        message = f"the publication {name} doesn't exist yet; it will be created."
        yield Finding("publication", "info", message, "")
        return
    wrong = {*unidentified(connection, name, oids), *_refused_filters(connection, config, tables)}
    whole = [
        TableId(schema, table)
        for oid, schema, table in connection.execute(
            "select c.oid::bigint, n.nspname, c.relname from pg_catalog.pg_class c"
            " join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
            " where c.oid = any(%s::oid[]) order by c.oid",
            (oids,),
        )
        if oid not in wrong
    ]
    statements = [creation(connection, name)]
    if whole:
        statements.append(addition(connection, name, whole, filters=config.row_filters))
    yield Finding(
        "publication_privilege",
        "error",
        f"the role {role} can't make the publication {name}: that takes an owner of the tables who"
        f" may create in this database{' on the primary' * on_standby(connection)}.",
        f"{pasted(statements)} -- as an owner of the tables{_there(connection)}",
    )


def _there(connection: Connection) -> str:
    return ", on the primary" if on_standby(connection) else ""


def _refused_filters(
    connection: Connection, config: SourceConfig, tables: Sequence[TableId]
) -> Iterator[int]:
    """The oids of the tables whose ``where`` can't be published."""
    filtered = [table for table in tables if table in config.row_filters]
    facts = facts_of(connection, config, filtered)
    for table in filtered:
        found, heaps = facts.tables[table], facts.heaps.get(table)
        if not isinstance(found, SourceTable):
            continue
        try:
            if heaps is None or isinstance(heaps, TableProblem):
                yield found.oid  # whether it can be isn't known
            else:
                refuse_row_filter(connection, config, found, heaps, inserts_only=False)
        except TableProblem:
            yield found.oid


def publishable(
    connection: Connection,
    config: SourceConfig,
    found: SourceTable,
    facts: Facts,
    *,
    inserts_only: bool,
) -> Iterator[Finding]:
    """Whether this role can publish the table in its publication, if it isn't published yet.

    The SQL can be pasted: whoever asks knows that Postgres takes the table's changes then.
    """
    name = publication_of(config.publication, inserts_only=inserts_only)
    table, present = found.id, facts.published[name]
    if present is None and not inserts_only:
        return  # publication_findings reports that
    other = publication_of(config.publication, inserts_only=not inserts_only)
    moves = table in (facts.published[other] or {})
    needed, involved = list[str](), [name, *([other] if moves else [])]
    if present is None:
        needed.append(creation(connection, name, beside=config.publication))
    has, unfiltered = row_filters(connection, name, [found.oid]).get(found.oid), False
    if (where := config.row_filters.get(table)) is not None:
        unfiltered = not is_published(connection, table, where, has)
    if present is None or table not in present or unfiltered:
        replaced = [table] if unfiltered and present else []
        needed += placement(connection, name, [table], other, config.row_filters, replaced)
    elif moves:
        needed.append(removal(connection, other, [table]))
    able, role = connection.execute(
        "select pg_has_role(c.relowner, 'USAGE')"
        " and (%s or has_database_privilege(current_database(), 'CREATE'))"
        " and not exists (select from pg_catalog.pg_publication p where p.pubname = any(%s)"
        " and not pg_has_role(p.pubowner, 'USAGE')), quote_ident(current_user)"
        " from pg_catalog.pg_class c where c.oid = %s",
        (present is not None, involved, found.oid),
    ).fetchone() or (True, "")
    if needed and not (able and not on_standby(connection)):
        yield Finding(
            "table_owner",
            "error",
            f"the role {role} can't publish {table}: it doesn't own the table, or the publication"
            f" {name}, or may make none"
            f"{', or is at a standby, which makes none' * on_standby(connection)}.",
            f"{pasted(needed)} -- as an owner of the table and of the publication"
            f"{_there(connection)}",
        )
