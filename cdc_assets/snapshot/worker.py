"""A Spark task of a copy: claim chunks, read them, write a Parquet file, record it.

A task lives until nothing is left to claim, so one table costs a few long tasks. It claims some
neighbouring chunks at a time, reads them in one short transaction under the pinned snapshot (each
in several, under snapshots of the moment, if the copy is incremental), writes their rows to one
file below the lake table's location, and records the file with its claim: from then on any
coordinator can commit it (``snapshot.landing``). A task whose coordinator died goes on and loses
nothing; one that was fenced deletes what it wrote.

This module runs inside Spark's Python workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from cdc_assets.errors import first_line
from cdc_assets.log.copies.claims import Claimed, Claims, ClaimScope, Written
from cdc_assets.pins.reader import OpenTransaction, Read, snapshot_reader
from cdc_assets.postgres.copy_out.values import INT8, SQL_TYPES, TEXT, Kind
from cdc_assets.postgres.ctid import CtidRange
from cdc_assets.postgres.names import TableId, quoted
from cdc_assets.postgres.types import refused_array
from cdc_assets.snapshot.convert import DoesNotFit, LakeField
from cdc_assets.snapshot.lake_file import LakeFile
from cdc_assets.snapshot.pace import Pace

# SQL states that a coordinator can do something about.
# invalid_parameter_value, undefined_object, object_not_in_prerequisite_state
_SNAPSHOT_GONE = ("22023", "42704", "55000")
_TABLE_CHANGED = ("42P01", "42703", "42804", "3F000")  # undefined table, column, datatype, schema

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
  from tree join pg_catalog.pg_class c on c.oid = tree.oid and c.relkind = 'r'
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

# How many pages a heap has, and where the WAL ends: both of now, and not of the snapshot.
_HEAP_PAGES = sql.SQL(
    "select pg_catalog.pg_relation_size({}::oid)"
    " / pg_catalog.current_setting('block_size')::bigint,"
    " pg_catalog.pg_current_wal_insert_lsn()::text"
)

OUTCOME_SCHEMA = "table_name string, outcome string, detail string"


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


class _Rewritten(Exception):
    """The table has another file than when it was planned: its ctids mean other rows now."""


def copy_worker(
    tasks: Sequence[CopyTask],
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """For ``mapInArrow``: works on one table after the other, and yields each one's outcome.

    ``done``; ``lost`` (the snapshot is gone); ``rewritten`` (the table has a new file); ``changed``
    (table or columns are other than planned); ``unfit`` (a value of a column whose policy is fail);
    ``failed``. The detail is a sentence, or that column's name. All tables are of one source and
    one coordination database.
    """

    def work(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in [n for batch in numbers for n in batch.column(0).to_pylist()]:
            claims = Claims(tasks[0].scope, f"{tasks[0].worker}/{os.getpid()}")
            try:
                with snapshot_reader(tasks[0].source_uri) as open_transaction:
                    for task in tasks:
                        claims.serve(task.scope)
                        outcome, detail = _outcome(task, claims, open_transaction)
                        yield pa.record_batch(
                            {
                                "table_name": [task.scope.table],
                                "outcome": [outcome],
                                "detail": [detail],
                            }
                        )
            finally:
                claims.close()

    return work


def _outcome(task: CopyTask, claims: Claims, open_transaction: OpenTransaction) -> tuple[str, str]:
    pace = Pace(task.hold_at_most)
    try:
        while chunks := claims.take():
            with LakeFile(task.location, dict(task.io), task.scope.epoch, task.fields) as file:
                if task.snapshot_name is not None:
                    with _checked(task, chunks, open_transaction) as (run, heaps):
                        written = [
                            _copy(task, run, chunk, _pages(chunk), heaps[chunk.oid], file)
                            for chunk in chunks
                        ]
                else:
                    written = [
                        _copy_in_parts(task, chunk, open_transaction, pace, file)
                        for chunk in chunks
                    ]
            if not claims.wrote(written, file.path):
                file.delete()
    except _Rewritten as error:
        return "rewritten", str(error)
    except DoesNotFit as error:
        return "unfit", str(error)
    except psycopg.Error as error:
        if (column := refused_array(str(error))) is not None:
            return "unfit", column
        text = first_line(error)
        if error.sqlstate in _SNAPSHOT_GONE and "snapshot" in text:
            return "lost", text
        if error.sqlstate in _TABLE_CHANGED:
            return "changed", text
        return "failed", text
    except Exception as error:  # noqa: BLE001 - one table's, told; the others go on
        return "failed", f"{type(error).__name__}: {first_line(error)}"
    finally:
        claims.release()
    return "done", ""


@contextmanager
def _checked(
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

    Raises _Rewritten unless each is the table itself or one of its partitions: the plan names them,
    but the right to write a plan must not give the right to read other tables.
    """
    oids = {chunk.oid for chunk in chunks}
    query = _HEAPS.format(
        schema=sql.Literal(table.schema),
        name=sql.Literal(table.name),
        oids=sql.SQL(", ").join(map(sql.Literal, sorted(oids))),
    )
    rows = _rows(run, query, (INT8, TEXT, TEXT))
    found = {int(oid): TableId(schema, name) for oid, schema, name in rows}
    if strange := oids - found.keys():
        raise _Rewritten(f"what has the oid {min(strange)} isn't the table, nor a part of it")
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
    (found,) = _rows(run, query, [TEXT] * len(task.fields))
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
    for (now,), planned in zip(_rows(run, query, [TEXT]), task.names, strict=True):
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
    if _rows(run, query, [TEXT]) != [(task.row_filter,)]:
        raise psycopg.errors.UndefinedColumn("columns of its row filter have other names now")


def _base_type(run: Read, kind: str) -> str:
    """What a domain is in the end; any other type is itself."""
    return str(_rows(run, _BASE_TYPE.format(sql.Literal(kind)), [TEXT])[0][0])


def _rows(run: Read, query: sql.Composed, kinds: Sequence[Kind]) -> list[tuple[Any, ...]]:
    batches = run(query.as_string(None), kinds)
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def _pages(chunk: Claimed) -> CtidRange:
    return CtidRange(chunk.first_block, chunk.end_block)


def _copy_in_parts(
    task: CopyTask,
    chunk: Claimed,
    open_transaction: OpenTransaction,
    pace: Pace,
    file: LakeFile,
) -> Written:
    """Read a chunk in short transactions: between them no snapshot holds VACUUM back.

    What moves between them is in the log, whose point is ``read_lsn`` by then.
    """
    with open_transaction(None) as run:
        ((now, _),) = _rows(run, _HEAP_PAGES.format(sql.Literal(chunk.oid)), (INT8, TEXT))
    parts = list[Written]()
    for pages in pace.parts(_pages(chunk), now or 0):
        began = time.monotonic()
        with _checked(task, [chunk], open_transaction) as (run, heaps):
            part = _copy(task, run, chunk, pages, heaps[chunk.oid], file)
            ((_, lsn),) = _rows(run, _HEAP_PAGES.format(sql.Literal(chunk.oid)), (INT8, TEXT))
        pace.took(time.monotonic() - began)
        parts.append(replace(part, read_lsn=lsn))
    return Written(
        chunk.key,
        sum(part.rows for part in parts),
        sum(part.bytes for part in parts),
        sum(part.seconds for part in parts),
        parts[-1].read_lsn,
    )


def _copy(
    task: CopyTask, run: Read, chunk: Claimed, pages: CtidRange, heap: TableId, file: LakeFile
) -> Written:
    began, rows, size = time.monotonic(), 0, 0
    relation = heap.identifier.as_string(None)
    # A filter may name the table, whose rows are those of a partition here.
    called = quoted(task.table.name) if task.row_filter is not None else ""
    query = f"select {task.columns} from only {relation} {called} where {pages.predicate}"
    if task.row_filter is not None:
        query += f" and ({task.row_filter})"
    for batch in run(query, [field.kind for field in task.fields]):
        rows, size = rows + batch.num_rows, size + batch.nbytes
        file.write(batch)
        del batch  # keep no reference here, either
    return Written(chunk.key, rows, size, time.monotonic() - began)


def _check(run: Read, heaps: Mapping[int, TableId], chunks: Sequence[Claimed]) -> None:
    """Raise _Rewritten if a heap isn't the one that was planned; our lock keeps it as it is.

    The functions see the present, not the snapshot, which doesn't protect from TRUNCATE; and ctids
    don't outlive VACUUM FULL.
    """
    for oid, filenode in {(c.oid, c.filenode) for c in chunks}:
        name = sql.Literal(heaps[oid].identifier.as_string(None))
        query = sql.SQL(
            "select pg_catalog.to_regclass({})::oid::bigint,"
            " pg_catalog.pg_relation_filenode({})::bigint"
        ).format(name, sql.Literal(oid))
        if _rows(run, query, (INT8, INT8)) != [(oid, filenode)]:
            raise _Rewritten(
                f"{heaps[oid]} was truncated, rewritten or replaced while it was copied"
            )
