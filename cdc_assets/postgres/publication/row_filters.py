"""Row filters: which rows of a table leave the source (since Postgres 15).

The publication has the filter, so that the server sends no other row: a change that brings a row
into it is an INSERT, one that takes it out a DELETE. Postgres keeps the filter as an expression;
``row_filters`` has it as the server writes it, with the names that the columns have now. The copy,
and whoever reads rows again, use that text, and so read what the stream sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psycopg
from psycopg import sql

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# Literals and quoted names, words, spaces, and any other character by itself.
_TOKENS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\w+|\s+|.""", re.DOTALL)


def is_published(
    connection: Connection, table: TableId, configured: str | None, present: str | None
) -> bool:
    """Whether ``present``, as a publication's entry has it, is the filter as it is configured."""
    if present is None or configured is None or same_text(present, configured):
        return (present is None) == (configured is None)
    with suppress(psycopg.DatabaseError):
        return present == kept(connection, table, configured).text
    return False


@dataclass(frozen=True, slots=True)
class Kept:
    """A filter as Postgres keeps it: its text, the columns that it uses (``*``: the whole row).

    ``foreign``: functions and operators that it calls and that aren't Postgres's own, if any.
    ``typed``: columns that it uses, with their types, where these aren't. ``mutable``: whether it
    calls what isn't immutable, such as ``now()``: a publication takes none of that.

    A type's owner may make casts of it at any time, and give its name to a domain that calls what
    they like: text that was harmless when it was looked at needn't be when it is run. That goes for
    enums as well, although Postgres's own functions compare them.
    """

    text: str
    columns: frozenset[str]
    foreign: str | None
    typed: str | None
    mutable: bool


# Of a table's columns: a definition of each, as a table without rights on it may have them.
_COLUMNS = """
select pg_catalog.quote_ident(a.attname), pg_catalog.format_type(a.atttypid, a.atttypmod),
       case when a.attcollation <> 0
            then pg_catalog.format(' collate %%I.%%I', n.nspname, l.collname) else '' end
  from pg_catalog.pg_attribute a
  left join pg_catalog.pg_collation l on l.oid = a.attcollation
  left join pg_catalog.pg_namespace n on n.oid = l.collnamespace
 where a.attrelid = (select c.oid from pg_catalog.pg_class c
                       join pg_catalog.pg_namespace s on s.oid = c.relnamespace
                      where s.nspname = %s and c.relname = %s)
   and a.attnum > 0 and not a.attisdropped
 order by a.attnum
"""
_KEPT = """
select pg_catalog.pg_get_expr(c.conbin, c.conrelid),
       array(select coalesce(a.attname::text, '*') from pg_catalog.unnest(c.conkey) k
               left join pg_catalog.pg_attribute a
                 on a.attrelid = c.conrelid and a.attnum = k),
       (select pg_catalog.string_agg(distinct
               pg_catalog.pg_describe_object(o.class, o.oid, 0), ', ')
          from (select d.refclassid, d.refobjid from pg_catalog.pg_depend d
                 where d.classid = 'pg_catalog.pg_constraint'::regclass and d.objid = c.oid
                   and d.refclassid in ('pg_catalog.pg_proc'::regclass,
                                        'pg_catalog.pg_operator'::regclass)) o (class, oid)
         where o.oid >= 16384),
       (select pg_catalog.string_agg(pg_catalog.format('%%I: %%s', a.attname,
               pg_catalog.format_type(a.atttypid, a.atttypmod)), ', ' order by a.attnum)
          from pg_catalog.pg_attribute a
         where a.attrelid = c.conrelid and a.attnum = any(c.conkey) and a.atttypid >= 16384)
  from pg_catalog.pg_constraint c
 where c.conrelid = pg_catalog.to_regclass(pg_catalog.format('pg_temp.%%I', %s::text))
   and c.contype = 'c'
"""


_KNOWN: dict[tuple[object, ...], Kept] = {}


def kept(connection: Connection, table: TableId, text: str) -> Kept:
    """What Postgres makes of a filter, which isn't evaluated; raises psycopg's errors.

    As a constraint of an empty table of the same name and columns, which is temporary and never
    committed: Postgres keeps both alike. Asked again in this process, it is known: a table may wait
    for its pin for hours.
    """
    columns = connection.execute(_COLUMNS, (table.schema, table.name)).fetchall()
    info = connection.info
    asked = (info.host, info.port, info.dbname, table, text, tuple(columns))
    if (known := _KNOWN.get(asked)) is not None:
        return known
    with connection.transaction(force_rollback=True):
        connection.execute(
            sql.SQL("create temporary table {} ({}, check ({}))").format(
                sql.Identifier(table.name),
                sql.SQL(", ").join(sql.SQL(" ".join(map(str, column))) for column in columns),
                sql.SQL(text),
            ),
            prepare=False,
        )
        row = connection.execute(_KEPT, (table.name,)).fetchone()
        assert row is not None  # the table was just made with it
        mutable = _is_mutable(connection, table, text)
        found = _KNOWN[asked] = Kept(str(row[0]), frozenset(row[1]), row[2], row[3], mutable)
        return found


def _is_mutable(connection: Connection, table: TableId, text: str) -> bool:
    """As the predicate of an index, for which Postgres asks the same: dependencies leave it out."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(
                sql.SQL("create index on pg_temp.{} ((1)) where {}").format(
                    sql.Identifier(table.name), sql.SQL(text)
                ),
                prepare=False,
            )
    except psycopg.errors.InvalidObjectDefinition:
        return True
    return False


def and_filter(row_filter: str | None) -> sql.SQL:
    """What is appended to a WHERE clause, so that it has the filter's rows alone."""
    return sql.SQL(f" and ({row_filter})" if row_filter is not None else "")


def filtered(
    rows: sql.Composable, row_filter: str | None, columns: Iterable[str]
) -> sql.Composable:
    """A FROM item of ``columns`` of the filter's rows among ``rows``, to be given an alias."""
    if row_filter is None:
        return rows
    named = sql.SQL(", ").join(map(sql.Identifier, dict.fromkeys(columns)))
    return sql.SQL("(select {} from {} where {})").format(named, rows, sql.SQL(row_filter))


def refuse_text(text: str) -> None:
    """Raise ValueError unless ``text`` may stand in parentheses, as one expression."""
    bare = "".join(token for token in _TOKENS.findall(text) if not _is_quoted(token))
    depth = 0
    for mark in re.findall(r"[()]", bare):
        depth += 1 if mark == "(" else -1
        if depth < 0:
            break
    if depth or "'" in bare or '"' in bare:
        raise ValueError("a parenthesis or a quote has no other half")
    if ";" in bare or "--" in bare or "/*" in bare:
        raise ValueError("write one condition, as after WHERE, without ; and comments")


def same_text(one: str | None, other: str | None) -> bool:
    """Whether two filters are the same but for spaces, and parentheses around the whole."""
    return _plain(one) == _plain(other)


def _plain(text: str | None) -> list[str] | None:
    if text is None:
        return None
    parts = [token for token in _TOKENS.findall(text) if not token.isspace()]
    while parts and parts[0] == "(" and parts[-1] == ")":
        try:
            refuse_text(" ".join(parts[1:-1]))
        except ValueError:
            break
        parts = parts[1:-1]
    return parts


def _is_quoted(token: str) -> bool:
    return len(token) > 1 and token[0] in "'\""
