"""Row filters: which rows of a table leave the source (since Postgres 15).

The publication has the filter, so that the server sends no other row: a change that brings a row
into it is an INSERT, one that takes it out a DELETE. Postgres keeps the filter as an expression;
``row_filters`` has it as the server writes it, with the names that the columns have now. The copy,
and whoever reads rows again, use that text, and so read what the stream sends.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

import psycopg
from psycopg import sql

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# The first server version with row filters.
ROW_FILTERS = 150000
# Literals and quoted names, words, spaces, and any other character by itself.
_TOKENS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\w+|\s+|.""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A table's filter: as it is configured, and as the server writes it, if that is known."""

    configured: str
    known_as: str | None = None

    def is_published(self, connection: Connection, table: TableId, present: str | None) -> bool:
        """Whether ``present``, as a publication's entry has it, is this filter."""
        if present is None:
            return False
        if present == self.known_as or same_text(present, self.configured):
            return True
        return present == _as_the_server_writes(connection, table, self.configured)


def and_filter(row_filter: str | None) -> sql.SQL:
    """What is appended to a WHERE clause, so that it has the filter's rows alone."""
    return sql.SQL(f" and ({row_filter})" if row_filter is not None else "")


def filtered(rows: sql.Composable, row_filter: str | None) -> sql.Composable:
    """A FROM item of the filter's rows among ``rows``, to be given an alias."""
    if row_filter is None:
        return rows
    return sql.SQL("(select * from {} where {})").format(rows, sql.SQL(row_filter))


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


def _as_the_server_writes(connection: Connection, table: TableId, text: str) -> str | None:
    """The expression as Postgres prints it; None if it can't be told.

    As a constraint of a temporary table that is never committed: it is kept like a filter.
    """
    name = "cdc_assets_row_filter"
    with suppress(psycopg.DatabaseError), connection.transaction(force_rollback=True):
        connection.execute("set local lock_timeout = '1s'")
        connection.execute(
            sql.SQL("create temp table {} (like {}, constraint {} check ({}))").format(
                sql.Identifier(name), table.identifier, sql.Identifier(name), sql.SQL(text)
            )
        )
        row = connection.execute(
            "select pg_catalog.pg_get_expr(conbin, conrelid) from pg_catalog.pg_constraint"
            " where conrelid = pg_catalog.to_regclass('pg_temp.' || %s) and conname = %s",
            (name, name),
        ).fetchone()
        return str(row[0]) if row else None
    return None
