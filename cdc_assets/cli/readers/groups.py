"""The command that gives a consumer group up."""

from __future__ import annotations

import click

from cdc_assets.cli.group import cli, config_of, json_option, opened, table_names
from cdc_assets.cli.outcomes import echo
from cdc_assets.cli.terminal import say
from cdc_assets.errors import ConfigurationError
from cdc_assets.messages.texts import counted
from cdc_assets.postgres.names import TableId


@cli.command(
    name="drop-group",
    examples=(
        "cdc-assets drop-group search",
        "cdc-assets drop-group search --table public.orders",
    ),
    json_form="an object: group, and tables, whose staged files don't wait for it any more",
)
@click.argument("name")
@click.option(
    "--table", metavar="S.T", help="Only what it has of this table.", shell_complete=table_names
)
@json_option
@click.pass_context
def drop_group(ctx: click.Context, name: str, table: str | None, as_json: bool) -> None:
    """Give a consumer group up, so that staged files don't wait for it."""
    from cdc_assets.consumers.drop import drop_group as drop

    config = config_of(ctx)
    try:
        only = TableId.parse(table) if table is not None else None
    except ValueError as error:
        raise ConfigurationError(f"{error}.") from error
    with opened(config) as pipeline:
        dropped = drop(pipeline, name, only)
    if as_json:
        echo({"group": name, "tables": [str(one) for one in dropped]})
        return
    say(
        f"group {name}: dropped, with {counted(len(dropped), 'table')}; maintain removes the"
        " staged files that waited for it"
    )
    if any(group.name == name for group in config.consumers) and only is None:
        say(f"It is still in consumers: a program that follows {name} begins it anew.")
