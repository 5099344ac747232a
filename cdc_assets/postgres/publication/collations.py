"""By which collations a row filter compares, and whether another database has the same.

The server that streams evaluates the filter by its own. A restored database may have been made with
another locale, encoding or provider, or be on a system that sorts otherwise: there ``v > 'Z'`` and
``upper(v) = 'X'`` have other rows, though the text of the filter is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import LiteralString

from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import Connection

# "C" and "POSIX" are the same everywhere; no database has nondeterministic ones as its default.
_EVERYWHERE = {0, 950, 951}
_DEFAULT = 100
# =, <>, LIKE and NOT LIKE of text and bpchar: of a deterministic collation they compare bytes.
_BY_BYTES = {67, 157, 850, 851, 1048, 1053, 1631, 1632}
_FUNCTION = re.compile(r":(?:op)?funcid (\d+)")
_COLLATIONS = re.compile(r":inputcollids? (?:\(o )?([\d ]+)")
_FILTER: LiteralString = """
select r.prqual::text from pg_catalog.pg_publication_rel r
  join pg_catalog.pg_publication p on p.oid = r.prpubid
 where p.pubname = %s and r.prrelid = %s
"""
_NAMES: LiteralString = "select collname::text from pg_catalog.pg_collation where oid = any(%s)"
# Versions of Postgres call the same by other names, or lack it.
_COLLATED: LiteralString = """
select c.collname::text,
       pg_catalog.pg_encoding_to_char(d.encoding)::text,
       coalesce(f ->> 'datlocprovider', f ->> 'collprovider', 'c'),
       lower(replace(coalesce(f ->> 'datcollate', f ->> 'collcollate', ''), '-', '')),
       lower(replace(coalesce(f ->> 'datctype', f ->> 'collctype', ''), '-', '')),
       coalesce(f ->> 'datlocale', f ->> 'daticulocale', f ->> 'colllocale', f ->> 'colliculocale'),
       coalesce(f ->> 'daticurules', f ->> 'collicurules'),
       f ->> 'colldeterministic',
       pg_catalog.pg_collation_actual_version(c.oid)
  from pg_catalog.pg_collation c
  join pg_catalog.pg_database d on d.datname = pg_catalog.current_database()
 cross join lateral (
       select case when c.oid = 100 then pg_catalog.to_jsonb(d) else pg_catalog.to_jsonb(c) end
       ) facts (f)
 where c.collname = any(%s) and c.collnamespace = 'pg_catalog'::regnamespace
   and c.collencoding in (-1, d.encoding)
"""
_OF_COLUMNS: LiteralString = """
select a.attname::text, n.nspname::text, l.collname::text
  from pg_catalog.pg_attribute a
  join pg_catalog.pg_class c on c.oid = a.attrelid
  join pg_catalog.pg_namespace s on s.oid = c.relnamespace
  join pg_catalog.pg_collation l on l.oid = a.attcollation
  join pg_catalog.pg_namespace n on n.oid = l.collnamespace
 where s.nspname = %s and c.relname = %s and a.attnum > 0 and not a.attisdropped
"""


def filters_alike(
    source: Connection, there: Connection, publication: str, table: TableId, oid: int
) -> bool:
    """Whether the filter that the publication has of the table leaves the same rows ``there``."""
    row = source.execute(_FILTER, (publication, oid)).fetchone()
    used = _used(str(row[0])) if row is not None and row[0] is not None else set()
    if not used:
        return True
    here, other = (_of_columns(server, table) for server in (source, there))
    if any(other[name] != here[name] for name in here.keys() & other.keys()):
        return False
    names = [str(name) for (name,) in source.execute(_NAMES, ([*used],)).fetchall()]
    return _collated(source, names) == _collated(there, names)


def _used(tree: str) -> set[int]:
    """The collations that its outcome depends on, by oid; those of types that have none are 0."""
    found = set[int]()
    for node in tree.split("{"):
        function, collations = _FUNCTION.search(node), _COLLATIONS.search(node)
        if collations is None:
            continue
        named = set(map(int, collations[1].split())) - _EVERYWHERE
        by_bytes = function is not None and int(function[1]) in _BY_BYTES
        found |= named - {_DEFAULT} if by_bytes else named
    return found


def _of_columns(connection: Connection, table: TableId) -> dict[str, tuple[str, str]]:
    found = connection.execute(_OF_COLUMNS, (table.schema, table.name)).fetchall()
    return {name: (schema, collation) for name, schema, collation in found}


def _collated(connection: Connection, names: Iterable[str]) -> set[tuple[object, ...]]:
    return set(connection.execute(_COLLATED, ([*names],)).fetchall())
