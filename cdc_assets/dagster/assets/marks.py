"""``marks/<source>``: one position of the source across all lake tables; partitions are marks.

To materialize a partition, whose name is new, makes the mark of that name; done once more, as after
a run that was killed, it reports that mark as it is. A schedule does so where ``marks.every`` is
set, and drops the oldest of its own.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
import re
from collections.abc import Iterator, Sequence

import dagster as dg
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.history import forget_partition
from cdc_assets.dagster.names import (
    TableAssets,
    marks_key,
    marks_partitions,
    marks_partitions_name,
)
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.errors import TableProblem, TablesFailed
from cdc_assets.log.asked.marks import Mark, MarkState, names
from cdc_assets.marks import make
from cdc_assets.messages.texts import described
from cdc_assets.pipeline import Pipeline

# The name of a mark that the schedule asks for: a time, of UTC.
MARK_NAME = "%Y-%m-%dT%H%MZ"
_BY_SCHEDULE = re.compile(r"\d{4}-\d\d-\d\dT\d{4}Z")
# Of a run that the schedule asked for.
SCHEDULED_TAG = "cdc_assets/scheduled_mark"


def marks_asset(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.AssetsDefinition:
    """The asset; downstream of every lake table of the source."""
    resource = f"spark_{config.name}"

    @dg.asset(
        key=marks_key(config),
        partitions_def=marks_partitions(config),
        deps=[names.lake for names in tables],
        group_name=config.assets.group or config.name,
        tags=config.assets.tags,
        owners=config.owners,
        kinds={"iceberg"},
        description=f"Tags of all lake tables of {config.name} at one LSN: mark_<partition> in"
        " each, so that readers of several tables see one moment of the source.",
        required_resource_keys={resource},
    )
    @run_of(config)
    def marks(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        session = spark_session(getattr(context.resources, resource), config)
        scheduled = SCHEDULED_TAG in context.run.tags
        with Pipeline.open(config) as pipeline:
            made = make.mark(
                pipeline,
                session,
                context.partition_key,
                scheduled=scheduled,
                known=True,
                on_progress=context.log.info,
            )
            yield dg.MaterializeResult(metadata=_metadata(made))
            left = [TableProblem(t.table, why) for t in made.tables if (why := t.lacking)]
            if scheduled:
                left += _drop_surplus(context, config, pipeline, session)
        if left:
            raise TablesFailed(left)

    return marks


def _drop_surplus(
    context: dg.AssetExecutionContext,
    config: SourceConfig,
    pipeline: Pipeline,
    session: SparkSession,
) -> Sequence[TableProblem]:
    """Drop the schedule's oldest marks, and the partitions of what is no mark, or never was.

    What couldn't be dropped is returned: it keeps no other mark from being dropped.
    """
    left = list[TableProblem]()
    for name in make.surplus(pipeline):
        try:
            make.drop(pipeline, session, name)
        except TablesFailed as failed:
            left += failed.problems
        else:
            context.log.info("Dropped the mark %s.", name)
    known, partitions = {*names(pipeline.store)}, marks_partitions_name(config)
    for name in context.instance.get_dynamic_partitions(partitions):
        if _BY_SCHEDULE.fullmatch(name) and name < context.partition_key and name not in known:
            context.instance.delete_dynamic_partition(partitions, name)
            forget_partition(context.instance, config, marks_key(config), name)
    return left


def _metadata(made: Mark) -> dict[str, dg.MetadataValue | str | int]:
    rows = [
        f"| {described(str(t.table))} | {t.state} | {t.snapshot_id or ''} |"
        f" {described(t.lacking or '')} |"
        for t in made.tables
    ]
    head = ["| table | state | snapshot | |", "|---|---|---|---|"]
    return {
        "LSN": str(made.lsn),
        "made": dg.MetadataValue.timestamp(made.created_at),
        "tag": made.tag,
        "tables tagged": len(made.of(MarkState.TAGGED)),
        "tables": dg.MetadataValue.md("\n".join([*head, *rows])),
    }
