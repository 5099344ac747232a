"""The command that has tables read again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cdc_assets.cli.anew import until_told
from cdc_assets.cli.group import cli, json_option, opened, streamed, table_names
from cdc_assets.cli.outcomes import echo
from cdc_assets.cli.terminal import note, say
from cdc_assets.config.addresses import selected
from cdc_assets.errors import ConfigurationError

if TYPE_CHECKING:
    from cdc_assets.log.backfills import Backfill

_WISHES = ("pause", "resume", "stop")


def _first(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    if ctx.params.get("what"):
        return []
    return [w for w in _WISHES if w.startswith(begun)] + table_names(ctx, parameter, begun)


@cli.command(
    examples=(
        "cdc-assets backfill public.orders --wait",
        "cdc-assets backfill public.orders --where \"placed_at >= '2026-01-01'\"",
        "cdc-assets backfill public.orders --replace --wait",
        "cdc-assets backfill --list",
        "cdc-assets backfill pause 7",
        "cdc-assets backfill resume 7 --wait",
    ),
    json_form="an object: backfill (its number), table, state, …; a list with --list",
)
@click.argument(
    "what", nargs=-1, metavar="[S.T | pause N | resume N | stop N]", shell_complete=_first
)
@click.option("--where", metavar="SQL", help="Only these rows: an immutable condition.")
@click.option("--replace", is_flag=True, help="Remove rows that only the lake has, too.")
@click.option("--deletes", is_flag=True, help="Only remove rows that the source doesn't have.")
@click.option("--wait", is_flag=True, help="Carry it out here, and return when it has ended.")
@click.option("--list", "lists", is_flag=True, help="List the backfills of the source.")
@json_option
@click.pass_context
def backfill(
    ctx: click.Context,
    what: tuple[str, ...],
    where: str | None,
    replace: bool,
    deletes: bool,
    wait: bool,
    lists: bool,
    as_json: bool,
) -> None:
    """Read a table that streams again, all or some rows, while it goes on; or list and steer that.

    Rows that change meanwhile are left to the stream. With --wait: 1 unless it is done.
    """
    from cdc_assets.backfill.request import request
    from cdc_assets.log.backfills import backfills
    from cdc_assets.operations import backfilling, running, signals

    config = streamed(ctx)
    if lists == bool(what):
        raise ConfigurationError("name one table (S.T), or pause, resume or stop; or give --list.")
    with opened(config) as pipeline:
        if lists:
            if (problem := signals.bring_signals(pipeline)) is not None:
                note(problem)
            signals.take_signals(pipeline)
            found = backfills(pipeline.store)
            if as_json:
                echo([one.to_json() for one in found])
            else:
                for one in found:
                    _show(one)
                if not found:
                    note(f"Nobody has asked for a backfill of source {config.name} yet.")
            return
        if what[0] in _WISHES:
            number = _number(what)
            done = backfilling.wish(pipeline, what[0], number)  # type: ignore[arg-type]
        else:
            if len(what) > 1:
                raise ConfigurationError("name one table, whose rows are read again.")
            [table] = selected(config, what)
            done = request(pipeline, table, where, replaces=replace, deletes=deletes)
            number = done.number
        if wait and not done.has_ended and done.state != "paused":
            stop = until_told()
            with running.Spark(config) as spark, spark.session() as session:
                done = backfilling.backfill(pipeline, session, number, note, stop)
        if as_json:
            echo(done.to_json())
        else:
            _show(done)
        if done.state in ("requested", "running") and not as_json:
            note(
                f"The sensor backfills_{config.name} has it carried out; so does cdc-assets"
                f" backfill resume {number} --wait."
            )
    sys.exit(1 if wait and done.state != "done" else 0)


def _show(found: Backfill) -> None:
    """Its state in a line, and one for what it waits for, or has failed for."""
    say(found.sentence)
    if found.reason:
        say(f"    {found.reason}")


def _number(what: tuple[str, ...]) -> int:
    if len(what) != 2 or not what[1].isdigit():
        raise ConfigurationError(
            f"say which backfill is to {what[0]}: cdc-assets backfill {what[0]} N.",
            "cdc-assets backfill --list has the numbers.",
        )
    return int(what[1])
