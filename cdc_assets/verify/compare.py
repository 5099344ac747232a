"""Comparing every row of source and lake, a large table at an LSN of its own.

A temporary slot gives a consistent point c and a snapshot that shows exactly what committed before
it. The log is applied up to c and no further (it is cut by commit LSN) under the table's writer
lock, which is given back as soon as the lake has a snapshot of that moment. Both sides are then
read as of c, and must hold the same rows, however busy the source is. One large table is compared
after the other, so no more than one waits, and only for about as long as a merge takes. Small ones
have an LSN together, and wait together (``together``).

A side's row becomes its key and a digest of its comparable text; a row that doesn't occur equally
often on both sides differs. That finds missing, surplus, changed and duplicate rows in one pass.
TRUNCATE isn't MVCC-safe: a table that gets a new file while it is read is compared again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from threading import Event

from pyspark.sql import SparkSession

from cdc_assets.config.query.refused import refuse_queried
from cdc_assets.errors import TableProblem, first_line
from cdc_assets.flusher.reach import LogBehind
from cdc_assets.lake.state import LakeState
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.asked.adoptions import note_verified
from cdc_assets.log.locks import write_lock
from cdc_assets.log.verified import remember_compared, remember_missed
from cdc_assets.materializer.drain import drain
from cdc_assets.materializer.schema.ahead import Look
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness.executors.findings import refuse_unfit
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.readiness.source.enrolment import facts_of
from cdc_assets.verify.difference import Compared, Comparison, Mend, balance
from cdc_assets.verify.key_names import key_names
from cdc_assets.verify.others import other_columns
from cdc_assets.verify.point import (
    LOCKED_SECONDS,
    READ_AGAIN,
    FlushTo,
    kept,
    moment,
    offset_of,
    passed,
    whole_at,
)
from cdc_assets.verify.rows import Shape, as_of, comparable, lake_side, shapes, source_side
from cdc_assets.verify.source import REWRITTEN, count_sources, counted, read_source
from cdc_assets.verify.together import Seen, compare_together, groups

# Attempts at a table that is truncated or altered while it is read, or corrected.
ROUNDS = 10
# Corrections of a table: what changes meanwhile is corrected the next time.
MENDS = 3


def verify(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Sequence[TableId],
    flush_to: FlushTo,
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    show_keys: bool = False,
    mend: Mend | None = None,
) -> list[Comparison]:
    """Compare ``tables``, small ones together; ``show_keys`` shows keys, too (``key_names``).

    With ``mend``, a table that differs is mended and compared again.

    A table that can't be compared (its copy isn't complete, it is parked) is reported with its
    problem. One that is truncated or rewritten while it is read is compared again, at a later LSN.
    Raises NotReady if executors have other packages than this process.
    """
    refuse_queried(pipeline.config, "a comparison")
    refuse_unfit(session, pipeline.config)
    _await_log(pipeline, flush_to)  # so that no table waits for what is older than its comparison
    comparing = _Comparing(pipeline, session, flush_to, on_progress, show_keys, mend)
    found, differ = dict[TableId, Comparison](), dict[TableId, Comparison]()
    for group in groups(pipeline, tables):
        some: Sequence[TableId] = group
        while some:
            told = f"{len(some)} of {len(tables)} together: " if len(some) > 1 else ""
            on_progress(f"{told}{', '.join(map(str, some))}")
            done, left = comparing.compare_together(some)
            alone = {t: each for t, each in done.items() if each.differing or comparing.owes(t)}
            found |= {table: each for table, each in done.items() if table not in alone}
            differ |= {table: each for table, each in alone.items() if each.differing}
            # Those that were truncated, altered or merged by others meanwhile: once more.
            some = left if some is group else ()
    for table in tables:
        if table not in found:
            on_progress(f"{len(found) + 1} of {len(tables)}: {table}")
            found[table] = comparing.compare(table, differ.get(table))
    return [found[table] for table in tables]


def _await_log(pipeline: Pipeline, flush_to: FlushTo) -> None:
    """Wait, with no table locked and no snapshot held, until the log has what committed by now."""
    if pipeline.config.streams:
        with pipeline.connect_source("verify") as source:
            now = current_lsn(source)
        flush_to(now)


class _Again(TableProblem):
    """The rows that were read aren't of one moment: they are read anew."""


class _Mended(Exception):
    """Some keys were corrected: the table is compared anew."""

    def __init__(self, keys: int) -> None:
        self.keys = keys


@dataclass(frozen=True, slots=True)
class _Comparing:
    """What every table is compared with; the parameters of :func:`verify`."""

    pipeline: Pipeline
    session: SparkSession
    flush_to: FlushTo
    on_progress: Callable[[str], None]
    show_keys: bool
    mend: Mend | None
    late: Event = field(default_factory=Event)
    """Set once a table was locked, and the log didn't come in time."""

    def compare_together(
        self, tables: Sequence[TableId]
    ) -> tuple[dict[TableId, Comparison], list[TableId]]:
        """Those that were compared, and those that may be with others at a later LSN.

        One that differs isn't told yet: comparing it alone will say in what.
        """
        self._await_flusher()
        began = time.monotonic()
        try:
            found = compare_together(
                self.pipeline, self.session, tables, self.flush_to, self.on_progress
            )
        except Exception as problem:  # noqa: BLE001 - some table's: it is told when that is alone
            self.on_progress("one of them fails, so each is compared alone")
            self._note(problem)
            return {}, []
        done = {table: _compared(table, seen) for table, seen in found.items()}
        done = {t: each if each.differing else self._over(each, began) for t, each in done.items()}
        return done, [table for table in tables if table not in found]

    def owes(self, table: TableId) -> bool:
        """Whether an equal table has to be mended, too: somebody else changed it."""
        if self.mend is not None:
            with suppress(Exception):  # told when the table is compared alone
                return comparable(self.pipeline, table).state().foreign is not None
        return False

    def compare(self, table: TableId, differs: Comparison | None = None) -> Comparison:
        """``differs``: what is known of a table that was compared with others."""
        self._await_flusher()
        began = time.monotonic()
        done = self._alone(table)
        if differs is not None:
            done = _knowing(differs, done)
        return self._over(done, began)

    def _alone(self, table: TableId) -> Comparison:
        mended = mends = 0
        for left in reversed(range(ROUNDS)):
            try:
                return replace(self._once(table, mends < MENDS), repaired=mended)
            except _Mended as done:
                mended, mends = mended + done.keys, mends + 1
                self.on_progress(f"{table}: {done.keys:,} keys corrected")
            except _Again as again:
                if not left:
                    return Comparison(table, None, problem=str(again))
            except Exception as problem:  # noqa: BLE001 - one table's, told; the others go on
                self._note(problem)
                said = self._denied(table) or first_line(explained(problem, self.pipeline.config))
                return Comparison(table, None, problem=said, repaired=mended)
        raise AssertionError("ROUNDS is 0")

    def _denied(self, table: TableId) -> str | None:
        """Which right is missing, as Spark doesn't tell why a reader of the source failed."""
        with suppress(Exception), self.pipeline.connect_source("verify") as source:
            facts = facts_of(source, self.pipeline.config, [table])
            for findings in facts.missing.values():
                for found in findings:
                    return f"{found.message} {found.remedy}"
        return None

    def _note(self, problem: Exception) -> None:
        if isinstance(problem, LogBehind):
            self.late.set()

    def _await_flusher(self) -> None:
        """No other table is locked for a flusher that has just kept one waiting in vain."""
        if self.late.is_set():
            self.on_progress("waiting for the flusher")
            _await_log(self.pipeline, self.flush_to)
            self.late.clear()

    def _over(self, done: Comparison, began: float) -> Comparison:
        """Record and report the comparison."""
        store, table = self.pipeline.store, done.table
        done = replace(done, seconds=time.monotonic() - began)
        if done.problem is not None:
            done = replace(done, since=remember_missed(store, table))
        else:
            row = store.copy_state(table)
            epoch = row.epoch if row is not None and done.differing else None
            remember_compared(store, table, differs=epoch)
            if not done.differing:
                note_verified(store, table)
        rows = f"{done.source_rows:,} rows, {done.differing:,} differ"
        said = rows if done.problem is None else f"not compared: {done.problem}"
        self.on_progress(f"{table}: {said} ({done.seconds:.1f} s)")
        return done

    def _once(self, table: TableId, may_mend: bool) -> Comparison:
        """Raises CdcError where it can't be compared, _Again if it was truncated or altered.

        Raises _Mended if it was corrected.
        """
        offset = offset_of(comparable(self.pipeline, table).state())
        before = shapes(self.pipeline, [table])[table]
        with ExitStack() as cleanup:
            held = cleanup.enter_context(ExitStack())
            point, snapshot_name = held.enter_context(moment(self.pipeline, "verify"))
            if not self.pipeline.config.streams:  # there is no log
                lake = comparable(self.pipeline, table)
                state = lake.state()
            else:
                lake, state = self._applied(table, before, point, offset)
            cleanup.enter_context(kept(self.session, lake, state.snapshot_id))
            beside = as_of(self.session, lake, state.snapshot_id)
            self.on_progress(f"{table}: comparing at {point}")
            texts = read_source(self.pipeline, self.session, beside, snapshot_name).persist()
            cleanup.callback(texts.unpersist)
            read = counted(texts, beside.lake)
            there = count_sources(self.pipeline, [beside], snapshot_name)[table]
            if not (mends := self.mend is not None and may_mend):
                held.close()
            if shapes(self.pipeline, [table])[table] != before:
                # TRUNCATE isn't MVCC-safe: the table looks empty to older snapshots, too.
                raise _Again(table, REWRITTEN)
            name = key_names(self.pipeline.store, lake, asked=self.show_keys)
            ours, theirs, unrepaired = source_side(texts, beside), lake_side(beside), None
            found, others = balance(ours, theirs, lake, name), other_columns(beside)
            if mends and (found.differing or state.foreign) and read.rows == there:
                compared = Compared(
                    beside, ours, theirs, point, snapshot_name, before, offset, state, found
                )
                unrepaired = self._mended(compared)
            done = _compared(table, Seen(point, read, there, found, others))
            return replace(done, unrepaired=unrepaired)

    def _mended(self, compared: Compared) -> str | None:
        """Why it wasn't corrected; raises _Mended if rows that differed were."""
        assert self.mend is not None
        try:
            keys = self.mend(compared)
        except Exception as problem:  # noqa: BLE001 - what was found counts, whatever this was
            return first_line(explained(problem, self.pipeline.config))
        if compared.balance.differing:
            raise _Mended(keys)
        return None

    def _applied(
        self, table: TableId, before: Shape, point: Lsn, offset: int
    ) -> tuple[LakeTable, LakeState]:
        """The lake table with just what committed below ``point``, and its state then."""
        with self.pipeline.store.locked(write_lock(table)):
            lake = comparable(self.pipeline, table)
            if passed(self.pipeline.store, lake, point, offset, lake.state()):
                raise _Again(table, "its merges were faster than its comparison")
            self.flush_to(point, seconds=LOCKED_SECONDS)
            drain(self.pipeline, self.session, table, below=point, look=Look(before.told, point))
            lake = comparable(self.pipeline, table)
            if not whole_at(self.pipeline.store, lake, point):
                raise _Again(table, READ_AGAIN)
            return lake, lake.state()


def _knowing(differs: Comparison, done: Comparison) -> Comparison:
    """A comparison of a table alone, of which it is known that it differed."""
    if done.problem is not None:
        said = f"Which rows differ isn't known: {done.problem}"
        return replace(differs, others=(*differs.others, said))
    if done.equal and not done.repaired:
        said = f"At {differs.lsn} it differed; a change since then has put that right."
        return replace(done, others=(*done.others, said))
    return done


def _compared(table: TableId, seen: Seen) -> Comparison:
    if seen.read.rows != seen.counted:
        said = f"{seen.read.rows:,} rows of the source were read, and it counts {seen.counted:,}"
        return Comparison(table, None, problem=first_line(TableProblem(table, said)))
    found = seen.balance
    return Comparison(
        table,
        seen.lsn,
        found.source_rows,
        found.lake_rows,
        found.differing,
        found.keys,
        columns=found.columns,
        lost=seen.read.lost,
        others=seen.others,
    )
