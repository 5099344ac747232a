"""Is the source ready, and all that it needs? The findings of ``check``, on the source assets."""

# No postponed annotations here: Dagster looks at the type of `context` itself.
from collections.abc import Iterator, Sequence

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import TableAssets, operation_name
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.messages.findings import Finding
from cdc_assets.messages.texts import DESCRIPTION, REPORT, bounded, described, markdown
from cdc_assets.readiness.surroundings import review

NAME = "ready"


def ready_checks(config: SourceConfig, tables: Sequence[TableAssets]) -> dg.AssetChecksDefinition:
    """The check ``ready`` of the source's tables: one look for all of them."""

    @dg.multi_asset_check(
        name=operation_name(config.name, "ready"),
        specs=[
            dg.AssetCheckSpec(
                NAME,
                asset=names.source,
                description="The source, the log, staging, the catalog and Spark are as they have"
                " to be.",
            )
            for names in tables
        ],
        can_subset=True,
    )
    @run_of(config)
    def ready(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        findings = review(config)
        for names in tables:
            if dg.AssetCheckKey(names.source, NAME) in context.selected_asset_check_keys:
                yield check_ready(findings, names)

    return ready


def check_ready(findings: Sequence[Finding], names: TableAssets) -> dg.AssetCheckResult:
    """The findings on the table, and on all that it shares with others; the worst counts."""
    mine = [
        finding
        for finding in findings
        if finding.table in (None, str(names.table)) and finding.severity != "info"
    ]
    errors = sum(finding.severity == "error" for finding in mine)
    lines = [f"- **{f.severity}** `{f.code}`: {_as_it_is(f)}" for f in mine]
    return dg.AssetCheckResult(
        asset_key=names.source,
        check_name=NAME,
        passed=not mine,
        severity=dg.AssetCheckSeverity.ERROR if errors else dg.AssetCheckSeverity.WARN,
        description=described(mine[0].message) if mine else "Everything is as it has to be.",
        metadata={"findings": dg.MetadataValue.md(bounded("\n".join(lines), REPORT))}
        if lines
        else {},
    )


def _as_it_is(finding: Finding) -> str:
    return markdown(bounded(f"{finding.message} {finding.remedy}", DESCRIPTION))
