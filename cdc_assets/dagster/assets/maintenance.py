"""Table care as Dagster assets: one a lake table, all of a source in one run, by a schedule.

One operation, as for the merges: a run is one process whatever the number of tables, and a table's
materialization shows what was removed and the table's state, as a history that the UI plots.
``maintenance`` does the work, and explains why it is safe beside merges and copies.
"""

# No postponed annotations here: Dagster looks at the type of `context` itself.
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.history import Pruned, prune
from cdc_assets.dagster.internals import RemoteRepositoryOrigin
from cdc_assets.dagster.names import TableAssets, all_tables, health_key, operation_name, run_lock
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.errors import TablesFailed, first_line
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.log.store import LogStore
from cdc_assets.maintenance.run import Maintained, maintain
from cdc_assets.pipeline import Pipeline

# A table that is compacted for the first time may take hours; the next run goes on with it.
BUDGET_SECONDS = 1800.0


def maintenance_assets(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.AssetsDefinition:
    """The operation ``maintain__<source>`` over ``maintenance/<source>/<schema>/<table>``."""
    resource = f"spark_{config.name}"

    @dg.multi_asset(
        name=operation_name(config.name, "maintain"),
        specs=[
            names.spec(
                names.maintenance,
                {"spark", "iceberg"},
                f"Care of {names.lake_table_name}: compaction, expiry of snapshots, removal of"
                " orphans and of staged files that nobody needs any more.",
                deps=[names.lake],
            )
            for names in tables
        ],
        can_subset=True,
        required_resource_keys={resource},
    )
    @run_of(config)
    def maintain_tables(
        context: dg.AssetExecutionContext,
    ) -> Iterator[dg.MaterializeResult[None]]:
        by_table = {
            names.table: names
            for names in tables
            if names.maintenance in context.selected_asset_keys
        }
        problems = []
        with Pipeline.open(config) as pipeline:
            pipeline.store.lock(run_lock(context.run.run_id))
            done = maintain(
                pipeline,
                lambda: spark_session(getattr(context.resources, resource), config),
                list(by_table),
                thorough=False,
                budget_seconds=BUDGET_SECONDS,
            )
            for found in done:
                names = by_table[found.table]
                keys = _remove_partitions(context.instance, pipeline.store, names)
                yield dg.MaterializeResult(
                    asset_key=names.maintenance,
                    metadata={**_metadata(found), "partition keys removed": keys},
                )
                if found.problem is not None:
                    context.log.error(str(found.problem))
                    problems.append(found.problem)
            _prune(context, config)
        if problems:
            raise TablesFailed(problems)

    return maintain_tables


def _prune(context: dg.AssetExecutionContext, config: SourceConfig) -> None:
    """Keep Dagster's history of the source bounded; a failure of that fails no maintenance."""
    try:
        origin = context.run.remote_job_origin
        repository = origin.repository_origin if origin is not None else None
        pruned = prune_source(context.instance, config, datetime.now(UTC), repository)
    except Exception as error:  # noqa: BLE001 - of a database, of a store of logs
        context.log.warning("Dagster's history isn't pruned now: %s", first_line(error))
    else:
        if pruned != Pruned():
            context.log.info(pruned.sentence)


def prune_source(
    instance: dg.DagsterInstance,
    config: SourceConfig,
    now: datetime,
    repository: RemoteRepositoryOrigin | None = None,
) -> Pruned:
    """Remove what is old of the history of all of the source's assets; see :func:`prune`."""
    tables = all_tables(config)
    beating = [key for names in tables for key in (names.lake, names.staged_log)]
    assets = [health_key(config), *(key for names in tables for key in names.keys)]
    return prune(instance, config, assets, beating, now, repository)


def _metadata(found: Maintained) -> dict[str, Any]:
    """Metadata for the UI: the table's state, and what was done, if anything was."""
    done = {key: count for key, count in found.work().items() if count}
    return {
        **{key.replace("_", " "): count for key, count in {**done, **found.state()}.items()},
        "seconds": round(found.seconds, 3),
        **({"left alone": found.left_alone} if found.left_alone is not None else {}),
        "removed files": found.removed_files,
        "removed bytes": found.removed_bytes,
        **({"problem": str(found.problem)} if found.problem is not None else {}),
    }


def _remove_partitions(instance: dg.DagsterInstance, store: LogStore, names: TableAssets) -> int:
    """Remove the keys of past epochs; the sensor does so, too, if it runs."""
    row = store.table(names.table)
    plan = {chunk.key for chunk in chunks(store, names.table, row.epoch)} if row else set()
    if not plan:
        return 0  # a new epoch waits for its pin: the old keys stay until there is a plan
    stale = set(instance.get_dynamic_partitions(names.partitions_name)) - plan
    for key in stale:
        instance.delete_dynamic_partition(names.partitions_name, key)
    return len(stale)
