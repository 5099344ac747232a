"""Findings of ``check`` about the roles: the one that reads, and the one that streams, if another.

A table's owner may have written functions that Postgres calls when it plans a query of the table (a
constant call in an index, a constraint, statistics). They run with the rights of the role that
reads, so every right beyond reading is reported. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, first_line
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection, connect
from cdc_assets.postgres.slots import system_identifier

_ROLE = "select current_user::text"
_LEAST = "Give it what infra/postgres/roles.sql gives, and no more."

# On RDS and Aurora no role gets the attribute REPLICATION; a membership replaces it there.
_MAY_REPLICATE = """
select r.rolreplication or r.rolsuper
       or exists (select from pg_catalog.pg_roles g
                   where g.rolname in ('rds_replication', 'rds_superuser')
                     and pg_catalog.pg_has_role(r.oid, g.oid, 'usage'))
  from pg_catalog.pg_roles r
 where r.rolname = current_user
"""

# A role's own rights, in words. Every membership that it can use counts; NOINHERIT only delays
# that.
_ATTRIBUTES = """
select current_user::text, r.rolsuper, pg_catalog.array_remove(array[
         case when r.rolcreaterole then 'may create roles' end,
         case when r.rolcreatedb then 'may create databases' end,
         case when r.rolbypassrls and not %(hidden)s
              then 'bypasses row-level security' end] ||
         array(select 'is a member of ' || g.rolname from pg_catalog.pg_roles g
                where g.rolname in ('pg_write_all_data', 'pg_write_server_files',
                                    'pg_execute_server_program', 'pg_read_server_files',
                                    'pg_signal_backend', 'pg_read_all_data',
                                    'pg_create_subscription', 'pg_maintain',
                                    'rds_superuser', 'cloudsqlsuperuser', 'azure_pg_admin')
                  and pg_catalog.pg_has_role(r.oid, g.oid, 'member')
                order by g.rolname), null)
  from pg_catalog.pg_roles r where r.rolname = current_user
"""

# Whether the role owns, may change and may read each replicated table with its partitions, and each
# other table, except ours and extensions'.
_TABLES = """
with recursive part (root, oid) as (
    select c.oid, c.oid
      from unnest(%(schemas)s::text[], %(names)s::text[]) w (schema_name, table_name)
      join pg_catalog.pg_namespace n on n.nspname = w.schema_name
      join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.table_name
    union all
    select p.root, i.inhrelid from part p join pg_catalog.pg_inherits i on i.inhparent = p.oid)
select n.nspname::text, c.relname::text, pg_catalog.bool_or(p.root is not null),
       pg_catalog.bool_or(k.relrowsecurity), pg_catalog.bool_or(f.owned),
       pg_catalog.bool_or(f.writable), pg_catalog.bool_or(f.readable)
  from pg_catalog.pg_class k
  left join part p on p.oid = k.oid
  join pg_catalog.pg_class c on c.oid = coalesce(p.root, k.oid)
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  cross join lateral (
       select pg_catalog.pg_has_role(k.relowner, 'member') as owned,
              pg_catalog.has_table_privilege(k.oid, 'INSERT, UPDATE, DELETE, TRUNCATE, TRIGGER')
              or pg_catalog.has_any_column_privilege(k.oid, 'INSERT, UPDATE') as writable,
              pg_catalog.has_any_column_privilege(k.oid, 'SELECT') as readable) f
 where k.relkind in ('r', 'p', 'm', 'f') and k.relpersistence <> 't'
   and n.nspname not in ('pg_catalog', 'information_schema', %(ours)s)
   and c.relname not in ('iceberg_tables', 'iceberg_namespace_properties')
   and not exists (select from pg_catalog.pg_depend d
                    where d.classid = 'pg_catalog.pg_class'::regclass and d.objid = k.oid
                      and d.deptype = 'e')
   and (p.root is not null or f.owned or f.writable or f.readable)
 group by n.nspname, c.relname
 order by 3 desc, 1, 2
"""
# A finding names this many tables at most.
_LISTED = 5

# Event triggers that run at a login or at DDL, by functions that are not a superuser's.
_EVENT_TRIGGERS = """
select e.evtname::text, o.rolname::text
  from pg_catalog.pg_event_trigger e
  join pg_catalog.pg_proc f on f.oid = e.evtfoid
  join pg_catalog.pg_roles o on o.oid = f.proowner
 where e.evtenabled <> 'D' and not o.rolsuper and o.rolname not in ('rdsadmin', 'cloudsqladmin')
 order by 1
"""


def role_findings(connection: Connection, config: SourceConfig) -> Iterator[Finding]:
    """Findings about rights that the roles lack, and rights that they don't need."""
    given = config.postgres.replication_dsn
    if not config.postgres.embedded:  # whose only role is its superuser
        yield from _excess(connection, config, "reads the tables", apart=given is not None)
    if config.publishes and given is None:
        yield from _may_replicate(connection)
    elif config.publishes and given is not None:
        yield from _streams(connection, config, given.get_secret_value())
    for trigger, owner in connection.execute(_EVENT_TRIGGERS):
        yield Finding(
            "event_trigger",
            "warning",
            f"the event trigger {trigger} runs a function of {owner}, with the rights of whoever"
            " connects or runs DDL, which are ours, too.",
            "A superuser makes the function his own, or drops the trigger.",
        )


def _may_replicate(connection: Connection) -> Iterator[Finding]:
    able, role = connection.execute(
        f"select ({_MAY_REPLICATE}), current_user::text".encode()
    ).fetchone() or (True, "")
    if not able:
        who = sql.Identifier(str(role)).as_string(connection)
        yield Finding(
            "replication_privilege",
            "error",
            f"the role {role} may not replicate.",
            f"alter role {who} replication; -- on RDS and Aurora: grant rds_replication to {who};",
        )


def _streams(source: Connection, config: SourceConfig, dsn: str) -> Iterator[Finding]:
    """Whether the second address is that of the same database, and its role's rights."""
    try:
        with connect(dsn, application_name="cdc_assets check") as slots:
            if _place(slots) != _place(source):
                yield Finding(
                    "replication_elsewhere",
                    "error",
                    "postgres.replication_dsn is another server or database than postgres.dsn.",
                    "Give the same server and database in both; only the role differs.",
                )
            elif _one(slots, _ROLE) != _one(source, _ROLE):
                yield from _excess(slots, config, "streams", apart=True)
            yield from _may_replicate(slots)
    except psycopg.OperationalError as error:
        yield Finding(
            "replication_unreachable",
            "error",
            "the source can't be reached by postgres.replication_dsn:"
            f" {error.what if isinstance(error, CdcError) else first_line(error)}",
            (error.remedy if isinstance(error, CdcError) else "")
            or "Correct postgres.replication_dsn, or the role's password.",
        )


def _place(connection: Connection) -> tuple[object, ...]:
    """Cluster and database, the same at a standby and its primary; and whether it is a standby."""
    row = connection.execute(
        "select current_database()::text, pg_catalog.pg_is_in_recovery()"
    ).fetchone()
    assert row is not None
    return system_identifier(connection), *row


def _excess(
    connection: Connection, config: SourceConfig, does: str, *, apart: bool
) -> Iterator[Finding]:
    """Rights of the session's role beyond what it ``does``; ``apart``: another role streams."""
    reads = does != "streams"
    found = _tables(connection, config)
    hidden = reads and any(t.replicated and t.hides_rows for t in found)
    row = connection.execute(_ATTRIBUTES, {"hidden": hidden}).fetchone()
    assert row is not None
    role, superuser, more, minor = str(row[0]), bool(row[1]), list(row[2]), list[str]()
    if superuser:
        more = ["is a superuser: code of whoever owns a table may run as one"]
    else:
        more += _named("owns, or may become the owner of,", [t for t in found if t.owned])
        more += _named("may write to", [t for t in found if t.writable])
        if not reads:
            more += _named("may read", [t for t in found if t.readable])
        else:
            others = [t for t in found if t.readable and not t.replicated]
            minor += _named("may read what isn't replicated here:", others)
        if not apart and _one(connection, _MAY_REPLICATE):
            minor.append("may replicate besides")
    if more or minor:
        remedy = _LEAST
        if not apart:
            remedy += " The role that streams is another one, by postgres.replication_dsn."
        yield Finding(
            "excess_rights",
            "warning" if more else "info",  # one role for both, or for several sources, is a choice
            f"the role {role}, which {does}, {'; '.join(more + minor)}.",
            remedy,
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """A table at the source, and the role's rights on it or a partition of it."""

    id: TableId
    replicated: bool
    hides_rows: bool
    owned: bool
    writable: bool
    readable: bool


def _tables(connection: Connection, config: SourceConfig) -> list[_Table]:
    tables = [table.id for table in config.tables]
    found = connection.execute(
        _TABLES,
        {
            "schemas": [table.schema for table in tables],
            "names": [table.name for table in tables],
            "ours": config.state.schema_,
        },
    )
    return [_Table(TableId(schema, name), *map(bool, rest)) for schema, name, *rest in found]


def _named(what: str, tables: Sequence[_Table]) -> list[str]:
    listed = ", ".join(str(table.id) for table in tables[:_LISTED])
    return [f"{what} {listed}{', …' if len(tables) > _LISTED else ''}"] if tables else []


def _one(connection: Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None
