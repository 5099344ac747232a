"""Finding rows at the source by the texts of their key, without running code of its owners.

A cast, the check of a domain and an operator that is merely called ``=`` are functions that a
type's owner may have written, and they would run with our rights. So the operator is that of the
key's own index (only a superuser can make its operator class), and a text becomes a value by the
input function of a built-in type, or of an extension's. Values of any other type are printed and
compared as text, without an index's help: even for an enum, Postgres may choose the comparison by a
cast. Values of regclass and the like are compared as text, too: the name of a dropped object isn't
a value of theirs.

A view and a foreign table have no index of their own. Their built-in types are compared by the
default operator class, which is Postgres's own, and the keys are listed once more in a condition by
itself: that reaches the indexes below a view, and the server of a foreign table; a join doesn't.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from psycopg import sql

from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.types import text_form

Key = tuple[str | None, ...]
"""The texts of a key's columns."""

# Keys that are looked up at once: few enough for the planner to take the index.
_LOOKUP_KEYS = 500


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """How a text is compared with a column of the key; ``operator`` and ``type`` are SQL.

    ``read_by``: how a text becomes a value. A cast to a built-in type is Postgres's own; one to
    another type may be its owner's, but a literal is read by the input function.
    """

    name: str
    operator: str
    type: str
    read_by: Literal["cast", "input", "nothing"]
    is_elsewhere: bool = False
    """Whether it is a view's, or a foreign table's."""

    def among(self, texts: Iterable[str | None]) -> sql.Composable:
        """Whether ``t``'s column is one of these, which the planner may ask elsewhere."""
        column, operator, of = sql.Identifier("t", self.name), sql.SQL(self.operator), self.type
        listed = sql.SQL("{}::{}[]").format(sql.Literal(list(texts)), sql.SQL(of))
        return sql.SQL("{} {} any({})").format(column, operator, listed)

    def listed(self, texts: Iterable[str | None]) -> sql.Composable:
        """An array of texts, to be unnested and compared by :meth:`equals`."""
        element = self.type if self.read_by == "input" else "text"
        return sql.SQL("{}::{}[]").format(sql.Literal(list(texts)), sql.SQL(element))

    def equals(self, element: sql.Composable) -> sql.Composable:
        """Whether ``t``'s column is an element of an array that :meth:`listed` made."""
        column = sql.Identifier("t", self.name)
        if self.read_by == "nothing":
            return sql.SQL("{} = {}").format(text_form(column), element)
        if self.read_by == "cast":
            element = sql.SQL("{}::{}").format(element, sql.SQL(self.type))
        return sql.SQL("{} {} {}").format(column, sql.SQL(self.operator), element)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Some of the keys, those from place ``first`` on, for one statement.

    ``listed`` is a FROM item that shows them as ``k``, with ``k.n`` counting from 1; ``equal`` is
    the condition that the table's row ``t`` has the key of ``k``. Both have the values as literals:
    beside parameters, a % in a name would count as one.
    """

    first: int
    listed: sql.Composable
    equal: sql.Composable


def takes_a_scan(columns: Sequence[KeyColumn]) -> bool:
    """Whether no index helps to find rows."""
    return any(column.read_by == "nothing" for column in columns)


def lookups(columns: Sequence[KeyColumn], keys: Sequence[Key]) -> Iterator[Lookup]:
    """``keys`` in parts: _LOOKUP_KEYS at a time, or all at once if the lookup takes a scan."""
    names = [sql.Identifier(f"k{i}") for i in range(len(columns))]
    equal = sql.SQL(" and ").join(
        column.equals(sql.SQL("k.{}").format(name))
        for column, name in zip(columns, names, strict=True)
    )
    step = max(1, len(keys)) if takes_a_scan(columns) else _LOOKUP_KEYS
    for start in range(0, len(keys), step):
        some = keys[start : start + step]
        texts = zip(*some, strict=True)
        arrays = [c.listed(values) for c, values in zip(columns, texts, strict=True)]
        listed = sql.SQL("unnest({}) with ordinality as k ({}, n)").format(
            sql.SQL(", ").join(arrays), sql.SQL(", ").join(names)
        )
        among = [
            column.among(values)
            for column, values in zip(columns, zip(*some, strict=True), strict=True)
            if column.is_elsewhere and column.read_by == "cast"
        ]
        yield Lookup(start, listed, sql.SQL(" and ").join([equal, *among]))


# The operator is that of the key's index (see ``catalog``), or of any other unique one. A modifier
# of the type would cut values off.
_KEY_COLUMNS = """
with recursive base as (
    select a.attnum, a.attname, a.atttypid as type
      from pg_catalog.pg_attribute a
     where a.attrelid = %(oid)s and a.attnum = any(%(numbers)s::int2[]) and not a.attisdropped
    union all
    select b.attnum, b.attname, t.typbasetype
      from base b join pg_catalog.pg_type t on t.oid = b.type and t.typtype = 'd')
select b.attnum, b.attname::text, coalesce(equal.operator, ''), pg_catalog.format_type(t.oid, -1),
       case when equal.operator is null or t.typname ~ '^_?reg' then 'nothing'
            when t.typnamespace = 'pg_catalog'::pg_catalog.regnamespace then 'cast'
            when t.typtype = 'b' and t.typelem = 0 and equal.of = t.oid and o.rolsuper then 'input'
            else 'nothing' end,
       r.relkind in ('v', 'f')
  from base b join pg_catalog.pg_type t on t.oid = b.type and t.typtype <> 'd'
  join pg_catalog.pg_roles o on o.oid = t.typowner
  join pg_catalog.pg_class r on r.oid = %(oid)s
  left join lateral (
       select pg_catalog.format('operator(%%I.%%s)', n.nspname, o.oprname) as operator,
              c.opcintype as of
         from pg_catalog.pg_index i,
              unnest(i.indkey::int2[], i.indclass::oid[]) with ordinality k (attnum, class, place),
              pg_catalog.pg_opclass c, pg_catalog.pg_am m, pg_catalog.pg_amop p,
              pg_catalog.pg_operator o, pg_catalog.pg_namespace n
        where i.indrelid = %(oid)s and i.indisunique and i.indisvalid
          and k.attnum = b.attnum and k.place <= i.indnkeyatts and c.oid = k.class
          and m.oid = c.opcmethod and m.amname = 'btree' and p.amopfamily = c.opcfamily
          and p.amopstrategy = 3
          and p.amoplefttype = c.opcintype and p.amoprighttype = c.opcintype
          and o.oid = p.amopopr and n.oid = o.oprnamespace
        order by i.indisreplident desc, i.indisprimary desc, i.indexrelid limit 1) by_index on true
  left join lateral (
       select pg_catalog.format('operator(pg_catalog.%%s)', o.oprname) as operator,
              c.opcintype as of
         from pg_catalog.pg_opclass c
         join pg_catalog.pg_am m on m.oid = c.opcmethod and m.amname = 'btree'
         join pg_catalog.pg_amop p on p.amopfamily = c.opcfamily and p.amopstrategy = 3
          and p.amoplefttype = c.opcintype and p.amoprighttype = c.opcintype
         join pg_catalog.pg_operator o on o.oid = p.amopopr
          and o.oprnamespace = 'pg_catalog'::pg_catalog.regnamespace
        where r.relkind in ('v', 'm', 'f') and c.opcdefault
          and c.opcnamespace = 'pg_catalog'::pg_catalog.regnamespace
          and c.opcintype = case t.typname when 'varchar' then 'text'::pg_catalog.regtype
                                           else t.oid end
        limit 1) by_default on true
 cross join lateral (
       select coalesce(by_index.operator, by_default.operator) as operator,
              coalesce(by_index.of, by_default.of) as of) equal
"""


def key_columns(
    connection: Connection, oid: int, numbers: Iterable[int]
) -> Mapping[int, KeyColumn]:
    """How the source compares a table's columns, by attribute number; dropped ones are left out.

    A column that is in no unique index any more is compared as text.
    """
    found = connection.execute(_KEY_COLUMNS, {"oid": oid, "numbers": list(numbers)}).fetchall()
    return {int(number): KeyColumn(*rest) for number, *rest in found}
