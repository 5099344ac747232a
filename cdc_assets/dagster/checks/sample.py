"""Does a part of each lake table equal the source? Another part each time: all of it in turn."""

# No postponed annotations here: Dagster looks at the type of `context` itself.
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.metadata import without_zeros
from cdc_assets.dagster.names import TableAssets, operation_name, run_lock
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.messages.texts import bounded, counted, described
from cdc_assets.pipeline import Pipeline
from cdc_assets.verify.sample import Sampled, sample

NAME = "rows_match_source"
REMEDY = "`cdc-assets verify` compares every row, `cdc-assets resync` copies the table anew."


def sample_checks(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.AssetChecksDefinition:
    """The check ``rows_match_source`` of the lake tables, one after the other."""
    resource = f"spark_{config.name}"

    @dg.multi_asset_check(
        name=operation_name(config.name, "sample"),
        specs=[
            dg.AssetCheckSpec(
                NAME,
                asset=names.lake,
                description="Some rows, others each time, are those of the source at one LSN.",
            )
            for names in tables
        ],
        can_subset=True,
        required_resource_keys={resource},
    )
    @run_of(config)
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        session = spark_session(getattr(context.resources, resource), config)
        with Pipeline.open(config) as pipeline:
            pipeline.store.lock(run_lock(context.run.run_id))
            for names in tables:
                if dg.AssetCheckKey(names.lake, NAME) in context.selected_asset_check_keys:
                    found = sample(pipeline, session, names.table, config.verify.sample_rows)
                    context.log.info("%s: %s", names.table, sentence(found))
                    yield check_sample(found, names, pipeline.store.server_now())

    return check


def sentence(found: Sampled) -> str:
    """What a sample found."""
    if found.skipped is not None:
        if found.since is None:
            return f"Not compared now: {found.skipped}."
        return f"Not compared since {found.since:%Y-%m-%d %H:%M:%S %Z}: {found.skipped}"
    part = f"{found.rows:,} rows, and {found.looked_up:,} keys of the lake,"
    if not found.differing:
        said = f"{part} are those of the source at {found.lsn}."
        if found.differed_at is None:
            return said
        return (
            f"Keys differed at {found.differed_at:%Y-%m-%d %H:%M:%S %Z}, and not all of the table"
            f" was found equal since. {said} {REMEDY}"
        )
    columns = f" in {', '.join(found.columns)}" if found.columns else ""
    return (
        f"{counted(found.differing, 'key', 'differ')}{columns} ({part} were compared at"
        f" {found.lsn}): {'; '.join(found.keys)}. {REMEDY}"
    )


def check_sample(found: Sampled, names: TableAssets, now: datetime) -> dg.AssetCheckResult:
    """Fail with the keys and columns that differ; warn of what isn't compared, later fail."""
    metadata: dict[str, str | int | float | dg.MetadataValue[Any]] = {
        "keys changed meanwhile": found.moved,
        "share of the table": round(found.share, 6),
        "begins at": round(found.begin, 6),
    }
    if found.differing:
        metadata["keys that differ"] = bounded("\n".join(found.keys), 10_000)
        metadata["columns that differ"] = ", ".join(found.columns)
    if found.round_ended is not None:
        metadata["last full round"] = dg.MetadataValue.timestamp(found.round_ended)
    young = found.since is not None and now - found.since < names.config.verify.fail_after
    return dg.AssetCheckResult(
        asset_key=names.lake,
        check_name=NAME,
        passed=not found.differing and found.since is None and found.differed_at is None,
        severity=dg.AssetCheckSeverity.WARN
        if young and found.differed_at is None
        else dg.AssetCheckSeverity.ERROR,
        description=described(sentence(found)),
        metadata=without_zeros(metadata),
    )
