"""Comparing every row of source and lake at one LSN.

A temporary slot gives a consistent point c and a snapshot that shows exactly what committed before
it. The log is applied up to c and no further (it is cut by commit LSN), under the tables' writer
locks. Then both sides must hold the same rows, however busy the source is.

A side's row becomes its key and a digest of its comparable text; a row that doesn't occur equally
often on both sides differs. That finds missing, surplus, changed and duplicate rows in one pass.
TRUNCATE isn't MVCC-safe: a table that gets a new file while it is read is compared again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from cdc_assets.errors import CdcError, TableProblem
from cdc_assets.materializer.drain import Look, drain
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.replication import create_slot, export_snapshot
from cdc_assets.verify.balance import balance
from cdc_assets.verify.canonical import source_expression
from cdc_assets.verify.rows import comparable, digested, lake_side, shapes, source_texts

# Who truncates a table more often than this while it is read has to be asked to pause.
ROUNDS = 10
REWRITTEN = "it was truncated or rewritten while it was read"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing one table found. ``keys`` are some that differ, ``columns`` what of them."""

    table: TableId
    lsn: Lsn
    source_rows: int
    lake_rows: int
    differing: int
    keys: tuple[str, ...]
    problem: str | None
    seconds: float
    columns: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.differing == 0 and self.problem is None


def verify(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Sequence[TableId],
    flush_to: Callable[[Lsn], None],
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Compare ``tables`` at one LSN.

    ``flush_to`` returns once everything that committed below an LSN is registered. A table that
    can't be compared (its copy isn't complete, it is parked) is reported with its problem. One that
    is truncated or rewritten while it is read is compared again, at a later LSN.
    """
    store = pipeline.store
    locks = [f"write:{table}" for table in sorted(tables)]  # in one order: no two wait in a circle
    for lock in locks:
        store.lock(lock)
    try:
        found: dict[TableId, Comparison] = {}
        left = list(tables)
        for _ in range(ROUNDS):
            found |= {c.table: c for c in _round(pipeline, session, left, flush_to, on_progress)}
            left = [table for table in left if found[table].problem == REWRITTEN]
            if not left:
                break
        return [found[table] for table in tables]
    finally:
        for lock in reversed(locks):
            store.unlock(lock)


def _round(
    pipeline: Pipeline,
    session: SparkSession,
    tables: Sequence[TableId],
    flush_to: Callable[[Lsn], None],
    on_progress: Callable[[str], None],
) -> list[Comparison]:
    """One consistent point: read the source's side of every table under it, then compare."""
    before = shapes(pipeline, tables)
    name = f"{pipeline.config.slot[:48]}_verify_{uuid.uuid4().hex[:8]}"
    follows = pipeline.config.snapshot.mode != "snapshot_only"
    slot = (
        create_slot(pipeline.source_dsn, name, temporary=True)
        if follows
        else export_snapshot(pipeline.source_dsn)
    )
    with ExitStack() as cleanup:
        cleanup.callback(slot.connection.finish)
        point = slot.consistent_point
        on_progress(f"comparing at {point}; reading the source")
        sides: dict[TableId, _Side | TableProblem] = {}
        for table in tables:
            try:
                lake = comparable(pipeline, table)
                texts = source_texts(pipeline, session, lake, slot.snapshot_name).persist()
                cleanup.callback(texts.unpersist)
                texts.count()
                sides[table] = _Side(texts, Look(before[table].told, point) if follows else None)
            except TableProblem as problem:
                sides[table] = problem
        for table, after in shapes(pipeline, tables).items():
            # A snapshot doesn't protect from TRUNCATE: the table looks empty to older ones, too.
            # Nor from ALTER TABLE: a column is found by the name that it has now.
            if after != before[table]:
                sides[table] = TableProblem(table, REWRITTEN)
        if follows:
            flush_to(point)
        found = []
        for table, read in sides.items():
            comparison = _compare(pipeline, session, table, point, read)
            found.append(comparison)
            on_progress(
                f"{table}: {comparison.source_rows:,} rows, {comparison.differing:,} differ"
                f" ({comparison.seconds:.1f} s) {comparison.problem or ''}".rstrip()
            )
        return found


@dataclass(frozen=True, slots=True)
class _Side:
    """The source's rows: their columns as text, named ``t`` and the attribute number.

    ``look``: how the catalog told them, for what the log hasn't told by then.
    """

    texts: DataFrame
    look: Look | None


def _compare(
    pipeline: Pipeline,
    session: SparkSession,
    table: TableId,
    point: Lsn,
    source_side: _Side | TableProblem,
) -> Comparison:
    began = time.monotonic()

    def result(
        source: int,
        lake: int,
        differing: int,
        keys: Sequence[str],
        why: str | None = None,
        columns: Sequence[str] = (),
    ) -> Comparison:
        seconds = time.monotonic() - began
        return Comparison(
            table, point, source, lake, differing, tuple(keys), why, seconds, tuple(columns)
        )

    if isinstance(source_side, TableProblem):
        why = REWRITTEN if source_side.what.endswith(REWRITTEN) else str(source_side)
        return result(0, 0, 0, [], why)
    try:
        drain(pipeline, session, table, below=point, look=source_side.look)
        lake = comparable(pipeline, table)
        numbers = {f"t{c.source.number}" for c in lake.columns}
        if source_side.look is not None and numbers != set(source_side.texts.columns):
            return result(0, 0, 0, [], REWRITTEN)  # its columns aren't those that were read
        theirs = lake_side(session.table(lake.sql_name), lake)
        read = digested(
            source_side.texts,
            lake,
            [source_expression(c, f"t{c.source.number}") for c in lake.columns],
        )
    except CdcError as problem:
        return result(0, 0, 0, [], str(problem))
    found = balance(read, theirs, lake)
    return result(
        found.source_rows, found.lake_rows, found.differing, found.keys, None, found.columns
    )
