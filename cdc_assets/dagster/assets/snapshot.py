"""The copy of a table as a Dagster asset: one partition a chunk.

A run copies chunks of one table, or several tables whole. Such a run has no partitions itself, and
its first step copies all of them in one Spark job; the others find theirs copied, or what is wrong
with it. Partitions are marked as they land, so that the UI shows the copy while it runs; the asset
is skippable, or Dagster would mark every partition once more at the end. Reading, writing and what
a restart may trust are in ``snapshot.coordinator``.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
import time
from collections.abc import Iterable, Iterator, Mapping

import dagster as dg
from pyspark.sql import SparkSession

from cdc_assets.dagster.metadata import chunk_metadata
from cdc_assets.dagster.names import TableAssets, all_tables, run_lock
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.errors import CdcError, CopyRestarted, Fenced, first_line
from cdc_assets.log.copies.chunks import ChunkProgress
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.waits import locked
from cdc_assets.snapshot.coordinator import copy_table, copy_tables
from cdc_assets.snapshot.table_copy import CopyProgress

# Of several tables at once, a line in the run's log.
_SAY_SECONDS = 5.0
# The runs, of which a process has one, whose tables were copied together: which failed, and why.
_together: dict[str, Mapping[TableId, CdcError]] = {}


def snapshot_asset(names: TableAssets) -> dg.AssetsDefinition:
    """``snapshot/<source>/<schema>/<table>``, partitioned by ctid range."""
    config, resource = names.config, f"spark_{names.config.name}"

    @dg.multi_asset(
        name=f"copy_{names.op_suffix}",
        specs=[
            names.spec(
                names.snapshot,
                {"postgres", "spark", "iceberg"},
                f"The first copy of {names.table}, read in ranges of pages under one exported"
                " snapshot. A range that has landed isn't copied again.",
                deps=[names.source],
                partitions_def=names.partitions,
                skippable=True,
            )
        ],
        partitions_def=names.partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        required_resource_keys={resource},
    )
    @run_of(config)
    def copy(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        some = context.has_partition_key or context.has_partition_key_range
        selected = set(context.partition_keys) if some else None
        marked: set[str] = set()

        def mark(chunks: Iterable[ChunkProgress]) -> None:
            for chunk in chunks:
                if (selected is None or chunk.key in selected) and chunk.key not in marked:
                    marked.add(chunk.key)
                    context.log_event(
                        dg.AssetMaterialization(
                            names.snapshot, partition=chunk.key, metadata=chunk_metadata(chunk)
                        )
                    )

        def on_progress(progress: CopyProgress) -> None:
            context.log.info(progress.sentence)
            mark(progress.landed)

        asked = "all chunks" if selected is None else f"{len(selected)} chunks"
        context.log.info("%s: %s asked for", names.table, asked)
        session = spark_session(getattr(context.resources, resource), config)
        with Pipeline.open(config) as pipeline:
            pipeline.store.lock(run_lock(context.run.run_id))
            failed: Mapping[TableId, CdcError] = {}
            if selected is None:
                failed = _copy_together(context, pipeline, session)
                # The sensor may have marked some of them meanwhile.
                marked |= context.instance.get_materialized_partitions(names.snapshot)
            try:
                if names.table in failed:
                    raise failed[names.table]
                plan = copy_table(
                    pipeline, session, names.table, only=selected, on_progress=on_progress
                )
            except (CopyRestarted, Fenced) as error:
                # Nothing is wrong: the sensor asks for another run once the table is pinned again.
                context.log.warning("%s", error)
                return
        # Chunks that an earlier run landed, but didn't live to report.
        mark(chunk for chunk in plan if chunk.state == "landed")
        yield from ()

    return copy


def _copy_together(
    context: dg.AssetExecutionContext, pipeline: Pipeline, session: SparkSession
) -> Mapping[TableId, CdcError]:
    """Copy every table of the run, unless a step before did; returns those that failed, and why.

    Not where each step has a process of its own, which would do so again. Tables that somebody has
    locked are left to their own steps: each would hold one of Spark's cores until the lock goes.
    """
    if context.job_def.executor_def.name != dg.in_process_executor.name:
        return {}
    if (run := context.run.run_id) in _together:
        return _together[run]
    _together[run] = {}
    asked = context.run.asset_selection or ()
    tables = [names.table for names in all_tables(pipeline.config) if names.snapshot in asked]
    with pipeline.connect_source("copy") as source:
        away = locked(source, tables)
    tables = [table for table in tables if table not in away]
    began, said, landed = time.monotonic(), time.monotonic(), set[TableId]()

    def on_progress(progress: CopyProgress) -> None:
        nonlocal said
        landed.add(progress.table)
        now = time.monotonic()
        if now - said >= _SAY_SECONDS or len(landed) == len(tables):
            said = now
            context.log.info(
                "%s of the %s tables of this run have landed, %.0f s",
                len(landed),
                len(tables),
                now - began,
            )

    try:
        _together[run] = copy_tables(pipeline, session, tables, on_progress=on_progress)
    except Exception as error:  # noqa: BLE001 - the step of the table that is to blame shows it
        context.log.warning("Each table is now copied by itself: %s", first_line(error))
    return _together[run]
