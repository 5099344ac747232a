"""Whether a role may read all wanted parts of a table: every heap, each column, every row.

A copy reads each heap (the plain table, or a leaf of a partitioned one) by its own name, and
Postgres then demands rights on that heap, which inherits none of its root's, and USAGE of its
schema. A grant by columns is enough if it has the wanted columns, and the system columns of a row's
page and age. Read-only, one query for all tables, which waits for no lock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from psycopg import sql

from cdc_assets.messages.findings import Finding
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# A message names this many tables at most; the remedy has all of them.
_LISTED = 5

# ctid serves to read pages; the others distinguish a heap's rows from those of another file.
SYSTEM_COLUMNS = ("ctid", "xmin", "cmin")

_RIGHTS = """
with recursive part (root, oid) as (
    select w.oid, w.oid from unnest(%(oids)s::oid[]) w (oid)
    union all
    select p.root, i.inhrelid from part p
      join pg_catalog.pg_inherits i on i.inhparent = p.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition),
excluded (root, name) as (
    select * from unnest(%(roots)s::oid[], %(excluded)s::text[]))
select p.root, n.nspname::text, c.relname::text,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE'),
       pg_catalog.has_table_privilege(c.oid, 'SELECT')
       or not exists (
           select from pg_catalog.pg_attribute a
            where a.attrelid = c.oid and not a.attisdropped
              and (a.attnum > 0 or a.attname::text = any(%(system)s::text[])
                   or c.relkind = 'p' and a.attname::text = any(%(of_parts)s::text[]))
              and (p.root, a.attname::text) not in (select e.root, e.name from excluded e)
              and not pg_catalog.has_column_privilege(c.oid, a.attnum, 'SELECT')),
       pg_catalog.row_security_active(c.oid), current_user::text
  from part p
  join pg_catalog.pg_class c on c.oid = p.oid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 order by p.root, c.oid
"""


# Each of them is enough, of the table itself: its partitions are locked with it.
_MAY_LOCK = """
select c.oid::bigint, pg_catalog.quote_ident(current_user::text)
  from pg_catalog.pg_class c
 where c.oid = any(%s::oid[])
   and not pg_catalog.has_table_privilege(c.oid, %s)
"""
_LOCKING, _MAINTAIN = "UPDATE, DELETE, TRUNCATE", 170000


def unlockable(connection: Connection, tables: Mapping[int, TableId]) -> dict[TableId, Finding]:
    """Those of the tables, by oid, that the role may not lock against writers (SHARE).

    Since version 17 there is a right for that which lets nobody change a row.
    """
    maintain = connection.info.server_version >= _MAINTAIN
    rights = f"{_LOCKING}, MAINTAIN" if maintain else _LOCKING
    return {
        tables[oid]: Finding(
            "lock_privilege",
            "warning",
            f"the role {role} may not lock {tables[oid]} for its pin (snapshot.pin: lock): when"
            " it is copied next to the stream, it waits for that.",
            f"grant maintain on {tables[oid]} to {role}; -- or set pin: slot"
            if maintain
            else f"grant truncate on {tables[oid]} to {role}; -- or update, or delete: before"
            " Postgres 17 no lesser right has the lock. Or set pin: slot",
        )
        for oid, role in connection.execute(_MAY_LOCK, ([*tables], rights))
    }


def missing_rights(
    connection: Connection, tables: Mapping[int, Collection[str]], *, by_query: bool = False
) -> dict[int, list[Finding]]:
    """Reasons why this role would see only some of a table, or nothing; the remedies are SQL.

    ``tables``: by oid, the columns that aren't wanted, unsent ones among them. ``by_query``: a
    partitioned table is read as a whole, and rows told apart by their partition.
    """
    excluded = [(oid, name) for oid, names in tables.items() for name in names]
    of_parts = ["tableoid"] if by_query else []
    which = {
        "oids": [*tables],
        "system": list(SYSTEM_COLUMNS),
        "of_parts": of_parts,
        "roots": [oid for oid, _ in excluded],
        "excluded": [name for _, name in excluded],
    }
    heaps: dict[int, list[tuple[Any, ...]]] = {oid: [] for oid in tables}
    for root, *heap in connection.execute(_RIGHTS, which):
        heaps[root].append(tuple(heap))
    system = [*SYSTEM_COLUMNS, *of_parts]
    return {oid: _missing(connection, heaps[oid], names, system) for oid, names in tables.items()}


def _missing(
    connection: Connection,
    rows: Sequence[tuple[Any, ...]],
    excluded: Collection[str],
    system: Sequence[str],
) -> list[Finding]:
    closed = sorted({schema for schema, _, usable, *_ in rows if usable is False})
    unread = [TableId(s, n) for s, n, _, readable, *_ in rows if readable is False]
    hidden = [TableId(s, n) for s, n, *_, filtered, _ in rows if filtered]
    role = str(rows[0][-1]) if rows else ""
    who = sql.Identifier(role).as_string(connection)
    found = []
    if closed or unread:
        what = _listed(unread) if unread else f"in the schema {', '.join(closed)}"
        grants = [
            f"grant usage on schema {sql.Identifier(schema).as_string(connection)} to {who};"
            for schema in closed
        ]
        if unread:
            grants.append(f"grant select on {', '.join(map(str, unread))} to {who};")
            if excluded:
                grants[-1] += f" -- or only of {', '.join(system)} and the wanted columns"
        found.append(
            Finding(
                "select_privilege",
                "error",
                f"the role {role} may not read {what}.",
                " ".join(grants),
            )
        )
    if hidden:
        found.append(
            Finding(
                "row_security",
                "error",
                f"row-level security hides rows of {_listed(hidden)} from the role {role}.",
                f"alter role {who} bypassrls; -- or a copy would silently lack rows",
            )
        )
    return found


def _listed(tables: list[TableId]) -> str:
    return ", ".join(map(str, tables[:_LISTED])) + (", …" if len(tables) > _LISTED else "")
