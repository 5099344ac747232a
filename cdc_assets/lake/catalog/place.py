"""The schema of the default SQL catalog's tables: one of ours, never the applications'.

Iceberg's JDBC catalog and pyiceberg's SqlCatalog name ``iceberg_tables`` without a schema, so the
search path of their connections decides. Ours is the coordination schema alone. A catalog that an
earlier version of this program made along the role's own search path (``public``, as a rule) is
found by its tables and used on: every reader would lose them otherwise. A catalog of a role that
isn't trusted isn't even read, as its owner may have planted a policy there; it is reported.

A catalog whose address is configured is the user's own: its role's search path holds.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import lru_cache
from typing import LiteralString

import psycopg
from psycopg import sql

from cdc_assets.config.addresses import coordination_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import EnvironmentProblem, first_line
from cdc_assets.log.schema.ownership import TRUSTED, refuse_foreign
from cdc_assets.log.schema.versions import sql_name
from cdc_assets.postgres.session.connect import connect

_log = logging.getLogger(__name__)

# The name is part of the rows in iceberg_tables: every reader has to use the same.
CATALOG = "lake"
TABLES = ("iceberg_tables", "iceberg_namespace_properties")


def catalog_schema(config: SourceConfig) -> str | None:
    """The schema of the default SQL catalog, there or not; None where another one is configured.

    Looked up once a process. Raises psycopg.OperationalError without a connection.
    """
    if config.lake.catalog.type != "sql" or config.lake.catalog.uri is not None:
        return None
    return _found(coordination_dsn(config), config.state.schema_, config.namespace)[0]


def passed_over(config: SourceConfig) -> tuple[tuple[str, str], ...]:
    """Schema and role of each SQL catalog of an untrusted role, while ours has no table yet.

    The role may be an earlier one of ours. Raises like :func:`catalog_schema`.
    """
    if catalog_schema(config) is None:
        return ()
    return _found(coordination_dsn(config), config.state.schema_, config.namespace)[1]


@lru_cache(maxsize=16)
def _found(dsn: str, ours: str, namespace: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    with connect(dsn, application_name="cdc_assets catalog") as connection:
        found = connection.execute(_CANDIDATES, {"table": TABLES[0], "ours": ours}).fetchall()
        for schema in [str(schema) for schema, _, trusted in found if trusted]:
            if _has_tables(connection, schema, namespace):
                return schema, ()
    strangers = tuple((str(s), str(owner)) for s, owner, trusted in found if not trusted)
    for schema, owner in strangers:
        _log.warning("the SQL catalog in the schema %s is the role %s's: not used", schema, owner)
    return ours, strangers


# Schemas with a table of that name and with a catalog's columns, that may be read, or that an
# untrusted role has; ours first, then the likeliest. Another table of that name is anything.
_CANDIDATES: LiteralString = f"""
with {TRUSTED}
select n.nspname, pg_catalog.pg_get_userbyid(c.relowner), c.relowner in (select oid from trusted)
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.relname = %(table)s and c.relkind in ('r', 'p')
   and (select count(*) = 2 from pg_catalog.pg_attribute a
         where a.attrelid = c.oid and a.attname in ('catalog_name', 'table_namespace')
           and a.atttypid in ('pg_catalog.varchar'::regtype, 'pg_catalog.text'::regtype)
           and not a.attisdropped)
   and (c.relowner not in (select oid from trusted)
        or pg_catalog.has_schema_privilege(n.oid, 'usage')
           and pg_catalog.has_table_privilege(c.oid, 'select'))
 order by n.nspname <> %(ours)s, n.nspname <> 'public', n.nspname
"""


def _has_tables(
    connection: psycopg.Connection[tuple[object, ...]], schema: str, namespace: str
) -> bool:
    found = connection.execute(
        sql.SQL("select from {} where catalog_name = %s and table_namespace = %s limit 1").format(
            sql.Identifier(schema, TABLES[0])
        ),
        (CATALOG, namespace),
    )
    return found.rowcount > 0


def make_schema(dsn: str, schema: str) -> None:
    """Make the schema unless it exists; a role may be allowed to use a schema, but not to make one.

    Raises EnvironmentProblem, and CoordinationError if it is somebody else's.
    """
    with connect(dsn, application_name="cdc_assets catalog") as connection:
        refuse_foreign(connection, schema)
        found = connection.execute(
            "select pg_catalog.to_regnamespace(%s)", (sql_name(schema),)
        ).fetchone()
        if found is not None and found[0] is not None:
            return
        try:
            with suppress(psycopg.errors.UniqueViolation):  # somebody else makes it just now
                connection.execute(f"create schema if not exists {sql_name(schema)}".encode())
        except psycopg.errors.InsufficientPrivilege as error:
            raise EnvironmentProblem(
                f"the role may not make the schema {schema} for the SQL catalog:"
                f" {first_line(error)}",
                "cdc-assets check prints the SQL that allows it.",
            ) from error
        refuse_foreign(connection, schema)  # another role may have been faster


def refuse_foreign_schema(config: SourceConfig) -> None:
    """Raise CoordinationError if the schema that the catalog is to be in is somebody else's.

    A schema where an earlier version made the catalog may be anybody's: it is used on.
    """
    if catalog_schema(config) == config.state.schema_:
        with connect(coordination_dsn(config), application_name="cdc_assets catalog") as connection:
            refuse_foreign(connection, config.state.schema_)


def forgetting(config: SourceConfig, identifier: tuple[str, str]) -> str:
    """How a person has the catalog forget a table whose files are gone."""
    if config.lake.catalog.type != "sql":
        return f"drop {'.'.join(identifier)} in the catalog, without purging it"
    where = sql.Identifier(TABLES[0])
    if (schema := catalog_schema(config)) is not None:
        where = sql.Identifier(schema, TABLES[0])
    return (
        sql.SQL(
            "delete from {} where catalog_name = {} and table_namespace = {} and table_name = {}"
        )
        .format(where, CATALOG, *identifier)
        .as_string(None)
    )
