"""The roles that a new source works with: those of its addresses, or new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

_ROLE = """
select current_user::text, r.rolsuper, r.rolsuper or r.rolcreaterole,
       r.rolreplication or r.rolsuper
       or exists (select from pg_catalog.pg_roles g
                   where g.rolname in ('rds_replication', 'rds_superuser')
                     and pg_catalog.pg_has_role(r.oid, g.oid, 'usage')),
       exists (select from unnest(%s::text[], %s::text[]) w (schema, name)
                 join pg_catalog.pg_namespace n on n.nspname = w.schema
                 join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = w.name
                where pg_catalog.pg_has_role(c.relowner, 'member')
                   or pg_catalog.has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE'))
  from pg_catalog.pg_roles r where r.rolname = current_user
"""


@dataclass(frozen=True, slots=True)
class Role:
    """The role of an address: whether it has more rights than a copy's reader needs."""

    name: str
    superuser: bool
    administers: bool
    """It may make roles."""
    replicates: bool
    writes: bool
    """It owns one of the tables, or may write to it."""

    @property
    def why_not(self) -> str:
        """Why another role should read; empty if this one may."""
        if self.superuser:
            return f"{self.name} is a superuser"
        return f"{self.name} owns tables, or may write to them" if self.writes else ""


@dataclass(frozen=True, slots=True)
class Roles:
    """Who reads the tables and who streams; the same, if one role does both."""

    reads: str
    streams: str
    may_replicate: bool = False
    """Whether the one that streams has the right to."""
    superuser: bool = False
    """Whether one superuser does both."""

    @property
    def apart(self) -> bool:
        return self.reads != self.streams


def role_of(connection: Connection, tables: Sequence[TableId]) -> Role:
    """The session's role, as it is to ``tables``."""
    names = [table.schema for table in tables], [table.name for table in tables]
    row = connection.execute(_ROLE, names).fetchone()
    assert row is not None
    return Role(str(row[0]), *map(bool, row[1:]))


def existing(connection: Connection, names: Sequence[str]) -> set[str]:
    """Those of the roles that are there."""
    query = "select rolname::text from pg_catalog.pg_roles where rolname = any(%s)"
    return {name for (name,) in connection.execute(query, ([*names],))}


def owner_of(connection: Connection, schema: str) -> str | None:
    """The role that has the schema; None if it isn't there."""
    row = connection.execute(
        "select pg_catalog.pg_get_userbyid(nspowner)::text from pg_catalog.pg_namespace"
        " where nspname = %s",
        (schema,),
    ).fetchone()
    return str(row[0]) if row else None
