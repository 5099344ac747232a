"""The command that moves a source's state to another database."""

from __future__ import annotations

from dataclasses import asdict

import click

from cdc_assets.cli.group import cli, config_of, json_option
from cdc_assets.cli.outcomes import echo
from cdc_assets.cli.terminal import note, say
from cdc_assets.config.addresses import services
from cdc_assets.errors import ConfigurationError


@cli.group(name="state")
def state_group() -> None:
    """The coordination schema of the source, where its log is."""


@state_group.command(
    examples=(
        "cdc-assets state migrate --to '${STATE_DSN}'",
        "cdc-assets state migrate --undo",
    ),
    json_form="an object: source, outcome (moved, was moved, undone, nothing to undo), former,"
    " place, rows by table of the schema, seconds",
)
@click.option("--to", metavar="DSN", help="The other database; ${VAR} and ${aws-secret:…} as ever.")
@click.option("--undo", is_flag=True, help="Give up a move that was interrupted before its end.")
@click.option(
    "--during-copies", is_flag=True, help="Even if copies lose the snapshot that they read."
)
@json_option
@click.pass_context
def migrate(
    ctx: click.Context, to: str | None, undo: bool, during_copies: bool, as_json: bool
) -> None:
    """Move all that is known of the source to another database, once everything has stopped.

    Interrupted, the same command goes on. Set state.postgres_url then: the former place refuses.
    """
    from cdc_assets.operations.state.migrate import migrate_state, undo_migration

    if (to is None) == (not undo):
        raise ConfigurationError("say where: --to DSN; or --undo.")
    config = config_of(ctx)
    with services(config):
        if to is None:
            done = undo_migration(config)
        else:
            done = migrate_state(config, to, during_copies=during_copies)
    if as_json:
        echo(asdict(done))
        return
    if done.place is None:
        say(f"{done.outcome}: the state of source {done.source} is at {done.former}")
        return
    say(f"{done.outcome}: the state of source {done.source} is at {done.place}")
    if done.rows:
        say(f"{sum(done.rows.values()):,} rows, compared, in {done.seconds:.1f} s")
    note("Set state.postgres_url to it before anything is started: the former place refuses.")
