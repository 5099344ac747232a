"""The files of the followed tables' heaps at the source, and the reaction to a difference.

A look costs one query however many tables there are, and waits for no lock. Only a new heap, or one
with another file, is searched for rows, in its first pages: if a file that was just written has any
rows, they are there. A locked heap is looked at again later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import LiteralString

import psycopg
from psycopg import sql

from cdc_assets.errors import TableProblem
from cdc_assets.log.copies.chunks import planned_files, restart_copy
from cdc_assets.log.heaps.files import known_heaps, remember_heaps, remember_moment
from cdc_assets.log.heaps.record import (
    Difference,
    HeapFile,
    HeapTrace,
    KnownHeaps,
    Moment,
    Verdict,
    difference,
    judge,
)
from cdc_assets.log.locks import HEAPS_LOCK
from cdc_assets.log.states import TableState
from cdc_assets.log.store import LogStore
from cdc_assets.log.table_row import TableRow
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe, heaps
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.session.connect import Connection
from cdc_assets.postgres.slots import RECEIVED
from cdc_assets.readiness.source.planning import PLANNING_TIMEOUT

logger = logging.getLogger(__name__)

# 1 MB: a copied file begins with the rows that the old one began with.
_FIRST_PAGES = 128

_HEAPS: LiteralString = """
with recursive tree as (
    select o as root, o as oid, '' as link from unnest(%s::oid[]) o
     union all
    select t.root, i.inhrelid, t.link || i.xmin || ' '
      from tree t
      join pg_catalog.pg_class p on p.oid = t.oid and p.relkind = 'p'
      join pg_catalog.pg_inherits i on i.inhparent = t.oid)
select t.root::bigint, array_agg(c.oid::bigint) filter (where c.relkind = 'r'),
       array_agg(c.relfilenode::bigint) filter (where c.relkind = 'r'),
       array_agg(t.link) filter (where c.relkind = 'r')
  from tree t join pg_catalog.pg_class c on c.oid = t.oid
 group by t.root
"""
_MOMENT: LiteralString = (
    "select pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text::bigint,"
    " case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()"
    " else pg_catalog.pg_current_wal_insert_lsn() end::text"
)
_END: LiteralString = (
    f"select case when pg_catalog.pg_is_in_recovery() then {RECEIVED}"
    " else pg_catalog.pg_current_wal_insert_lsn() end::text"
)


def moment(connection: Connection) -> Moment:
    """The present moment; anything read afterwards is at least as new."""
    row = connection.execute(_MOMENT).fetchone()
    assert row is not None
    return Moment(int(row[0]), Lsn.parse(row[1]))


def _end(connection: Connection) -> Lsn:
    """Where the WAL ends of all that the server has shown."""
    row = connection.execute(_END).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


def heap_files(connection: Connection, oids: Iterable[int]) -> dict[int, dict[int, HeapFile]]:
    """The file of each heap of these tables; tables that are gone are left out."""
    found = connection.execute(_HEAPS, (list(oids),)).fetchall()
    return {
        int(root): dict(zip(heaps or (), map(HeapFile, files or (), links or ()), strict=True))
        for root, heaps, files, links in found
    }


# Transaction IDs go round: one precedes another if it is less than half of them behind.
_PRECEDES: LiteralString = "(({}::bigint - {} + 4294967296) %% 4294967296) >= 2147483648"

# up: the links by which the heap is reached from its table; it came by the newest one. A column
# with a negative number is as old as the heap, and never changes.
_TRACE: LiteralString = """
with recursive up as (
    select i.inhparent, i.xmin::text::bigint as xmin, i.cmin::text::bigint as cmin,
           pg_catalog.age(i.xmin) as age
      from pg_catalog.pg_inherits i where i.inhrelid = %(heap)s
     union all
    select i.inhparent, i.xmin::text::bigint, i.cmin::text::bigint, pg_catalog.age(i.xmin)
      from up u join pg_catalog.pg_inherits i on i.inhrelid = u.inhparent)
select n.nspname::text, c.relname::text, c.xmin::text::bigint,
       array(select distinct a.xmin::text::bigint from pg_catalog.pg_attribute a
              where a.attrelid = c.oid and a.attnum > 0),
       (select u.xmin from up u order by u.age, u.cmin desc limit 1),
       (select u.cmin from up u order by u.age, u.cmin desc limit 1),
       (select a.xmin::text::bigint from pg_catalog.pg_attribute a
         where a.attrelid = c.oid and a.attnum = -1)
  from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
 where c.oid = %(heap)s
"""
_ROWS: LiteralString = """
select coalesce(bool_or({kept}), false), coalesce(bool_or(x = any(%(altered)s)), false),
       coalesce(bool_or({before_link} or (x = %(link)s and c < %(command)s)), false), count(*) = 0
  from (select xmin::text::bigint as x, cmin::text::bigint as c from only {heap}
         where ctid < %(pages)s::tid) r
"""


def _trace(connection: Connection, heap: int, horizon: int) -> HeapTrace | None:
    """The heap's trace; None if it is gone, or locked: it is looked at again."""
    found = connection.execute(_TRACE, {"heap": heap}).fetchone()
    if found is None:
        return None
    schema, name, changed_by, altered_by, link, command, made_by = found
    since = horizon % 2**32
    altered = [x for x in altered_by if (x - since) % 2**32 < 2**31]
    query = sql.SQL(_ROWS).format(
        kept=sql.SQL(_PRECEDES).format(sql.SQL("x"), sql.Literal(since)),
        before_link=sql.SQL(_PRECEDES).format(sql.SQL("x"), sql.Literal(link)),
        heap=sql.Identifier(schema, name),
    )
    values = {
        "altered": altered,
        "link": link,
        "command": command,
        "pages": f"({_FIRST_PAGES},0)",
    }
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(PLANNING_TIMEOUT)
            row = connection.execute(query, values).fetchone()
    except (psycopg.errors.LockNotAvailable, psycopg.errors.UndefinedTable):
        return None
    except psycopg.DatabaseError:
        if connection.closed:
            raise
        # No right, or a function of an index that fails where a query is planned: the worst, but
        # for one that was made in place.
        row = (False, False, link != made_by, False)
    assert row is not None
    kept, rewritten, loaded, empty = row
    # ATTACH changes the heap's columns, too, but not its file.
    rewritten = rewritten or (changed_by in altered and changed_by != link)
    return HeapTrace(f"{schema}.{name}", kept, rewritten, loaded, changed_by, empty)


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at the source, with what the log knew before."""

    source: Connection
    store: LogStore
    at: Moment
    flushed: Lsn | None

    def settle(self, row: TableRow, known: KnownHeaps, files: Mapping[int, HeapFile]) -> None:
        """Judge the differences, and remember them or act."""
        found = difference(known.files, files)
        if not found:
            if known.own or any(file.link is None for file in known.files.values()):
                remember_heaps(self.store, row, files)
            return
        traces = self._traces(found, known)
        verdict: Verdict = "undecided"
        if traces is not None:
            verdict = judge(
                row.table,
                known,
                found,
                traces,
                keeps_history=row.mode == "append",
                flushed=self.flushed,
            )
        if verdict == "harmless":
            remember_heaps(self.store, row, files)
        elif verdict == "undecided":
            pending = known.pending or _end(self.source)
            remember_heaps(self.store, row, known.files, own=known.seen, pending=pending)
        elif row.state != TableState.STREAMING or verdict == "empty":
            logger.warning("%s: its rows were replaced unseen; copying again", row.table)
            restart_copy(self.store, row)
        else:
            logger.error("parked: %s", verdict)
            self.store.park(row.table, verdict.reason, row.epoch)

    def _traces(self, found: Difference, known: KnownHeaps) -> dict[int, HeapTrace] | None:
        traces = {}
        for heap in found.replaced | found.came:
            trace = _trace(self.source, heap, known.seen.horizon)
            if trace is None:
                return None
            traces[heap] = trace
        return traces


def unmoved(pipeline: Pipeline, row: TableRow) -> bool:
    """Whether the heaps of the copy's plan are those that the table has, with the same files."""
    with pipeline.connect_copy("pins") as source:
        try:
            found = heaps(source, row.table, describe(source, row.table).oid)
        except TableProblem:
            return False
    return {heap.oid: heap.filenode for heap in found} == planned_files(pipeline.store, row)


def look_at_heaps(source: Connection, store: LogStore, rows: Iterable[TableRow]) -> None:
    """Park the tables that have changes which are in no stream.

    Does nothing while another process looks.
    """
    if not store.try_lock(HEAPS_LOCK):
        return
    try:
        _look(source, store, list(rows))
    finally:
        store.unlock(HEAPS_LOCK)


def _look(source: Connection, store: LogStore, rows: list[TableRow]) -> None:
    flushed = store.flushed_lsn()  # before known_heaps: truncates are noted before it moves on
    known = known_heaps(store)
    look = _Look(source, store, moment(source), flushed)
    now = heap_files(source, [row.oid for row in rows])
    for row in rows:
        if (files := now.get(row.oid)) is None:
            continue  # it is gone, which is another finding
        if files.keys() == {row.oid} and (row.published_as or "").startswith("entry "):
            continue  # Postgres refuses to make it unlogged, and sends its TRUNCATE
        epoch, before = known.get(row.table, (0, None))
        if before is None or epoch != row.epoch:  # as an earlier version left it
            remember_heaps(store, row, files)
        else:
            look.settle(row, before, files)
    remember_moment(store, look.at)
