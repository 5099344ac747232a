"""The operation ``check__<source>``: the checks of every lake table, one after the other."""

# No postponed annotations here: Dagster looks at the type of `context` itself.
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

import dagster as dg
from pyspark.sql import SparkSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.checks import lag, unique_key, values
from cdc_assets.dagster.names import TableAssets, operation_name, run_lock
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.errors import CdcError
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.lake.tables import LakeTable
from cdc_assets.messages.texts import described
from cdc_assets.observe.status import collect
from cdc_assets.pipeline import Pipeline
from cdc_assets.readiness.foreign_errors import explained

LOOKED_AT_AGAIN = "It is looked at again by itself."


def table_checks(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.AssetChecksDefinition:
    """The checks of the tables; any subset can be run from the UI."""
    resource = f"spark_{config.name}"

    @dg.multi_asset_check(
        name=operation_name(config.name, "check"),
        specs=[spec for names in tables for spec in _specs(names)],
        can_subset=True,
        required_resource_keys={resource},
    )
    @run_of(config)
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        selected = context.selected_asset_check_keys
        with Pipeline.open(config) as pipeline:
            pipeline.store.lock(run_lock(context.run.run_id))
            states = {status.name: status for status in collect(pipeline).tables}
            for names in tables:
                if dg.AssetCheckKey(names.lake, lag.NAME) in selected:
                    yield lag.check_lag(states[str(names.table)], names)
            reading = [(names, _reading(names, selected)) for names in tables]
            if not any(wanted for _, wanted in reading):
                return
            session = cache(lambda: spark_session(getattr(context.resources, resource), config))
            for names, wanted in reading:
                row = pipeline.store.table(names.table)
                lake = LakeTable(config, config.table(names.table), row) if row else None
                for name in wanted:
                    if name == values.NAME and lake is not None:
                        session()  # raises: without Spark no table is to blame
                    try:
                        found = _look(pipeline, session, lake, names, name)
                    except Exception as error:  # one table's: the others are looked at
                        if lost_server(error):
                            raise
                        found = _not_looked_at(names, name, explained(error, config))
                    yield found

    return check


def _look(
    pipeline: Pipeline,
    session: Callable[[], SparkSession],
    lake: LakeTable | None,
    names: TableAssets,
    name: str,
) -> dg.AssetCheckResult:
    if lake is None or lake.load() is None:
        return _not_there(names, name)
    if name == unique_key.NAME:
        return unique_key.check_unique_key(pipeline.store, lake, names)
    return values.check_values(pipeline, session(), lake, names)


def _reading(names: TableAssets, selected: AbstractSet[dg.AssetCheckKey]) -> list[str]:
    """The wanted checks of a table that have to read it."""
    checks = (unique_key.NAME, values.NAME)
    return [name for name in checks if dg.AssetCheckKey(names.lake, name) in selected]


def _specs(names: TableAssets) -> list[dg.AssetCheckSpec]:
    return [
        dg.AssetCheckSpec(
            lag.NAME, asset=names.lake, description="Seconds since it equalled the source."
        ),
        dg.AssetCheckSpec(
            unique_key.NAME, asset=names.lake, description="No key stands more than once."
        ),
        dg.AssetCheckSpec(
            values.NAME,
            asset=names.lake,
            description="Every value of the source has a form in the lake.",
        ),
    ]


def _not_looked_at(names: TableAssets, check: str, why: CdcError) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=names.lake,
        check_name=check,
        passed=False,
        severity=dg.AssetCheckSeverity.WARN,
        description=described(f"{names.lake_table_name} wasn't looked at: {why} {LOOKED_AT_AGAIN}"),
    )


def _not_there(names: TableAssets, check: str) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=names.lake,
        check_name=check,
        passed=True,
        description=described(f"{names.lake_table_name} doesn't exist yet."),
    )
