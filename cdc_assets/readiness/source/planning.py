"""Whether Postgres can plan a query of a table in our sessions, where pg_catalog alone is searched.

Planning simplifies the expressions of the table's indexes, statistics and constraints, and reads
the bodies of the functions that they call. A name without a schema isn't found in such a body, and
then planning any query of that table fails. And whether Postgres takes a table's ``where``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import LiteralString

import psycopg
from psycopg import sql

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import ConditionProblem, TableProblem, first_line
from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.catalog import SourceTable
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.publication.contents import (
    COLUMN_LISTS,
    publication_of,
    published_in_bulk,
    row_filters,
)
from cdc_assets.postgres.publication.row_filters import Kept, kept
from cdc_assets.postgres.session.connect import Connection

# The functions that the table's indexes, statistics and constraints call, directly or by operators,
# and that have a body and no search_path of their own; and whether the error has their names.
_CALLED = """
with recursive part (oid) as (
    select %(oid)s::oid
    union all
    select i.inhrelid from part p
      join pg_catalog.pg_inherits i on i.inhparent = p.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition),
expression (of, oid) as (
    select 'pg_catalog.pg_class'::regclass, p.oid from part p
    union all
    select 'pg_catalog.pg_class'::regclass, i.indexrelid
      from part p join pg_catalog.pg_index i on i.indrelid = p.oid
    union all
    select 'pg_catalog.pg_statistic_ext'::regclass, s.oid
      from part p join pg_catalog.pg_statistic_ext s on s.stxrelid = p.oid
    union all
    select 'pg_catalog.pg_constraint'::regclass, c.oid
      from part p join pg_catalog.pg_constraint c on c.conrelid = p.oid),
called (oid) as (
    select case d.refclassid when 'pg_catalog.pg_proc'::regclass then d.refobjid else o.oprcode end
      from expression e
      join pg_catalog.pg_depend d on d.classid = e.of and d.objid = e.oid
      left join pg_catalog.pg_operator o
        on d.refclassid = 'pg_catalog.pg_operator'::regclass and o.oid = d.refobjid)
select f.oid::regprocedure::text, pg_catalog.quote_ident(n.nspname),
       pg_catalog.strpos(%(said)s, pg_catalog.format('"%%s"', f.proname)) > 0
  from pg_catalog.pg_proc f
  join pg_catalog.pg_namespace n on n.oid = f.pronamespace
  join pg_catalog.pg_language l on l.oid = f.prolang and l.lanname not in ('internal', 'c')
 where f.oid in (select oid from called)
   and not exists (select from pg_catalog.unnest(f.proconfig) s where s like 'search\\_path=%%')
 order by 1
"""


_OF_THE_TABLE = (psycopg.errors.UndefinedTable, psycopg.errors.InsufficientPrivilege)
# A body that doesn't return is given up.
PLANNING_TIMEOUT = "set local statement_timeout = '10s'"
# Heaps that are planned in one transaction, and how long it may take: it holds the locks of all of
# them, and somebody's ALTER waits for them.
AT_ONCE, _AT_ONCE_SECONDS = 50, 0.1
# One that is locked, or slow to plan, is planned by itself.
AT_ONCE_LIMITS: LiteralString = (
    "set local lock_timeout = '10ms'; set local statement_timeout = '100ms'"
)


def plannable(connection: Connection, heaps: Sequence[TableId]) -> set[TableId]:
    """Those of ``heaps`` that are planned with others at once; any other may be, by itself.

    A transaction of its own for each would be a second for hundreds of tables.
    """
    found, rest, before = set[TableId](), deque(heaps), 0
    while rest and len(rest) != before:  # else no transaction can be begun
        ends, before = time.monotonic() + _AT_ONCE_SECONDS, len(rest)
        with suppress(psycopg.DatabaseError), connection.transaction(force_rollback=True):
            connection.execute(AT_ONCE_LIMITS, prepare=False)
            for _ in range(min(AT_ONCE, len(rest))):
                heap = rest.popleft()
                connection.execute(_explain(heap), prepare=False)
                found.add(heap)
                if time.monotonic() > ends:
                    break
    return found


def refuse_unplannable(
    connection: Connection, table: SourceTable, heaps: Iterable[TableId]
) -> None:
    """Raise TableProblem, which names the functions, if a query of ``heaps`` can't be planned.

    One statement for each heap, by itself as a copy reads it: planning takes a lock of each index.
    No row is read; the role may read the table. Raises psycopg.errors.LockNotAvailable for one that
    is locked; one that is gone by now, or may not be read, is judged elsewhere.
    """
    try:
        for heap in heaps:
            with connection.transaction(force_rollback=True):
                connection.execute(PLANNING_TIMEOUT)
                connection.execute(_explain(heap))
    except psycopg.errors.LockNotAvailable:
        raise
    except psycopg.DatabaseError as error:
        if connection.closed:
            raise
        # What a body raises has any SQL state, and a context.
        if isinstance(error, _OF_THE_TABLE) and not error.diag.context:
            return
        said = error.diag.context or ""
        called = connection.execute(_CALLED, {"oid": table.oid, "said": said}).fetchall()
        guilty = [row for row in called if row[2]] or called
        names = ", ".join(str(name) for name, *_ in guilty) or "functions"
        remedy = "; ".join(
            f"alter function {name} set search_path = {path}, public" for name, path, _ in guilty
        )
        raise TableProblem(
            table.id,
            "Postgres can't plan a query of it in sessions that find names in pg_catalog alone:"
            f" its indexes, statistics or constraints call {names}, whose body fails there"
            f" (SQL state {error.sqlstate})",
            (f"{remedy}; -- or what the body needs; or write" if remedy else "Write")
            + " each name in the body with its schema, and grant what it uses.",
        ) from error


def refuse_row_filter(
    connection: Connection,
    config: SourceConfig,
    table: SourceTable,
    heaps: Sequence[TableId],
    *,
    inserts_only: bool,
) -> None:
    """Raise TableProblem if ``where`` can't be the table's row filter, as far as is known before.

    Postgres would refuse UPDATE and DELETE of a published heap whose replica identity lacks a
    column of the filter.
    """
    if (where := config.table(table.id).where) is None:
        return
    if config.decodes and connection.info.server_version < COLUMN_LISTS:
        raise TableProblem(
            table.id,
            "where needs Postgres 15 or later",
            "Replicate it as a whole, or copy it only (snapshot.mode: snapshot_only).",
        )
    name = publication_of(config.publication, inserts_only=inserts_only)
    if config.decodes and published_in_bulk(connection, name, table.oid):
        raise TableProblem(
            table.id,
            f"the publication {name} has it with all tables, or its schema, where no row filter is"
            " possible",
            "Give the source a publication of its own that lists tables, or take where out.",
        )
    found = understood(connection, table.id, where)
    if config.decodes and found.mutable:
        raise TableProblem(
            table.id,
            f"Postgres refuses where: {where} (it calls a function whose result may change, such as"
            " now(), and rows are published by immutable ones alone)",
            "Compare with constants, and leave the rest to whoever reads the lake.",
        )
    if not config.decodes or inserts_only or _all_full(connection, heaps):
        return
    if outside := sorted(found.columns - {*table.key_columns}):
        raise TableProblem(
            table.id,
            f"where uses columns ({', '.join(outside)}) that its replica identity"
            f" ({', '.join(table.key_columns)}) lacks: once it is published so, Postgres would"
            " refuse every UPDATE and DELETE there",
            "; ".join(f"alter table {heap} replica identity full" for heap in heaps)
            + "; -- or filter by columns of its replica identity",
        )


def understood(connection: Connection, table: TableId, where: str) -> Kept:
    """A condition on a table's rows, as Postgres keeps it, which has nothing of others in it.

    Raises ConditionProblem if it isn't one, or has what isn't Postgres's own; TableProblem if the
    role can't have it looked at.
    """
    try:
        found = kept(connection, table, where)
    except psycopg.errors.InsufficientPrivilege as error:
        raise TableProblem(
            table,
            f"where is checked by a temporary table, which the role can't make"
            f" ({first_line(error)})",
            "grant temporary on database … to the role that reads the tables;",
        ) from error
    except psycopg.DatabaseError as error:
        if connection.closed:
            raise
        raise ConditionProblem(
            table, f"Postgres refuses where: {where} ({first_line(error)})", "Correct it."
        ) from error
    if found.foreign:
        raise ConditionProblem(
            table,
            f"where calls what isn't Postgres's own ({found.foreign}): somebody else's code would"
            " run with the rights of our role",
            "Compare by built-in types and operators.",
        )
    if found.typed:
        raise ConditionProblem(
            table,
            f"where uses a column whose type isn't Postgres's own ({found.typed}), be it an enum:"
            " whoever owns the type could have code run with the rights of our role",
            "Compare other columns, of built-in types; a cast of this one, like ::text, is refused"
            " as well.",
        )
    return found


def filter_findings(
    connection: Connection,
    config: SourceConfig,
    found: SourceTable,
    parts: Sequence[TableId],
    *,
    inserts_only: bool,
) -> Iterator[Finding]:
    """Whether ``where`` can be the table's row filter; once it is, columns may be renamed."""
    if (where := config.row_filters.get(found.id)) is None:
        return
    name = publication_of(config.publication, inserts_only=inserts_only)
    try:
        refuse_row_filter(connection, config, found, parts, inserts_only=inserts_only)
    except TableProblem as problem:
        has = row_filters(connection, name, [found.oid]).get(found.oid)
        if has is None or not config.decodes:
            yield Finding("row_filter", "error", f"{problem.what}.", problem.remedy)
            return
        yield Finding(
            "row_filter",
            "warning",
            f"{problem.what}; the publication has the filter {has}, by which it goes on.",
            "If columns were renamed, write where with their names of now, and then: cdc-assets"
            f" resync {found.id}.",
        )
    else:
        streams = config.decodes and not inserts_only
        if streams and found.kind == "p" and _uses_more_than_the_key(connection, found, where):
            yield Finding(
                "partitions_to_come",
                "warning",
                f"{found.id}: where uses columns outside its key, so a partition that is added"
                " later has no replica identity with them: Postgres refuses UPDATE and DELETE there"
                " until the table is withdrawn from the publication, which takes seconds while a"
                " flusher runs, and it is parked.",
                "Give each new partition its replica identity (full) before it is attached.",
            )


def _uses_more_than_the_key(connection: Connection, table: SourceTable, where: str) -> bool:
    """Whether a partition that is added later can't have the filter by its primary key alone."""
    try:
        return not kept(connection, table.id, where).columns <= {*table.key_columns}
    except psycopg.DatabaseError:
        return False  # which is told by then


def _all_full(connection: Connection, heaps: Sequence[TableId]) -> bool:
    """Whether the whole row is the replica identity of each heap."""
    row = connection.execute(
        "select pg_catalog.bool_and(c.relreplident = 'f') from pg_catalog.pg_class c"
        " join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
        " join unnest(%s::text[], %s::text[]) h (schema, name)"
        " on h.schema = n.nspname and h.name = c.relname",
        ([heap.schema for heap in heaps], [heap.name for heap in heaps]),
    ).fetchone()
    return bool(row and row[0])


def _explain(heap: TableId) -> sql.Composed:
    return sql.SQL("explain select from only {}").format(heap.identifier)
