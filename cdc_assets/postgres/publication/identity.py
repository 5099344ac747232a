"""Whether Postgres can identify the changed rows of a table once it is published.

A published UPDATE or DELETE has to identify the row it changed. Postgres demands that of each
*heap* (a plain table, or a leaf of a partitioned one; a leaf inherits only the primary key). Where
a heap has no usable replica identity, Postgres refuses the statement itself: publishing such a
table breaks the application that writes it. The rules are those of ``CheckCmdReplicaIdentity`` and
``RelationGetReplicaIndex``. FULL is usable, or an index that is valid, unique, immediate and not
partial: by default the primary key's, else the one that was named and still exists. Since Postgres
18 a generated column of the identity has to be sent, too. Where the publication lists a table's
columns, the published root's list needs the columns (by name) of every heap's identity, and no heap
may be FULL. Where it has a row filter for the table, each heap that isn't FULL needs the filter's
columns in its identity.

A leaf whose identity is neither the table's key nor FULL is accepted by Postgres, but its old
tuples lack the key that the log uses: such a table can't be followed either.

Only the catalogs are read, so no lock is waited for; one query covers all tables. ``pins`` and
``flusher.guard`` decide the consequences of trouble.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cdc_assets.postgres.names import TableId, quoted
from cdc_assets.postgres.publication.contents import filter_columns, sent_columns
from cdc_assets.postgres.session.connect import Connection

# Since this version the server refuses changes whose identity has a column that isn't sent.
_CHECKS_GENERATED = 180000
# A message names this many heaps at most; once those are mended, the next check names the rest.
_LISTED = 20

_TROUBLES = """
with recursive listed as (
    select l.root, pg_catalog.array_agg(a.attname::text) as columns
      from unnest(%(listing)s::oid[], %(listed)s::int2[]) l (root, number)
      join pg_catalog.pg_attribute a on a.attrelid = l.root and a.attnum = l.number
     group by l.root),
filtered as (
    select f.root, pg_catalog.array_agg(coalesce(a.attname::text, '*')) as columns
      from unnest(%(filters)s::oid[], %(filtered)s::int2[]) f (root, number)
      left join pg_catalog.pg_attribute a on a.attrelid = f.root and a.attnum = f.number
     group by f.root),
root as (
    select c.oid,
           (select array(select a.attname::text from pg_catalog.pg_attribute a
                          where a.attrelid = i.indrelid
                            and a.attnum = any((i.indkey::int2[])[0:i.indnkeyatts - 1])
                          order by a.attname)
              from pg_catalog.pg_index i
             where i.indrelid = c.oid and i.indisvalid and i.indimmediate
               and (i.indisreplident or i.indisprimary)
             order by i.indisreplident desc limit 1) as key,
           l.columns as listed
      from pg_catalog.pg_class c left join listed l on l.root = c.oid
     where c.oid = any(%(roots)s::oid[])),
heap (root, oid) as (
    select oid, oid from root
    union all
    select h.root, i.inhrelid from heap h
      join pg_catalog.pg_inherits i on i.inhparent = h.oid
      join pg_catalog.pg_class c on c.oid = i.inhrelid and c.relispartition),
usable as not materialized (
    select h.root, h.oid, i.indexrelid, i.indisprimary, i.indisreplident,
           array(select a.attname::text from pg_catalog.pg_attribute a
                  where a.attrelid = h.oid
                    and a.attnum = any((i.indkey::int2[])[0:i.indnkeyatts - 1])
                  order by a.attname) as columns
      from heap h
      join pg_catalog.pg_index i on i.indrelid = h.oid
     where i.indisvalid and i.indisunique and i.indimmediate and i.indpred is null
       and not 0::int2 = any((i.indkey::int2[])[0:i.indnkeyatts - 1])
       and not exists (select from pg_catalog.pg_attribute a
                        where a.attrelid = h.oid and not a.attnotnull
                          and a.attnum = any((i.indkey::int2[])[0:i.indnkeyatts - 1])))
select h.root, n.nspname::text, c.relname::text, c.relreplident::text, u.columns, r.key, g.unsent,
       r.listed is not null, s.unlisted, w.outside, o.indisprimary, o.name
  from heap h
  join root r on r.oid = h.root
  join pg_catalog.pg_class c on c.oid = h.oid and c.relkind = 'r'
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  left join usable u on u.root = h.root and u.oid = h.oid
       and case c.relreplident when 'd' then u.indisprimary when 'i' then u.indisreplident end
  cross join lateral (
       select array(select a.attname::text from pg_catalog.pg_attribute a
                     where a.attrelid = h.oid and a.attnum > 0 and not a.attisdropped
                       and r.listed is null
                       and a.attgenerated <> '' and a.attgenerated::text <> all(%(sent)s::text[])
                       and (a.attname::text = any(u.columns) or a.attname::text = any(r.key)
                            or (%(strict)s and c.relreplident = 'f'))
                     order by a.attnum) as unsent) g
  cross join lateral (
       select case when r.listed is null then '{}'
                   when c.relreplident = 'f' then '{*}'
                   else array(select k from pg_catalog.unnest(u.columns) k
                               where k <> all(r.listed)) end as unlisted) s
  cross join lateral (
       select array(select distinct k from filtered f, pg_catalog.unnest(f.columns) k
                     where f.root = h.root and c.relreplident <> 'f' and u.columns is not null
                       and k <> all(u.columns) order by k) as outside) w
  left join lateral (
       select b.indisprimary, x.relname::text as name
         from usable b join pg_catalog.pg_class x on x.oid = b.indexrelid
        where b.root = h.root and b.oid = h.oid and g.unsent = '{}'
          and (b.columns = r.key or (r.key is null and h.oid = h.root))
          and (r.listed is null or b.columns <@ r.listed)
        order by b.indisprimary desc, x.relname limit 1) o on true
 where g.unsent <> '{}' or s.unlisted <> '{}' or w.outside <> '{}'
    or (c.relreplident <> 'f' and (u.columns is null or u.columns is distinct from r.key))
 order by h.root, n.nspname, c.relname
"""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A heap whose changed rows Postgres couldn't identify, or not by the table's key.

    ``refused``: Postgres refuses its UPDATE and DELETE once they are published. ``remedy`` is one
    statement of SQL, empty where none is sure to be right.
    """

    heap: TableId
    refused: bool
    what: str
    remedy: str
    unlisted: tuple[str, ...] = ()
    """The columns of its identity that the publication's column list lacks."""


def troubles(
    connection: Connection,
    roots: Collection[int],
    sent: Collection[str],
    listed: Mapping[int, Collection[int]],
    filtered: Mapping[int, Collection[int]],
) -> Mapping[int, Sequence[Trouble]]:
    """The heaps in trouble of each of these tables, by the table's oid; one query for all.

    ``sent``: which generated columns the publication sends, by the catalog's letters. ``listed``:
    for each table with a column list, the numbers of the columns that it sends. ``filtered``: for
    each table with a row filter, the numbers of the columns that it uses.
    """
    if not roots:
        return {}
    strict = connection.info.server_version >= _CHECKS_GENERATED
    lists = [(root, number) for root, numbers in listed.items() for number in numbers]
    filters = [(root, number) for root, numbers in filtered.items() for number in numbers]
    which = {
        "roots": list(roots),
        "sent": list(sent),
        "strict": strict,
        "listing": [root for root, _ in lists],
        "listed": [number for _, number in lists],
        "filters": [root for root, _ in filters],
        "filtered": [number for _, number in filters],
    }
    found: dict[int, list[Trouble]] = {}
    for root, *heap in connection.execute(_TROUBLES, which):
        found.setdefault(int(root), []).append(_judged(*heap, strict=strict))
    return found


def unidentified(
    connection: Connection, publication: str, oids: Sequence[int]
) -> Mapping[int, Sequence[Trouble]]:
    """The heaps of these tables whose changed rows Postgres couldn't identify, by table's oid."""
    sent = sent_columns(connection, publication, oids)
    filtered = filter_columns(connection, publication, oids)
    return troubles(connection, oids, sent.generated, sent.listed, filtered)


def _judged(
    schema: str,
    name: str,
    letter: str,
    identity: list[str] | None,
    key: list[str] | None,
    unsent: list[str],
    has_list: bool | None,
    unlisted: list[str],
    outside: list[str],
    by_primary_key: bool | None,
    index: str | None,
    *,
    strict: bool,
) -> Trouble:
    heap = TableId(schema, name)
    alter = f"alter table {heap} replica identity"
    if index is not None:
        remedy = f"{alter} default;" if by_primary_key else f"{alter} using index {quoted(index)};"
    else:
        remedy = "" if unsent or has_list else f"{alter} full;"
    if unlisted:
        what = (
            "its replica identity is full, but the publication lists its columns"
            if letter == "f"
            else f"the publication's column list lacks some of its identity ({_listed(unlisted)})"
        )
        return Trouble(heap, True, what, remedy, () if letter == "f" else tuple(unlisted))
    if unsent:
        what = f"Postgres doesn't send the generated columns of its identity ({_listed(unsent)})"
        return Trouble(heap, strict, what, remedy)
    if outside:
        return Trouble(
            heap,
            True,
            f"its row filter uses columns that its replica identity lacks ({_listed(outside)})",
            "-- filter by columns of its replica identity" if has_list else f"{alter} full;",
        )
    if identity is not None:
        of = f"not by the key ({_listed(key)})" if key else "and the table has no key"
        return Trouble(
            heap, False, f"its rows are identified by ({_listed(identity)}), {of}", remedy
        )
    what = {
        "n": "its replica identity is nothing",
        "i": "the index of its replica identity is gone, or can't be used",
    }.get(letter, "it has no primary key that identifies its rows, and no replica identity")
    return Trouble(heap, True, what, remedy)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(quoted(name) for name in names)


def sentence(table: TableId, found: Sequence[Trouble]) -> str:
    """The trouble with the heaps of ``table`` in words, without the full stop."""
    parts = [
        trouble.what if trouble.heap == table else f"{trouble.heap}: {trouble.what}"
        for trouble in found[:_LISTED]
    ]
    if len(found) > _LISTED:
        parts.append(f"and {len(found) - _LISTED} more of its partitions")
    said = "; ".join(parts)
    if any(trouble.refused for trouble in found):
        said += "; once it is published, Postgres would refuse every UPDATE and DELETE there"
    return said


def remedy(found: Sequence[Trouble]) -> str:
    """The SQL that mends the heaps, a statement for each; or other advice."""
    statements = [trouble.remedy for trouble in found[:_LISTED]]
    if not all(statements):
        if all(trouble.remedy or trouble.unlisted for trouble in found):
            return "List the columns of its identity in the publication, too."
        return "Give it a primary key of columns that the publication sends."
    return " ".join(statements)


_CHILDREN = """
select i.inhparent, n.nspname::text, c.relname::text
  from pg_catalog.pg_inherits i
  join pg_catalog.pg_class c on c.oid = i.inhrelid and not c.relispartition
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where i.inhparent = any(%s::oid[])
 order by i.inhparent, i.inhseqno
"""


def children(connection: Connection, tables: Collection[int]) -> Mapping[int, Sequence[TableId]]:
    """The tables that inherit from each of these and aren't its partitions, by the parent's oid."""
    found: dict[int, list[TableId]] = {}
    for parent, schema, name in connection.execute(_CHILDREN, (list(tables),)):
        found.setdefault(int(parent), []).append(TableId(schema, name))
    return found
