"""Findings of ``check`` about the publication: whether it exists, or this role can make it.

Nothing is changed. ``tables`` judges how a publication sends a table.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdc_assets.config.source import SourceConfig
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import inserts_publication, published_tables
from cdc_assets.postgres.publication.identity import unidentified
from cdc_assets.postgres.publication.statements import addition, creation
from cdc_assets.postgres.session.connect import Connection

# The tables of these names that exist, and whether this role owns them all.
_OWNED = """
select pg_catalog.array_agg(c.oid::bigint),
       pg_catalog.bool_and(pg_catalog.pg_has_role(c.relowner, 'USAGE'))
       and pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE'),
       current_user::text
  from unnest(%(schemas)s::text[], %(names)s::text[]) w (schema_name, table_name)
  join pg_catalog.pg_namespace n on n.nspname = w.schema_name
  join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.table_name
   and c.relkind in ('r', 'p')
"""


def publication_findings(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """Whether the publication is there, or can be made with all tables by this role."""
    name, tables = config.publication, [table.id for table in config.tables]
    published = published_tables(connection, name)
    if published is not None:
        beside = published_tables(connection, inserts_publication(name)) or {}
        if lacking := [str(t) for t in tables if t not in published and t not in beside]:
            message = f"the publication {name} lacks {', '.join(lacking)}; will be added."
            yield Finding("publication", "info", message, "")
        return
    row = connection.execute(
        _OWNED, {"schemas": [t.schema for t in tables], "names": [t.name for t in tables]}
    ).fetchone()
    oids, may_make, role = row or (None, True, "")
    if may_make or oids is None:
        message = f"the publication {name} doesn't exist yet; it will be created."
        yield Finding("publication", "info", message, "")
        return
    wrong = unidentified(connection, name, oids)
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
        " may create in this database.",
        "; ".join(statements) + "; -- as an owner of the tables",
    )
