"""The SQL that an administrator runs in psql before a source's first start.

It gives the roles the least rights that they need. It ends at a statement that fails, and can be
run again. ``check`` names whatever is missing later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.messages.findings import Finding
from cdc_assets.messages.texts import one_line
from cdc_assets.postgres.names import TableId, quoted
from cdc_assets.postgres.publication.contents import published_tables
from cdc_assets.postgres.publication.identity import Trouble
from cdc_assets.postgres.publication.statements import addition, creation
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.readiness.source.enrolment import Facts, facts_of
from cdc_assets.setup.roles import Roles, existing, owner_of

# Findings about the server whose remedies are for an administrator, too.
_SERVER = ("wal_level", "wal_unbounded", "slots_exhausted", "senders_exhausted")
# It would end slots of others that keep more.
_CHOICES = ("wal_unbounded",)
_LINE = 96
_BRIEF = """\
-- It ends at a statement that fails. Run it again then: what is done already stays as it is.
\\set ON_ERROR_STOP on
-- What waits for a lock holds up others: such a statement gives up.
set lock_timeout = '2s';"""
# psql runs the statements of a row as one transaction. A table that was published without the
# identity that it was to be given would refuse its application's changes.
_ADDED = """\
-- Each statement locks its table until it ends, so each table has one of its own.
select statement from (values
{rows}
) added (name, statement)
where not exists (
  select from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid
   where p.pubname = {publication} and r.prrelid = name::pg_catalog.regclass)
\\gexec"""


def prepared(
    connection: Connection, config: SourceConfig, roles: Roles, server: Sequence[Finding]
) -> str:
    """The script for the tables of ``config``, empty if nothing is to be done.

    ``server``: the findings about the server. A role that is a superuser needs no rights, and makes
    the publication itself.
    """
    tables = [table.id for table in config.tables]
    facts = facts_of(connection, config, tables)
    database = connection.info.dbname
    published = {} if roles.superuser else published_tables(connection, config.publication)
    added = [] if roles.superuser else [t for t in facts.heaps if t not in (published or {})]
    parts = [*_server(server), *_identities(facts, [t for t in facts.heaps if t not in added])]
    if not roles.superuser:
        parts += _roles(connection, roles)
        parts += _rights(connection, config, roles, facts)
        made = published is not None
        parts += _publication(connection, config, facts, added, made=made)
    if not parts:
        return ""
    head = (
        f"-- Prepares the database {one_line(database)} for the source {config.name}"
        " of cdc_assets.\n"
        "-- Run it there with psql, as a superuser, or as your service's administrator who owns the"
        " tables."
    )
    return "\n\n".join([head, _BRIEF, *parts]) + "\n"


def _server(findings: Sequence[Finding]) -> Iterator[str]:
    remedies = [
        f"-- {one_line(f.message)}\n{'-- ' if f.code in _CHOICES else ''}{f.remedy}"
        for f in findings
        if f.code in _SERVER
    ]
    if remedies:
        yield "\n".join(["-- The server.", *remedies])


def _roles(connection: Connection, roles: Roles) -> Iterator[str]:
    there = existing(connection, [roles.reads, roles.streams, "rds_replication"])
    lines = ["-- One role reads; who streams may decode every change of the database."]
    if not roles.apart:
        lines = ["-- This role reads, and streams."]
    for name in dict.fromkeys((roles.reads, roles.streams)):
        if name not in there:
            lines.append(_role(quoted(name), name))
    who = quoted(roles.streams)
    if roles.may_replicate:
        pass
    elif "rds_replication" in there:
        lines.append(f"grant rds_replication to {who};")
    else:
        lines.append(f"alter role {who} replication;")
    both = ", ".join(map(quoted, dict.fromkeys((roles.reads, roles.streams))))
    lines.append(
        f"grant pg_read_all_stats to {both}; -- to name who keeps a slot or a table waiting"
    )
    lines.append(f"grant connect on database {quoted(connection.info.dbname)} to {both};")
    yield "\n".join(lines)


def _role(who: str, name: str) -> str:
    """A role that may log in once its password was given: no transaction waits for a person."""
    made = _unless_there("pg_roles where rolname", name, f"create role {who} nologin;")
    given = f"{made}\n\\password {who}\nalter role {who} login;"
    return _unless_there("pg_roles where rolcanlogin and rolname", name, given)


def _rights(
    connection: Connection, config: SourceConfig, roles: Roles, facts: Facts
) -> Iterator[str]:
    reader, schema = quoted(roles.reads), quoted(config.state.schema_)
    heaps = dict[TableId, None]()
    for table, found in facts.heaps.items():
        heaps.update(dict.fromkeys((table, *(() if isinstance(found, TableProblem) else found))))
    schemas = dict.fromkeys(table.schema for table in heaps)
    lines = ["-- The tables, each with its partitions."]
    lines += _wrapped("grant usage on schema ", map(quoted, schemas), f" to {reader};")
    lines += _wrapped("grant select on ", map(str, heaps), f" to {reader};")
    yield "\n".join(lines)
    if config.state.postgres_url is None and owner_of(connection, config.state.schema_) is None:
        lines = ["-- The source's log, and by default the Iceberg catalog."]
        made = f"create schema if not exists {schema} authorization {reader};"
        if existing(connection, [roles.reads]):
            lines.append(made)
        else:  # who isn't a superuser makes a schema only for a role that he is a member of
            lines += ["begin;", f"grant {reader} to current_user;", made]
            lines += [f"revoke {reader} from current_user;", "commit;"]
        yield "\n".join(lines)


def _identities(facts: Facts, tables: Sequence[TableId]) -> Iterator[str]:
    """What Postgres tells changed rows by, where it couldn't once they are published."""
    lines = [
        f"{trouble.remedy} -- {one_line(trouble.what)}"  # nobody's name ends the comment
        for table in tables
        for trouble in _troubles(facts, table)
    ]
    if lines:
        yield "\n".join(["-- What tells changed rows apart.", *lines])


def _troubles(facts: Facts, table: TableId) -> Sequence[Trouble]:
    found = facts.tables[table]
    return () if isinstance(found, TableProblem) else facts.troubles.get(found.oid, ())


def _publication(
    connection: Connection,
    config: SourceConfig,
    facts: Facts,
    tables: Sequence[TableId],
    *,
    made: bool,
) -> Iterator[str]:
    """The publication, unless it is ``made``, and the addition of tables."""
    name = config.publication
    lines = ["-- What is streamed."]
    if not made:
        create = f"{creation(connection, name)};"
        lines.append(_unless_there("pg_publication where pubname", name, create))
    if tables:
        lines.append(_additions(connection, config, facts, tables))
    if lines[1:]:
        yield "\n".join(lines)


def _additions(
    connection: Connection, config: SourceConfig, facts: Facts, tables: Sequence[TableId]
) -> str:
    rows = list[str]()
    for table in tables:
        added = addition(connection, config.publication, [table], filters=config.row_filters)
        troubles = _troubles(facts, table)
        rows += [f"  -- {one_line(trouble.what)}" for trouble in troubles]
        statements = " ".join([*(trouble.remedy for trouble in troubles), f"{added};"])
        comma = "," if table != tables[-1] else ""
        rows.append(f"  ({_literal(str(table))}, {_literal(statements)}){comma}")
    return _ADDED.format(rows="\n".join(rows), publication=_literal(config.publication))


def _unless_there(catalog: str, name: str, statement: str) -> str:
    """A statement that psql runs only if the catalog has nothing of that name."""
    return (
        f"select not exists (select from pg_catalog.{catalog} = {_literal(name)}) as missing"
        f" \\gset\n\\if :missing\n{statement}\n\\endif"
    )


def _literal(text: str) -> str:
    return sql.Literal(text).as_string().strip()


def _wrapped(before: str, names: Iterator[str], after: str) -> list[str]:
    """One statement with a list that may be long, in lines of some hundred characters."""
    lines, line = list[str](), before
    listed = list(names)
    for place, name in enumerate(listed):
        more = name + (", " if place < len(listed) - 1 else after)
        if len(line) + len(more) > _LINE and line.strip():
            lines.append(line.rstrip())
            line = "  "
        line += more
    return [*lines, line]
