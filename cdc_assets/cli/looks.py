"""The commands that look, and change nothing."""

from __future__ import annotations

import json
import sys

import click

from cdc_assets.cli.group import (
    cli,
    config_of,
    json_option,
    opened,
    tables_option,
    wide_option,
)
from cdc_assets.cli.outcomes import echo
from cdc_assets.cli.terminal import note, say, show_compared, show_findings, show_health
from cdc_assets.config.addresses import selected, services
from cdc_assets.config.query.refused import refuse_queried


@cli.command(
    examples=(
        "cdc-assets --config app.yaml check",
        "cdc-assets check --json",
    ),
    json_form="a list of findings: code, severity, message, remedy, and table",
)
@json_option
@click.pass_context
def check(ctx: click.Context, as_json: bool) -> None:
    """Look whether the source is ready, and all that it needs; changes nothing."""
    from cdc_assets.readiness import surroundings as readiness

    config = config_of(ctx)
    with services(config):
        findings = readiness.review(config)
    if as_json:
        echo([finding.to_json() for finding in findings])
    else:
        show_findings(findings, len(config.tables))
    sys.exit(1 if any(finding.severity == "error" for finding in findings) else 0)


@cli.command(
    name="alert-test",
    examples=("cdc-assets alert-test",),
    json_form="a list with an object a sink: sink, and problem, null where the message was sent",
)
@json_option
@click.pass_context
def alert_test(ctx: click.Context, as_json: bool) -> None:
    """Send a message to every sink of alerts:, to see whether it arrives."""
    from cdc_assets.observe.sinks import try_sinks

    problems = try_sinks(config_of(ctx))
    if as_json:
        echo([{"sink": sink, "problem": problem} for sink, problem in problems.items()])
    else:
        for sink, problem in problems.items():
            say(f"{sink}: {problem or 'sent'}")
    sys.exit(1 if any(problems.values()) else 0)


@cli.command(
    examples=(
        "cdc-assets verify",
        "cdc-assets verify --table public.orders --show-keys",
        "cdc-assets verify --table public.orders --repair",
    ),
    json_form="a list with an object a table: table, equal, source_rows, lake_rows, differing, …",
)
@tables_option
@json_option
@click.option("--show-keys", is_flag=True, help="Print the keys (or rows) that differ, too.")
@click.option("--repair", is_flag=True, help="Correct the rows that differ, and compare again.")
@click.pass_context
def verify(
    ctx: click.Context, tables: tuple[str, ...], as_json: bool, show_keys: bool, repair: bool
) -> None:
    """Compare every row of source and lake, each table at one LSN; 1 unless all are equal."""
    from cdc_assets.operations import whole as commands

    config = config_of(ctx)
    refuse_queried(config, "verify")
    wanted = selected(config, tables)
    with opened(config) as pipeline:
        found = commands.verify_tables(pipeline, wanted, note, show_keys=show_keys, repair=repair)
    if as_json:
        click.echo(
            json.dumps(
                [
                    {
                        "table": str(c.table),
                        "equal": c.equal,
                        "outcome": c.outcome,
                        "lsn": str(c.lsn) if c.lsn is not None else None,
                        "source_rows": c.source_rows,
                        "lake_rows": c.lake_rows,
                        "differing": c.differing,
                        "repaired": c.repaired,
                        "not_repaired": c.unrepaired,
                        "keys": list(c.keys),
                        "columns": list(c.columns),
                        "problem": c.problem,
                        "not_compared_since": c.since.isoformat() if c.since else None,
                        "unrepresentable": dict(c.lost),
                        "other_columns": list(c.others),
                        "seconds": round(c.seconds, 3),
                    }
                    for c in found
                ],
                indent=2,
            )
        )
    else:
        show_compared(found)
    sys.exit(0 if all(c.equal for c in found) else 1)


@cli.command(
    name="status",
    examples=(
        "cdc-assets status --wide",
        "cdc-assets status --json",
    ),
    json_form="an object: source, tables, slot, flusher, lake, …",
)
@json_option
@wide_option
@click.pass_context
def status_command(ctx: click.Context, as_json: bool, wide: bool) -> None:
    """Say where slot, flusher and every table stand."""
    from cdc_assets.observe import report
    from cdc_assets.observe.status import collect

    config = config_of(ctx)
    with opened(config) as pipeline:
        if as_json:
            echo(collect(pipeline).to_json())
            return
        health = report.look(pipeline, sample=False)
    show_health(health, wide=wide)
