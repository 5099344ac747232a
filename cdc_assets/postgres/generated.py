"""Which columns of a table a generated one is made from."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_assets.postgres.session.connect import Connection

# The dependency is the default's or the column's own: versions of Postgres differ.
_MADE_FROM = """
with recursive tree (root, oid) as (
    select root, root from unnest(%s::oid[]) root
    union all
    select t.root, i.inhrelid from tree t
      join pg_catalog.pg_inherits i on i.inhparent = t.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition)
select distinct t.root::bigint, a.attname::text, b.attname::text
  from tree t
  join pg_catalog.pg_attribute a on a.attrelid = t.oid
  join pg_catalog.pg_attrdef e on e.adrelid = a.attrelid and e.adnum = a.attnum
  join pg_catalog.pg_depend d on d.refclassid = 'pg_catalog.pg_class'::regclass
       and d.refobjid = a.attrelid and d.refobjsubid > 0 and d.refobjsubid <> a.attnum
       and ((d.classid = 'pg_catalog.pg_attrdef'::regclass and d.objid = e.oid)
            or (d.classid = 'pg_catalog.pg_class'::regclass and d.objid = a.attrelid
                and d.objsubid = a.attnum))
  join pg_catalog.pg_attribute b on b.attrelid = a.attrelid and b.attnum = d.refobjsubid
 where a.attgenerated <> ''
"""


def made_from(connection: Connection, oids: Sequence[int]) -> dict[int, dict[str, set[str]]]:
    """By table and generated column, the columns that it is made from, in a partition at least."""
    found = dict[int, dict[str, set[str]]]()
    rows = () if not oids else connection.execute(_MADE_FROM, (list(oids),)).fetchall()
    for oid, name, other in rows:
        found.setdefault(oid, {}).setdefault(name, set()).add(other)
    return found
