"""``marks/<source>``: one position of the source across all lake tables; partitions are marks.

To materialize a partition, whose name is new, makes the mark of that name. A schedule does so where
``marks.every`` is set, and drops the oldest of its own.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
from collections.abc import Iterator, Sequence

import dagster as dg

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
from cdc_assets.log.asked.marks import Mark, MarkState
from cdc_assets.marks import make
from cdc_assets.messages.texts import described
from cdc_assets.pipeline import Pipeline

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
                on_progress=context.log.info,
            )
            yield dg.MaterializeResult(metadata=_metadata(made))
            for name in make.surplus(pipeline) if scheduled else ():
                make.drop(pipeline, session, name)
                context.instance.delete_dynamic_partition(marks_partitions_name(config), name)
                forget_partition(context.instance, config, marks_key(config), name)
                context.log.info("Dropped the mark %s.", name)
        left = [TableProblem(t.table, why) for t in made.tables if (why := t.lacking) is not None]
        if left:
            raise TablesFailed(left)

    return marks


def _metadata(made: Mark) -> dict[str, dg.MetadataValue | str | int]:
    rows = [
        f"| {described(str(t.table))} | {t.state} | {t.snapshot_id or ''} |"
        f" {described(t.lacking or '')} |"
        for t in made.tables
    ]
    head = ["| table | state | snapshot | |", "|---|---|---|---|"]
    return {
        "LSN": str(made.lsn),
        "tag": made.tag,
        "tables tagged": len(made.of(MarkState.TAGGED)),
        "tables": dg.MetadataValue.md("\n".join([*head, *rows])),
    }
