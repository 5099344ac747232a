"""The copies of all tables as Dagster assets: one a table, and one partition a chunk.

A run copies chunks of one table, or several tables whole, in one Spark job. Such a run has no
partitions itself: those of two tables have nothing in common. They are marked as they land, so that
the UI shows the copy while it runs; the assets are skippable, or Dagster would mark every partition
once more at the end. Reading, writing and what a restart may trust are in ``snapshot.coordinator``.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import dagster as dg
import psycopg
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.metadata import chunk_metadata
from cdc_assets.dagster.names import (
    PARTITION_TAG,
    RANGE_END_TAG,
    RANGE_START_TAG,
    WORK_TAG,
    TableAssets,
    failed_tag,
    operation_name,
    run_lock,
)
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.errors import (
    CdcError,
    CopyRestarted,
    Fenced,
    TableProblem,
    TablesFailed,
    first_line,
)
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.log.copies.chunks import ChunkProgress, chunks
from cdc_assets.messages.texts import command
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.waits import locked
from cdc_assets.readiness.foreign_errors import explained, is_lost
from cdc_assets.snapshot.coordinator import copy_table, copy_tables
from cdc_assets.snapshot.progress import CopyProgress

# Of several tables at once, a line in the run's log.
_SAY_SECONDS = 5.0


def snapshot_spec(names: TableAssets) -> dg.AssetSpec:
    """``snapshot/<source>/<schema>/<table>``, partitioned by ctid range."""
    return names.spec(
        names.snapshot,
        {"postgres", "spark", "iceberg"},
        f"The first copy of {names.table}, read in ranges of pages under one exported"
        " snapshot. A range that has landed isn't copied again.",
        deps=[names.source],
        partitions_def=names.partitions,
        skippable=True,
    )


def snapshot_assets(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.AssetsDefinition:
    """The operation ``copy__<source>`` over the tables' copies."""
    resource = f"spark_{config.name}"

    @dg.multi_asset(
        name=operation_name(config.name, "copy"),
        specs=[snapshot_spec(names) for names in tables],
        can_subset=True,
        backfill_policy=dg.BackfillPolicy.single_run(),
        required_resource_keys={resource},
    )
    @run_of(config)
    def copy(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        selected = [names for names in tables if names.snapshot in context.selected_asset_keys]
        session = spark_session(getattr(context.resources, resource), config)
        with Pipeline.open(config) as pipeline:
            pipeline.store.lock(run_lock(context.run.run_id))
            _Copying(context, pipeline, session).copy(selected)
        yield from ()

    return copy


class _Copying:
    """What one run copies."""

    def __init__(
        self, context: dg.AssetExecutionContext, pipeline: Pipeline, session: SparkSession
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._session = session
        tags = context.run.tags
        one = tags.get(PARTITION_TAG)
        self._first, self._last = tags.get(RANGE_START_TAG, one), tags.get(RANGE_END_TAG, one)
        self._planned: dict[TableId, frozenset[str]] = {}
        self._marked: dict[dg.AssetKey, set[str]] = {}

    def copy(self, tables: Sequence[TableAssets]) -> None:
        """Try each of ``tables``; raises TablesFailed, or the error of the only one."""
        failed, away = dict[TableId, CdcError](), dict[TableId, str]()
        if len(tables) > 1 and self._first is None:
            away = self._locked(tables)
            failed = self._together([names for names in tables if names.table not in away])
        problems = list[TableProblem]()
        for names in sorted(tables, key=lambda names: names.table in away):
            try:
                if names.table in failed:
                    raise failed[names.table]
                self._alone(names)
            except (CopyRestarted, Fenced) as error:
                # Nothing is wrong: the sensor asks for another run once the table is pinned again.
                self._context.log.warning("%s", error)
            except Exception as error:  # one table's: the others are copied
                if len(tables) == 1 or self._ends_all(error):
                    raise
                said = TableProblem.of(names.table, explained(error, self._pipeline.config))
                self._context.log.warning("%s", said)
                problems.append(said)
        if problems:
            # The others go on without a pause.
            blamed = failed_tag(problem.table for problem in problems)
            self._context.instance.add_run_tags(self._context.run.run_id, blamed)
            raise TablesFailed(problems)

    def _ends_all(self, error: Exception) -> bool:
        """Whether no table can be copied any more: Spark is gone, or a database."""
        gone = isinstance(error, psycopg.OperationalError) and is_lost(error)
        return gone or self._pipeline.store.connection.closed or lost_server(error)

    def _alone(self, names: TableAssets) -> None:
        def on_progress(progress: CopyProgress) -> None:
            self._context.log.info(progress.sentence)
            self._mark(names, progress.landed)

        only = self._asked_for(names.table)
        asked = "all chunks" if only is None else f"{len(only)} chunks"
        self._context.log.info("%s: %s asked for", names.table, asked)
        if WORK_TAG not in self._context.run.tags:
            self._say_what_is_there(names.table, only)
        plan = copy_table(
            self._pipeline, self._session, names.table, only=only, on_progress=on_progress
        )
        # Chunks that an earlier run landed, but didn't live to report.
        self._mark(names, (chunk for chunk in plan if chunk.state == "landed"))

    def _say_what_is_there(self, table: TableId, only: frozenset[str] | None) -> None:
        """Tell a person who asked for chunks that have landed why nothing is copied."""
        row = self._pipeline.store.table(table)
        plan = chunks(self._pipeline.store, table, row.epoch) if row is not None else []
        wanted = [chunk for chunk in plan if only is None or chunk.key in only]
        if landed := sum(chunk.state == "landed" for chunk in wanted):
            self._context.log.warning(
                "%s: %s of the %s chunks that were asked for have landed before, and aren't copied"
                " again. To copy the table anew: the job resync_%s, or %s",
                *(table, landed, len(wanted), self._pipeline.config.name, command("resync", table)),
            )

    @cached_property
    def _by_dagster(self) -> frozenset[str] | None:
        """A person's range is one of Dagster's keys, in the order in which it came to know them.

        None for a sensor's, which is one of the plan, and for several tables', which share none.
        """
        ours = WORK_TAG in self._context.run.tags
        if ours or self._first is None or len(self._context.selected_asset_keys) > 1:
            return None
        return frozenset(self._context.partition_keys)

    def _asked_for(self, table: TableId) -> frozenset[str] | None:
        """The chunks of the table that the run is asked for; None: all."""
        first, last = self._first, self._last
        if first is None or last is None or self._by_dagster is not None:
            return self._by_dagster
        if table not in self._planned:
            row = self._pipeline.store.table(table)
            plan = chunks(self._pipeline.store, table, row.epoch) if row is not None else []
            keys = frozenset(chunk.key for chunk in plan if first <= chunk.key <= last)
            self._planned[table] = keys
        return self._planned[table]

    def _locked(self, tables: Sequence[TableAssets]) -> dict[TableId, str]:
        """Tables that somebody has locked: together with others each would hold a core of Spark."""
        with self._pipeline.connect_source("copy") as source:
            return locked(source, [names.table for names in tables])

    def _together(self, tables: Sequence[TableAssets]) -> dict[TableId, CdcError]:
        """Copy ``tables`` in one job; returns those that failed, and why."""
        by_table = {names.table: names for names in tables}
        began, said, landed = time.monotonic(), time.monotonic(), set[TableId]()

        def on_progress(progress: CopyProgress) -> None:
            nonlocal said
            landed.add(progress.table)
            now = time.monotonic()
            if now - said >= _SAY_SECONDS or len(landed) == len(by_table):
                said = now
                self._context.log.info(
                    "%s of the %s tables of this run have landed, %.0f s",
                    len(landed),
                    len(by_table),
                    now - began,
                )

        try:
            return copy_tables(self._pipeline, self._session, by_table, on_progress=on_progress)
        except Exception as error:  # the table that is to blame shows it alone
            if self._ends_all(error):
                raise
            self._context.log.warning("Each table is now copied by itself: %s", first_line(error))
            return {}

    def _mark(self, names: TableAssets, landed: Iterable[ChunkProgress]) -> None:
        """Mark chunks as landed, each once."""
        key, instance = names.snapshot, self._context.instance
        only = self._asked_for(names.table)
        if key not in self._marked:
            # The sensor, or an earlier run, may have marked some of them.
            known = instance.get_materialized_partitions(key) if only is None else set()
            self._marked[key] = set(known)
        marked = self._marked[key]
        for chunk in landed:
            if (only is None or chunk.key in only) and chunk.key not in marked:
                marked.add(chunk.key)
                self._context.log_event(
                    dg.AssetMaterialization(
                        key, partition=chunk.key, metadata=chunk_metadata(chunk)
                    )
                )
