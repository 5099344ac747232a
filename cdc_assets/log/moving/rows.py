"""The rows of a source in the coordination schema, taken from one database to another.

Whichever tables the schema has: all whose rows belong to a source, referenced ones first. What is
left behind (:data:`STAYS`) belongs to sessions and processes at the old place. Values go as
Postgres's own text of them, which both connections have in one form, and are compared afterwards by
number and digest of the rows.

Clocks: of the times that are taken along none decides anything within ``SKEW_SECONDS``, by which
the two servers' clocks may differ, but for since when a staged file is passed. That is
left out: its grace begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from hashlib import sha256
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.errors import CoordinationError
from cdc_assets.log.moving.frozen import LOCKS, tables_of_sources
from cdc_assets.log.moving.mark import MOVED

# Sessions, workers, and what a flusher last said of itself.
STAYS = frozenset({LOCKS, "sessions", "consumer", "flusher_reports"})
# What a column has at the new place, whatever it had.
_ANEW: Mapping[tuple[str, str], str] = {
    ("claims", "worker"): "null::uuid",
    ("log_index", "passed_at"): "null::timestamptz",
}
_REFERENCES = """
select c.conrelid::pg_catalog.regclass::text, c.confrelid::pg_catalog.regclass::text
  from pg_catalog.pg_constraint c
 where c.contype = 'f' and c.connamespace = pg_catalog.to_regnamespace(%s)
"""
_COLUMNS = """
select a.attname, a.attidentity <> '' from pg_catalog.pg_attribute a
 where a.attrelid = pg_catalog.to_regclass(%s) and a.attnum > 0 and not a.attisdropped
   and a.attgenerated = '' order by a.attname
"""
_MODULUS = 1 << 128


@dataclass(frozen=True, slots=True)
class Digest:
    """Of rows in any order."""

    rows: int = 0
    sum: int = 0

    def __add__(self, row: bytes) -> Digest:
        number = int.from_bytes(sha256(row).digest()[:16])
        return Digest(self.rows + 1, (self.sum + number) % _MODULUS)


@dataclass(frozen=True, slots=True)
class _Table:
    name: str
    columns: tuple[str, ...]
    identity: str | None

    def rows(self, source: str) -> sql.Composed:
        """The statement that gives the rows of ``source`` as they are to be at the new place."""
        values = (
            sql.SQL(anew) if (anew := _ANEW.get((self.name, column))) else sql.Identifier(column)
            for column in self.columns
        )
        return sql.SQL("copy (select {} from {} where source = {}{}) to stdout").format(
            sql.SQL(", ").join(values),
            sql.Identifier(self.name),
            source,
            sql.SQL(" and key <> {}").format(MOVED)
            if self.name == "pipeline_meta"
            else sql.SQL(""),
        )

    @property
    def taking(self) -> sql.Composed:
        columns = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        return sql.SQL("copy {} ({}) from stdin").format(sql.Identifier(self.name), columns)


def moved_tables(connection: psycopg.Connection[Any], schema: str) -> list[_Table]:
    """The tables whose rows are taken along, referenced ones first."""
    names = [name for name in tables_of_sources(connection, schema) if name not in STAYS]
    order = TopologicalSorter[str](dict.fromkeys(names, ()))
    for table, referenced in connection.execute(_REFERENCES, (schema,)):
        if table in names and referenced in names:
            order.add(table, referenced)
    return [_table(connection, schema, name) for name in order.static_order()]


def _table(connection: psycopg.Connection[Any], schema: str, name: str) -> _Table:
    quoted = sql.Identifier(schema, name).as_string(connection)
    found = connection.execute(_COLUMNS, (quoted,)).fetchall()
    identity = next((str(column) for column, is_identity in found if is_identity), None)
    return _Table(name, tuple(str(column) for column, _ in found), identity)


def has_rows(connection: psycopg.Connection[Any], source: str, schema: str) -> bool:
    """Whether the schema knows ``source``, apart from a mark."""
    return any(
        connection.execute(
            sql.SQL("select from {} where source = %s{} limit 1").format(
                sql.Identifier(table.name),
                sql.SQL(" and key <> {}").format(MOVED)
                if table.name == "pipeline_meta"
                else sql.SQL(""),
            ),
            (source,),
        ).rowcount
        for table in moved_tables(connection, schema)
    )


def remove_rows(connection: psycopg.Connection[Any], source: str, schema: str) -> None:
    """Delete the source's rows but for its mark, within the caller's transaction."""
    tables = [table.name for table in reversed(moved_tables(connection, schema))]
    for name in (*tables, *sorted(STAYS - {LOCKS})):
        statement = sql.SQL("delete from {} where source = %s").format(sql.Identifier(name))
        if name == "pipeline_meta":
            statement += sql.SQL(" and key <> {}").format(MOVED)
        connection.execute(statement, (source,))


def copy_rows(
    old: psycopg.Connection[Any], new: psycopg.Connection[Any], source: str, schema: str
) -> dict[str, int]:
    """Copy the source's rows, within a transaction of each; their number by table.

    Raises CoordinationError, having to be rolled back, if what arrived isn't what was there.
    """
    done = dict[str, int]()
    for table in moved_tables(old, schema):
        sent = Digest()
        with new.cursor() as writing, writing.copy(table.taking) as taking:
            for row in _copied(old, table, source):
                sent += row
                taking.write(row)
        found = Digest()
        for row in _copied(new, table, source):
            found += row
        if sent != found:
            raise CoordinationError(
                f"{table.name}: {sent.rows} rows were copied, and what arrived differs"
                f" ({found.rows} rows).",
                "Try again; if it is so each time, please report it.",
            )
        if table.identity is not None:
            _rise(new, table)
        done[table.name] = sent.rows
    return done


def _copied(connection: psycopg.Connection[Any], table: _Table, source: str) -> Iterator[bytes]:
    with connection.cursor() as cursor, cursor.copy(table.rows(source)) as copy:
        for row in copy:
            yield bytes(row)


def _rise(connection: psycopg.Connection[Any], table: _Table) -> None:
    """Let the table's next number be above all that came; it goes on from its own if higher."""
    assert table.identity is not None
    column = sql.Identifier(table.identity)
    connection.execute(
        sql.SQL(
            "select pg_catalog.setval(s.name, m.highest) from (select {name}::regclass name) s,"
            " lateral (select max({column}) highest from {table}) m"
            " where m.highest > coalesce(pg_catalog.pg_sequence_last_value(s.name), 0)"
        ).format(
            name=sql.SQL("pg_catalog.pg_get_serial_sequence({}, {})").format(
                table.name, table.identity
            ),
            column=column,
            table=sql.Identifier(table.name),
        )
    )
