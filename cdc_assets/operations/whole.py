"""Operations on a whole source: sync, maintain, verify."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, partial

from cdc_assets.backfill.request import request
from cdc_assets.errors import (
    TableProblem,
    TablesFailed,
)
from cdc_assets.flusher.reach import reach
from cdc_assets.log.states import TableState
from cdc_assets.maintenance import run as maintenance
from cdc_assets.maintenance.run import Maintained
from cdc_assets.materializer.drain import Drained
from cdc_assets.operations.backfilling import backfill
from cdc_assets.operations.copying import snapshot
from cdc_assets.operations.merging import materialize
from cdc_assets.operations.repair import repairer
from cdc_assets.operations.running import Spark, flushing
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.snapshot.progress import CopyProgress
from cdc_assets.verify.compare import verify
from cdc_assets.verify.difference import Comparison

logger = logging.getLogger(__name__)


def sync(
    pipeline: Pipeline,
    tables: Sequence[TableId],
    on_progress: Callable[[CopyProgress], None],
    on_phase: Callable[[str], None],
    on_table: Callable[[Drained], None] = lambda _: None,
) -> list[Drained]:
    """Snapshot, flush up to now, materialize: the lake then equals the source as of the start."""
    config = pipeline.config
    if not config.streams:
        with Spark(config) as spark:
            on_phase("copying")
            snapshot(pipeline, spark, tables, on_progress)
        return []
    with pipeline.connect_source("sync") as source:
        target = current_lsn(source)
    problems: list[TableProblem] = []
    states = {row.table: row.state for row in pipeline.store.tables()}
    with Spark(config) as spark:
        fresh = any(states.get(table) != TableState.STREAMING for table in tables)
        if fresh:
            spark.begin()
            on_phase("copying")
        with flushing(config) if fresh else nullcontext():
            try:
                snapshot(pipeline, spark, tables, on_progress, streams=fresh)
            except TablesFailed as failed:
                problems += failed.problems
            # A copy that was resumed is complete only from the LSN of its last snapshot on.
            target = max(
                target,
                *(
                    row.complete_lsn or Lsn.ZERO
                    for row in pipeline.store.tables()
                    if row.table in tables
                ),
            )
            on_phase(f"flushing to {target}")
            reach(pipeline, target)
        bad = {problem.table for problem in problems}
        on_phase("materializing")
        done: list[Drained] = []
        try:
            done = materialize(pipeline, spark, [t for t in tables if t not in bad], on_table)
        except TablesFailed as failed:
            problems += failed.problems
        if config.query is not None:
            on_phase("looking for deleted rows")
            bad = {problem.table for problem in problems}
            problems += _deletes(pipeline, spark, [t for t in tables if t not in bad], on_phase)
    if problems:
        raise TablesFailed(problems)
    return done


def _deletes(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_phase: Callable[[str], None],
) -> list[TableProblem]:
    """Remove the rows that the source doesn't have; no query of changes shows them."""
    problems = list[TableProblem]()
    with spark.session() as session:
        for table in tables:
            try:
                asked = request(pipeline, table, deletes=True, by="cdc-assets sync")
                backfill(pipeline, session, asked.number, on_phase)
            except TableProblem as problem:
                problems.append(problem)
    return problems


def maintain(
    pipeline: Pipeline,
    spark: Spark,
    tables: Sequence[TableId],
    on_table: Callable[[Maintained], None],
) -> None:
    """Compact, expire and remove what nobody needs. Raises TablesFailed naming what failed."""
    problems: list[TableProblem] = []
    with ExitStack() as stack:
        opened = cache(lambda: stack.enter_context(spark.session()))
        for done in maintenance.maintain(pipeline, opened, tables):
            on_table(done)
            if done.problem is not None:
                problems.append(done.problem)
    if problems:
        raise TablesFailed(problems)


def verify_tables(
    pipeline: Pipeline,
    tables: Sequence[TableId],
    on_progress: Callable[[str], None],
    *,
    show_keys: bool = False,
    repair: bool = False,
) -> list[Comparison]:
    """Compare source and lake; see :mod:`cdc_assets.verify.compare`.

    ``repair``: correct what differs, and compare again (:mod:`cdc_assets.operations.repair`).
    """
    with Spark(pipeline.config) as spark, spark.session() as session:
        return verify(
            pipeline,
            session,
            tables,
            partial(reach, pipeline),
            on_progress=on_progress,
            show_keys=show_keys,
            mend=repairer(pipeline, session) if repair else None,
        )
