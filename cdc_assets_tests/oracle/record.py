"""What the source itself says of its history: every change of a row, whole, in the WAL's order.

Row triggers write each change's old and new row into the WAL as a transactional logical message,
and a slot of the oracle's own keeps these. Messages of what was rolled back aren't there, the rest
comes in commit order. It needs no publication and no replica identity, so it says what happened
even where the stream can't.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets_tests.oracle.plan import Table, quoted
from cdc_assets_tests.oracle.values import record_items

Image = dict[str, str | None]

SETUP = """
create schema oracle;
create type oracle.mood as enum ('low', 'high', 'it''s');
create type oracle.pair as (a int, b text);
create domain oracle.positive as int check (value > 0);
create function oracle.note() returns trigger language plpgsql
    set datestyle = 'ISO' set intervalstyle = 'postgres' set timezone = 'UTC'
    set extra_float_digits = 3 set bytea_output = 'hex' as $$
begin
    perform pg_logical_emit_message(true, 'oracle', jsonb_build_object(
        't', tg_argv[0], 'op', left(tg_op, 1),
        'c', (select jsonb_agg(attname order by attnum) from pg_attribute
               where attrelid = tg_relid and attnum > 0 and not attisdropped),
        'old', case when tg_op in ('UPDATE', 'DELETE') then old::text end,
        'new', case when tg_op in ('INSERT', 'UPDATE') then new::text end)::text);
    return null;
end $$;
create publication oracle_none;
"""
# As the product's sessions have it.
READABLE = (
    "set datestyle = 'ISO'; set intervalstyle = 'postgres'; set timezone = 'UTC';"
    " set extra_float_digits = 3; set bytea_output = 'hex'"
)


@dataclass(frozen=True, slots=True)
class Change:
    """One change: ``op`` is I, U, D or T; images are Postgres's text forms by column."""

    table: int
    op: str
    old: Image | None
    new: Image | None


@dataclass(frozen=True, slots=True)
class Transaction:
    """``lsn`` is that of its commit record."""

    lsn: int
    xid: int
    changes: tuple[Change, ...]


def slot(database: str) -> str:
    return f"oracle_{database}"


def watch(source: psycopg.Connection[Any], database: str, tables: list[Table]) -> None:
    """Begin to record; the tables are there, and empty."""
    for number, table in enumerate(tables):
        for relation in table.relations():
            # A partition has its root's trigger.
            rows = relation == table.sql or not (table.parts or table.only)
            if rows:
                source.execute(
                    f"create trigger oracle_rows after insert or update or delete on {relation}"
                    f" for each row execute function oracle.note({quoted(str(number))})".encode()
                )
            if relation == table.sql:
                source.execute(
                    f"create trigger oracle_all after truncate on {relation} for each statement"
                    f" execute function oracle.note({quoted(str(number))})".encode()
                )
    source.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot(database),))


def history(source: psycopg.Connection[Any], database: str) -> list[Transaction]:
    """Every transaction so far that changed a row."""
    frames = source.execute(
        "select data from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1',"
        " 'publication_names', 'oracle_none', 'messages', 'true')",
        (slot(database),),
    ).fetchall()
    found, changes, lsn, xid = list[Transaction](), list[Change](), 0, 0
    for (frame,) in frames:
        if frame[:1] == b"B":
            lsn, _, xid = struct.unpack_from(">QqI", frame, 1)
            changes = []
        elif frame[:1] == b"M" and (said := _message(frame)) is not None:
            changes.append(said)
        elif frame[:1] == b"C" and changes:
            found.append(Transaction(lsn, xid, tuple(changes)))
    return found


def _message(frame: bytes) -> Change | None:
    flags, _ = struct.unpack_from(">BQ", frame, 1)
    end = frame.index(b"\0", 10)
    if not flags & 1 or frame[10:end] != b"oracle":
        return None
    data = json.loads(frame[end + 5 :])
    columns = data["c"] or []

    def image(text: str | None) -> Image | None:
        return None if text is None else dict(zip(columns, record_items(text), strict=True))

    return Change(int(data["t"]), data["op"], image(data["old"]), image(data["new"]))


def rows(source: psycopg.Connection[Any], table: Table) -> list[Image]:
    """The table's rows as they are now, in Postgres's text form."""
    source.execute(READABLE.encode())
    only = "only " if table.only else ""
    cursor = source.execute(f"select * from {only}{table.sql}".encode())
    result, description = cursor.pgresult, cursor.description
    assert result is not None and description is not None
    names = [column.name for column in description]

    def value(row: int, column: int) -> str | None:
        found = result.get_value(row, column)
        return None if found is None else found.decode()

    return [{c: value(row, i) for i, c in enumerate(names)} for row in range(result.ntuples)]


_COLUMNS = """
with recursive base as (
    select attnum, attname, atttypid as type, atttypmod as modifier, attgenerated::text as generated
      from pg_attribute where attrelid = {}::regclass and attnum > 0 and not attisdropped
    union all
    select attnum, attname, typbasetype, typtypmod, generated
      from base join pg_type t on t.oid = base.type and typtype = 'd'
)
select attname, format_type(type, modifier), generated
  from base join pg_type t on t.oid = base.type and typtype <> 'd' order by attnum
"""


def note_all(source: psycopg.Connection[Any], number: int, relation: str, op: str) -> None:
    """Record that the table ``number`` loses (D) or gains (I) all rows of one of its relations."""
    source.execute(READABLE.encode())
    source.execute(
        f"select pg_logical_emit_message(true, 'oracle', jsonb_build_object('t', {number},"
        f" 'op', '{op}', 'c', (select jsonb_agg(attname order by attnum) from pg_attribute"
        f"  where attrelid = {quoted(relation)}::regclass and attnum > 0 and not attisdropped),"
        f" 'old', case '{op}' when 'D' then r::text end,"
        f" 'new', case '{op}' when 'I' then r::text end)::text) from {relation} r".encode()
    )


def columns(source: psycopg.Connection[Any], table: Table) -> dict[str, str]:
    """The table's columns with the base type's spelling, but for virtual ones."""
    found = source.execute(sql.SQL(_COLUMNS).format(sql.Literal(table.sql))).fetchall()
    return {name: kind for name, kind, generated in found if generated != "v"}


def before(changes: list[Transaction], lsn: int) -> Iterator[Change]:
    """What a snapshot at ``lsn`` shows."""
    return (change for tx in changes if tx.lsn < lsn for change in tx.changes)
