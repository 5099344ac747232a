"""The command that holds a snapshot for a dump."""

from __future__ import annotations

import shlex

import click

from cdc_assets.cli.anew import until_told
from cdc_assets.cli.group import cli, json_option, opened, streamed
from cdc_assets.cli.outcomes import echo
from cdc_assets.cli.terminal import note, say

_LOOK_SECONDS = 5.0


@cli.command(
    examples=("cdc-assets pin --hold",),
    json_form="an object: snapshot, lsn, tables whose dump may be copied, and their partitions",
)
@click.option("--hold", is_flag=True, required=True, help="Until it is interrupted (Ctrl-C).")
@json_option
@click.pass_context
def pin(ctx: click.Context, hold: bool, as_json: bool) -> None:  # noqa: ARG001 - a must
    """Hold a snapshot of the source for a dump, and name it and its LSN (snapshot.from)."""
    from cdc_assets.operations.holding import held_point

    with opened(streamed(ctx)) as pipeline, held_point(pipeline) as held:
        stop = until_told()  # until then an interrupt ends it at once, as it may wait for minutes
        names, parts = [*map(str, held.tables)], [*map(str, held.partitions)]
        if as_json:
            point = {"snapshot": held.snapshot_name, "lsn": str(held.lsn)}
            echo(point | {"tables": names, "partitions": parts})
        else:
            only = " ".join(f"--table={shlex.quote(name)}" for name in [*names, *parts])
            say(f"pg_dump --snapshot={held.snapshot_name} {only} …")
            say(f"snapshot: {{from: {{kind: dump, lsn: {held.lsn}, dsn: …}}}}")
        note("It is held until you interrupt this (Ctrl-C), once the dump has ended.")
        while not stop.wait(_LOOK_SECONDS):
            held.look()
