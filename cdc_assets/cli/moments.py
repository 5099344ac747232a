"""The commands for moments of the source: marks in the lake, and a snapshot held for a dump."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from cdc_assets.cli.anew import until_told
from cdc_assets.cli.group import cli, json_option, opened, streamed, tables_option
from cdc_assets.cli.outcomes import echo
from cdc_assets.cli.terminal import note, say
from cdc_assets.config.query.refused import refuse_queried
from cdc_assets.config.source import load_config
from cdc_assets.messages.texts import counted, one_line
from cdc_assets.setup.discovery import discovered

if TYPE_CHECKING:
    from cdc_assets.config.source import SourceConfig
    from cdc_assets.log.asked.marks import Mark
    from cdc_assets.marks.diff.compare import Difference

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

    config = streamed(ctx)
    refuse_queried(config, "a point that is held")
    with opened(config) as pipeline, held_point(pipeline) as held:
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


_MARK_FORM = "name, tag, lsn, created_at, scheduled, tables: table, lake_table, state, …"


@cli.command(
    examples=(
        "cdc-assets mark before-migration",
        "cdc-assets mark before-migration --publish",
        "cdc-assets mark 2026-12-31 --json",
    ),
    json_form=f"an object: {_MARK_FORM}",
)
@click.argument("name")
@click.option(
    "--publish",
    "published",
    is_flag=True,
    help="In every deployment of the source: by a row of its table markers.table.",
)
@json_option
@click.pass_context
def mark(ctx: click.Context, name: str, published: bool, as_json: bool) -> None:
    """Tag every lake table at one LSN, that of now: readers of many tables see one moment.

    1 unless all are tagged. One that was interrupted is gone on with.
    """
    from cdc_assets.log.asked.marks import refuse_name
    from cdc_assets.marks import make
    from cdc_assets.operations.running import Spark

    config = streamed(ctx)
    refuse_queried(config, "a mark")
    refuse_name(name)
    with opened(config) as pipeline, Spark(config) as spark, spark.session() as session:
        made = make.mark(pipeline, session, name, published=published, on_progress=note)
    if as_json:
        echo(_shown(made, config))
    else:
        _say(made)
    sys.exit(0 if all(table.state == "tagged" for table in made.tables) else 1)


@cli.command(
    examples=(
        "cdc-assets marks",
        "cdc-assets marks --drop before-migration",
    ),
    json_form=f"a list of objects: {_MARK_FORM}",
)
@click.option("--drop", "dropped", multiple=True, metavar="NAME", help="Drop it, with its tags.")
@json_option
@click.pass_context
def marks(ctx: click.Context, dropped: tuple[str, ...], as_json: bool) -> None:
    """List the marks of the source; or drop some."""
    from cdc_assets.log.asked import marks as log
    from cdc_assets.log.asked.markers import refused_markers
    from cdc_assets.marks import make
    from cdc_assets.operations.running import Spark

    config = streamed(ctx)
    with opened(config) as pipeline:
        if dropped:
            with Spark(config) as spark, spark.session() as session:
                for name in dropped:
                    make.drop(pipeline, session, name)
        found, refused = log.marks(pipeline.store), refused_markers(pipeline.store)
    if as_json:
        echo([_shown(one, config) for one in found])
        return
    for one in found:
        _say(one)
    for marker in refused:
        of = f"the marker {one_line(marker.marker)} ({one_line(marker.name)}) at {marker.lsn}"
        say(f"{of} made no mark: {marker.reason}")
    if not found:
        say("There are no marks. Make one: cdc-assets mark NAME")


@cli.command(
    examples=(
        "cdc-assets --config blue.yaml diff green.yaml --mark switch",
        "cdc-assets --config blue.yaml diff green.yaml --mark switch --table public.orders --json",
    ),
    json_form="an object: mark, lsn, equal, and tables: table, outcome, blue_rows, green_rows, …",
)
@click.argument("green", metavar="GREEN.yaml", type=click.Path())
@click.option("--mark", "name", metavar="NAME", required=True, help="A mark that both have.")
@tables_option
@json_option
@click.option("--show-keys", is_flag=True, help="Print the keys (or rows) that differ, too.")
@click.pass_context
def diff(
    ctx: click.Context,
    green: str,
    name: str,
    tables: tuple[str, ...],
    as_json: bool,
    show_keys: bool,
) -> None:
    """Compare this lake (blue) with that of GREEN.yaml at a mark: 0 equal, 1 not.

    2 if a table isn't tagged on a side, or isn't at the same commit. The Spark of this source reads
    both.
    """
    from cdc_assets.marks.diff.whole import diff as compared

    blue, other = streamed(ctx), discovered(load_config(green))
    found = compared(blue, other, name, tables, note, show_keys=show_keys)
    if as_json:
        echo(
            {
                "mark": found.mark,
                "lsn": str(found.lsn),
                "equal": found.exit_code == 0,
                "tables": [_difference(one) for one in found.tables],
            }
        )
    else:
        for one in found.tables:
            _say_difference(one)
    sys.exit(found.exit_code)


def _say_difference(found: Difference) -> None:
    rows, head = found.rows, f"{found.table}: {found.outcome}"
    if rows is None:
        said = f": {found.problem}" if found.problem is not None else ""
        say(f"{head}{said}")
    elif not rows.differing:
        say(f"{head}, {counted(rows.blue, 'row')}")
    else:
        least = "at least " if rows.at_least else ""
        sides = f"blue {counted(rows.blue, 'row')}, green {counted(rows.green, 'row')}"
        say(f"{head}: {least}{counted(rows.differing, 'key', 'differ')} ({sides})")
        for key in rows.keys:
            say(f"    {key}")
    for text in (*found.schema, *found.remarks):
        say(f"    {text}")


def _difference(found: Difference) -> dict[str, Any]:
    rows = found.rows
    return {
        "table": str(found.table),
        "outcome": found.outcome,
        "blue_rows": rows.blue if rows is not None else None,
        "green_rows": rows.green if rows is not None else None,
        "differing": rows.differing if rows is not None else None,
        "at_least": rows.at_least if rows is not None else None,
        "keys": list(rows.keys) if rows is not None else [],
        "columns": list(rows.columns) if rows is not None else [],
        "schema": list(found.schema),
        "remarks": list(found.remarks),
        "problem": found.problem,
        "seconds": round(found.seconds, 3),
    }


def _say(mark: Mark) -> None:
    counts = [
        f"{len(some)} {state}"
        for state in ("tagged", "pending", "missed")
        if (some := [t for t in mark.tables if t.state == state])
    ]
    say(f"{mark.name}: {mark.lsn}, {mark.created_at:%Y-%m-%d %H:%M:%S %Z}, {', '.join(counts)}")
    for table in mark.tables:
        if (why := table.lacking) is not None:
            say(f"  {table.table} is {table.state}: {why}")


def _shown(mark: Mark, config: SourceConfig) -> dict[str, Any]:
    names = {table.id: ".".join(config.lake_identifier(table.id)) for table in config.tables}
    return {
        "name": mark.name,
        "tag": mark.tag,
        "lsn": str(mark.lsn),
        "created_at": mark.created_at.isoformat(),
        "scheduled": mark.scheduled,
        "tables": [
            {
                "table": str(table.table),
                "lake_table": names.get(table.table),
                "state": table.state,
                "snapshot_id": table.snapshot_id,
                "reason": table.reason,
            }
            for table in mark.tables
        ],
    }
