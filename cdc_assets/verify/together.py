"""Comparing small tables together: what a comparison of one costs is its steps, not its rows.

They share a point, a wait for the flusher and two Spark jobs, which make fingerprints of both
sides. A table whose fingerprints differ is compared alone after that, which names its rows.

They are merged side by side while the source is read. Each is merged up to the point under its
writer lock, as a table that is compared alone is. All locks are wished for when the point is made:
a merge that begins later would pass it.

A table that can't go with the others is left out: it is compared alone, and its problem told there.
Snapshots aren't kept from expiry: a read takes seconds, and fails if one is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from threading import Event

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc_assets.errors import TableProblem
from cdc_assets.lake.spark.beside import sessions_beside
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.locks import write_lock
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.schema.ahead import Look
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.difference import Balance, Fingerprint, fingerprints
from cdc_assets.verify.others import other_columns
from cdc_assets.verify.point import LOCKED_SECONDS, FlushTo, moment, offset_of, passed, whole_at
from cdc_assets.verify.rows import (
    Beside,
    Shape,
    as_of,
    comparable,
    lake_cells,
    shapes,
)
from cdc_assets.verify.source import NUMBER, Counted, count_sources, read_together

# A comparison of more rows is mostly its rows.
SMALL_ROWS = 1_000_000
# All of a group are hashed in one statement, which has cells for the columns of the widest.
_COLUMNS = 100
# Tables of one group: while the log is awaited, none of them is merged.
_GROUP = 12
# How long the tables' locks are waited for, about as long as a merge takes; nobody begins to merge
# them meanwhile.
_LOCK_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A table at ``lsn``: what was read of the source, and how many rows that counts itself."""

    lsn: Lsn
    read: Counted
    counted: int
    balance: Balance
    others: tuple[str, ...]


def groups(pipeline: Pipeline, tables: Sequence[TableId]) -> Iterator[list[TableId]]:
    """The small ones of ``tables``, in groups that are compared together."""
    most = pipeline.config.lake.merge_bytes
    behind = {b.table for b in pipeline.store.backlogs() if b.bytes > most}
    small = []
    for table in tables:
        with suppress(Exception):  # told when the table is compared alone
            lake = comparable(pipeline, table)
            narrow = len(lake.columns) <= _COLUMNS
            if table not in behind and narrow and lake.state().total_rows <= SMALL_ROWS:
                small.append(table)
    for first in range(0, len(small), _GROUP):
        yield small[first : first + _GROUP]


def compare_together(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Sequence[TableId],
    flush_to: FlushTo,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[TableId, Seen]:
    """Compare ``tables`` at one LSN; those that couldn't be compared are left out.

    The balance of one that differs names no row, and counts as few differing keys as possible.
    """
    offsets = dict[TableId, int]()
    for table in tables:
        with suppress(Exception):  # told when the table is compared alone
            offsets[table] = offset_of(comparable(pipeline, table).state())
    if not offsets:
        return {}
    before = shapes(pipeline, list(offsets))
    with ExitStack() as cleanup:
        levelling = cleanup.enter_context(_levelling(pipeline, session, offsets, before))
        with moment(pipeline, "verify") as (point, snapshot_name):
            on_progress(f"reading the source at {point}, and merging up to there")
            levelled = levelling(point, flush_to)
            expected = _as_they_are(pipeline, session, list(offsets))
            read = read_together(pipeline, session, list(expected.values()), snapshot_name)
            counts = read.counted()
            there = count_sources(pipeline, [expected[table] for table in counts], snapshot_name)
        rows = sum(counted.rows for counted, _ in counts.values())
        on_progress(f"{rows:,} rows of the source are read; reading the lake's")
        besides = dict[TableId, Beside]()
        for lake, snapshot_id in levelled():
            if (table := lake.row.table) in counts:
                with suppress(TableProblem, OSError, PySparkException):
                    besides[table] = as_of(session, lake, snapshot_id)
        # What a worker altered since its merge here is seen by these: the source was first.
        after = shapes(pipeline, list(besides))
        same = {
            table: beside
            for table, beside in besides.items()
            if after.get(table) == before[table] and _read_as(beside) == _read_as(expected[table])
        }
        found = dict[TableId, Seen]()
        for table, theirs in _fingerprints(same, read.width).items():
            (counted, ours), others = counts[table], other_columns(same[table])
            odd = 0 if ours == theirs else max(1, abs(ours.rows - theirs.rows))
            whole = Balance(ours.rows, theirs.rows, odd, (), ())
            found[table] = Seen(point, counted, there[table], whole, others)
        return found


def _fingerprints(besides: Mapping[TableId, Beside], width: int) -> dict[TableId, Fingerprint]:
    """Of the lake's rows, in ``width`` cells, in one Spark job."""
    if not besides:
        return {}
    names = [f"c{place}" for place in range(width)]
    sides = [
        lake_cells(beside, names).withColumn(NUMBER, F.lit(number))
        for number, beside in enumerate(besides.values())
    ]
    cells = [F.col(name) for name in names]
    both = fingerprints(reduce(DataFrame.unionByName, sides), cells, F.col("lake"), NUMBER)
    found = {number: Fingerprint.of(sums) for number, *sums in both.collect()}
    return {table: found.get(number, Fingerprint()) for number, table in enumerate(besides)}


def _as_they_are(
    pipeline: Pipeline, session: SparkSession, tables: Sequence[TableId]
) -> dict[TableId, Beside]:
    """The lake tables before they are level with a point."""
    found = dict[TableId, Beside]()
    for table in tables:
        with suppress(TableProblem, OSError, PySparkException):
            found[table] = as_of(session, comparable(pipeline, table), None)
    return found


def _read_as(beside: Beside) -> list[object]:
    """What the columns are that the source is read for."""
    return [(c.name, c.source, c.mapping.lake, c.policy, kind) for c, kind in beside.columns]


Levelled = Callable[[], list[tuple[LakeTable, int | None]]]
"""Waits for the lake tables with just what committed below a point, and their snapshots."""


@contextmanager
def _levelling(
    pipeline: Pipeline,
    session: SparkSession,
    offsets: Mapping[TableId, int],
    before: Mapping[TableId, Shape],
) -> Iterator[Callable[[Lsn, FlushTo], Levelled]]:
    """A function that begins to make the tables level with a point, once the log is.

    ``flush_to`` is called in the caller's thread; the merges go on in others meanwhile.
    """
    if not pipeline.config.streams:  # there is no log

        def as_copied(_: Lsn, __: FlushTo) -> Levelled:
            lakes = [comparable(pipeline, table) for table in offsets]
            found = [(lake, lake.state().snapshot_id) for lake in lakes]
            return lambda: found

        yield as_copied
        return
    with _hands(pipeline, session, len(offsets)) as hands, ThreadPoolExecutor(len(hands)) as pool:
        tables = sorted(offsets, key=str)
        shares = [tables[number :: len(hands)] for number in range(len(hands))]
        over = Event()

        def begin(point: Lsn, flush_to: FlushTo) -> Levelled:
            flushed, looks = Future[None](), {t: Look(before[t].told, point) for t in tables}
            try:
                begun = [
                    pool.submit(hand.level, share, point, offsets, looks, flushed, over)
                    for hand, share in zip(hands, shares, strict=True)
                ]
                flush_to(point, seconds=LOCKED_SECONDS)
            except BaseException as error:
                flushed.set_exception(error)
                raise
            flushed.set_result(None)
            return lambda: [done for some in begun for done in some.result()]

        try:
            yield begin
        finally:
            over.set()


@dataclass(frozen=True, slots=True)
class _Hand:
    """Merges tables, with a pipeline and a session of its own."""

    pipeline: Pipeline
    session: SparkSession

    def level(
        self,
        tables: Sequence[TableId],
        point: Lsn,
        offsets: Mapping[TableId, int],
        looks: Mapping[TableId, Look],
        flushed: Future[None],
        over: Event,
    ) -> list[tuple[LakeTable, int | None]]:
        """Lock the tables and, once the log is ``flushed``, merge one after the other.

        Nobody waits for those that are left once it is ``over``.
        """
        try:
            locked = self.lock(tables, point, offsets)
            flushed.result()
            merged = (self.merge(table, looks[table]) for table in locked if not over.is_set())
            return [done for done in merged if done is not None]
        finally:
            for table in tables:  # the source may be read for long yet
                self.pipeline.store.unlock(write_lock(table))

    def lock(
        self, tables: Sequence[TableId], point: Lsn, offsets: Mapping[TableId, int]
    ) -> list[TableId]:
        """Take the tables' locks, all at once: whoever merges now ends, and nobody begins.

        Without those whose lock isn't to be had, or that others merged past ``point``.
        """
        store = self.pipeline.store
        taken = store.lock_some_within([write_lock(table) for table in tables], _LOCK_SECONDS)
        found = []
        for table in [table for table in tables if write_lock(table) in taken]:
            with suppress(Exception):  # told when the table is compared alone
                lake = comparable(self.pipeline, table)
                if not passed(store, lake, point, offsets[table], lake.state()):
                    found.append(table)
            if table not in found:
                store.unlock(write_lock(table))
        return found

    def merge(self, table: TableId, seen: Look) -> tuple[LakeTable, int | None] | None:
        """Merge what committed below the point, and give the lock back; None if it can't be."""
        store = self.pipeline.store
        try:
            with suppress(Exception):  # told when the table is compared alone
                drain(self.pipeline, self.session, table, below=seen.lsn, look=seen)
                lake = comparable(self.pipeline, table)
                if whole_at(store, lake, seen.lsn):
                    return lake, lake.state().snapshot_id
            return None
        finally:
            store.unlock(write_lock(table))


@contextmanager
def _hands(pipeline: Pipeline, session: SparkSession, tables: int) -> Iterator[list[_Hand]]:
    """As many as tables may be merged side by side; closed, they have no locks."""
    config = pipeline.config
    number = min(config.lake.max_parallel_tables, tables)
    with sessions_beside(session, config, 1 + number) as sessions, ExitStack() as cleanup:
        mine = sessions[1:] or sessions  # the caller reads with its own meanwhile
        yield [_Hand(cleanup.enter_context(Pipeline.open(config)), each) for each in mine]
