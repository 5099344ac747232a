"""Whether a table is as it was planned to be read, asked in the transaction that reads it.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from cdc_assets.log.copies.claims import Claimed, ClaimScope
from cdc_assets.pins.reader import OpenTransaction, Read
from cdc_assets.postgres.copy_out.kinds import INT8, SQL_TYPES, TEXT, Kind
from cdc_assets.postgres.names import TableId
from cdc_assets.snapshot.convert import LakeField

# The heaps of a table, as ``catalog.heaps`` finds them: those of ``oids``.
_HEAPS = sql.SQL("""
with recursive tree as (
    select c.oid from pg_catalog.pg_class c
      join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where n.nspname = {schema} and c.relname = {name}
    union
    select i.inhrelid from pg_catalog.pg_inherits i join tree t on t.oid = i.inhparent
      join pg_catalog.pg_class p on p.oid = i.inhrelid and p.relispartition
)
select c.oid::bigint as oid, n.nspname::text as nspname, c.relname::text as relname
  from tree join pg_catalog.pg_class c on c.oid = tree.oid and c.relkind in ('r', 'v', 'm', 'f')
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.oid in ({oids})
""")

_BASE_TYPE = sql.SQL("""
with recursive base as (
    select oid, typbasetype from pg_catalog.pg_type where oid = {}::regtype
    union all
    select t.oid, t.typbasetype from base join pg_catalog.pg_type t on t.oid = base.typbasetype
)
select pg_catalog.format_type(oid, null) from base where typbasetype = 0
""")


@dataclass(frozen=True, slots=True)
class CopyTask:
    """All that a task needs to know of one table.

    Without ``snapshot_name`` it is read in transactions of about ``hold_at_most`` seconds.
    ``columns`` is the SELECT list, of the columns with these ``names`` and attribute ``numbers`` of
    the table that has ``oid``. ``chunks``: about how many are to be read. ``location``: the folder
    of the lake table's data files. ``io``: the properties of its FileIO. ``row_filter``: in SQL,
    which rows; a ``publication`` that sends the table's changes has the same.
    """

    table: TableId
    oid: int
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    source_uri: str
    snapshot_name: str | None
    hold_at_most: float
    columns: str
    row_filter: str | None
    publication: str | None
    fields: tuple[LakeField, ...]
    scope: ClaimScope
    worker: str
    chunks: int
    location: str
    io: tuple[tuple[str, str], ...]


class Rewritten(Exception):
    """The table has another file than when it was planned: its ctids mean other rows now."""


@contextmanager
def as_planned(
    task: CopyTask, chunks: Sequence[Claimed], open_transaction: OpenTransaction
) -> Iterator[tuple[Read, dict[int, TableId]]]:
    """A transaction in which the chunks' heaps, which come by oid, are as they were planned."""
    with open_transaction(task.snapshot_name) as run:
        heaps = _heaps(run, task.table, chunks)
        for heap in heaps.values():
            _check_types(run, task, heap)
        _check_names(run, task)
        _check_filter(run, task)
        yield run, heaps
        _check(run, heaps, chunks)


def _heaps(run: Read, table: TableId, chunks: Sequence[Claimed]) -> dict[int, TableId]:
    """The names of the chunks' heaps, by oid, as the snapshot has them.

    Raises Rewritten unless each is the table itself or one of its partitions: the plan names them,
    but the right to write a plan must not give the right to read other tables.
    """
    oids = {chunk.oid for chunk in chunks}
    query = _HEAPS.format(
        schema=sql.Literal(table.schema),
        name=sql.Literal(table.name),
        oids=sql.SQL(", ").join(map(sql.Literal, sorted(oids))),
    )
    rows = rows_of(run, query, (INT8, TEXT, TEXT))
    found = {int(oid): TableId(schema, name) for oid, schema, name in rows}
    if strange := oids - found.keys():
        raise Rewritten(f"what has the oid {min(strange)} isn't the table, nor a part of it")
    return found


def _check_types(run: Read, task: CopyTask, heap: TableId) -> None:
    """Raise DatatypeMismatch unless the columns are sent as planned: bytes don't tell their type.

    An ALTER TABLE that keeps the file may have come before our lock, which is taken here.
    """
    places = range(len(task.fields))
    query = sql.SQL(
        "select {types} from (select 1) one left join"
        " (select {columns} from only {heap} where false) q({names}) on true"
    ).format(
        types=sql.SQL(", ").join(
            sql.SQL("pg_catalog.pg_typeof(q.c{})::text").format(sql.Literal(n)) for n in places
        ),
        columns=sql.SQL(task.columns),
        heap=heap.identifier,
        names=sql.SQL(", ").join(sql.SQL("c{}").format(sql.Literal(n)) for n in places),
    )
    (found,) = rows_of(run, query, [TEXT] * len(task.fields))
    for field, kind in zip(task.fields, found, strict=True):
        element, several = field.sent.removesuffix("[]"), field.sent.endswith("[]")
        planned = {name + "[]" * several for name in SQL_TYPES[element]}
        if kind not in planned and _base_type(run, kind) not in planned:
            raise psycopg.errors.DatatypeMismatch(f"column {field.name} is of type {kind} now")


def _check_names(run: Read, task: CopyTask) -> None:
    """Raise UndefinedColumn unless the names are those of the planned columns: two may be swapped.

    By a function that sees the present, as the SELECT does, and not the snapshot. Our lock is taken
    by then: a renaming ALTER TABLE waits for it, of a partition's root, too.
    """
    query = sql.SQL(
        "select coalesce((pg_catalog.pg_identify_object_as_address("
        "'pg_catalog.pg_class'::pg_catalog.regclass, {oid}, n)).object_names[3], '')"
        " from unnest({numbers}::int[]) with ordinality as t (n, place) order by place"
    ).format(oid=sql.Literal(task.oid), numbers=sql.Literal(list(task.numbers)))
    for (now,), planned in zip(rows_of(run, query, [TEXT]), task.names, strict=True):
        if now != planned:
            raise psycopg.errors.UndefinedColumn(f"column {planned} has another name now")


def _check_filter(run: Read, task: CopyTask) -> None:
    """Raise UndefinedColumn if Postgres writes the filter otherwise now: its columns were renamed.

    The entry is the snapshot's, but the names are those that the SELECT finds.
    """
    if task.row_filter is None or task.publication is None:
        return
    query = sql.SQL(
        "select coalesce(pg_catalog.max(pg_catalog.pg_get_expr(r.prqual, r.prrelid)), '')"
        " from pg_catalog.pg_publication_rel r"
        " join pg_catalog.pg_publication p on p.oid = r.prpubid"
        " where p.pubname = {} and r.prrelid = {}"
    ).format(sql.Literal(task.publication), sql.Literal(task.oid))
    if rows_of(run, query, [TEXT]) != [(task.row_filter,)]:
        raise psycopg.errors.UndefinedColumn("columns of its row filter have other names now")


def _base_type(run: Read, kind: str) -> str:
    """What a domain is in the end; any other type is itself."""
    return str(rows_of(run, _BASE_TYPE.format(sql.Literal(kind)), [TEXT])[0][0])


def rows_of(run: Read, query: sql.Composed, kinds: Sequence[Kind]) -> list[tuple[Any, ...]]:
    batches = run(query.as_string(None), kinds)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def _check(run: Read, heaps: Mapping[int, TableId], chunks: Sequence[Claimed]) -> None:
    """Raise Rewritten if a heap isn't the one that was planned; our lock keeps it as it is.

    The functions see the present, not the snapshot, which doesn't protect from TRUNCATE; and ctids
    don't outlive VACUUM FULL.
    """
    for oid, filenode in {(c.oid, c.filenode) for c in chunks}:
        name = sql.Literal(heaps[oid].identifier.as_string(None))
        query = sql.SQL(
            "select pg_catalog.to_regclass({})::oid::bigint,"
            " coalesce(pg_catalog.pg_relation_filenode({}), 0)::bigint"
        ).format(name, sql.Literal(oid))
        if rows_of(run, query, (INT8, INT8)) != [(oid, filenode)]:
            raise Rewritten(
                f"{heaps[oid]} was truncated, rewritten or replaced while it was copied"
            )
