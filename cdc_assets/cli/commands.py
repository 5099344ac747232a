"""The commands that do something; ``looks`` has the read-only ones."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from cdc_assets.cli.anew import ConfigurationFile, until_told
from cdc_assets.cli.group import (
    cli,
    config_of,
    json_option,
    opened,
    path_of,
    reading,
    streamed,
    table_names,
    tables_option,
    wide_option,
)
from cdc_assets.cli.outcomes import TABLE_FORM, Outcomes, echo, pauses
from cdc_assets.cli.terminal import note, say, show_maintained, show_paused, stderr
from cdc_assets.config.addresses import selected, services
from cdc_assets.errors import ConfigurationError
from cdc_assets.postgres.names import TableId
from cdc_assets.process.lifeline import end_within

if TYPE_CHECKING:
    from cdc_assets.maintenance.run import Maintained


@cli.command(
    examples=(
        "cdc-assets snapshot",
        "cdc-assets snapshot --table shop.orders --table 'public.\"Order Lines\"'",
    ),
    json_form=TABLE_FORM,
)
@tables_option
@json_option
@click.pass_context
def snapshot(ctx: click.Context, tables: tuple[str, ...], as_json: bool) -> None:
    """Create what is missing, copy what is missing, resume what was interrupted."""
    from cdc_assets.operations import copying, running

    config = config_of(ctx)
    wanted = selected(config, tables)
    done = Outcomes(wanted, as_json=as_json)
    with opened(config) as pipeline, running.Spark(config) as spark, done:
        copying.snapshot(pipeline, spark, wanted, done.copied)
    if config.snapshot.from_ is not None:
        note("They were read from a copy of the source. Compare them with it: cdc-assets verify")


@cli.command(
    examples=(
        "cdc-assets resync public.orders",
        "cdc-assets --config app.yaml resync --all",
    ),
    json_form=TABLE_FORM,
)
@click.argument("tables", nargs=-1, metavar="[S.T]...", shell_complete=table_names)
@click.option("--all", "everything", is_flag=True, help="Every table of the source.")
@json_option
@click.pass_context
def resync(ctx: click.Context, tables: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Copy tables anew while the others flow; readers see the old rows until it is complete."""
    from cdc_assets.operations import copying, running

    config = config_of(ctx)
    if everything == bool(tables):
        raise ConfigurationError("name the tables to copy anew (S.T), or give --all.")
    wanted = selected(config, tables)
    done = Outcomes(wanted, as_json=as_json)
    with opened(config) as pipeline, running.Spark(config) as spark, done:
        copying.resync(pipeline, spark, wanted, done.copied)


@cli.command(
    examples=(
        "cdc-assets pause public.orders",
        "cdc-assets pause",
    ),
    json_form="an object: source, paused_since, and tables with the begin of each one's pause",
)
@click.argument("tables", nargs=-1, metavar="[S.T]...", shell_complete=table_names)
@json_option
@click.pass_context
def pause(ctx: click.Context, tables: tuple[str, ...], as_json: bool) -> None:
    """Apply nothing more to these tables, or to the whole source; staging goes on."""
    from cdc_assets.log.asked import wishes

    config = config_of(ctx)
    wanted = selected(config, tables) if tables else [None]
    with opened(config) as pipeline:
        for table in wanted:
            wishes.pause(pipeline.store, table)
        if as_json:
            echo(pauses(pipeline.store))
        else:
            show_paused(pipeline.store)


@cli.command(
    examples=(
        "cdc-assets resume public.orders",
        "cdc-assets resume",
    ),
    json_form="as of pause: what is paused still; and resumed, the names of what was",
)
@click.argument("tables", nargs=-1, metavar="[S.T]...", shell_complete=table_names)
@json_option
@click.pass_context
def resume(ctx: click.Context, tables: tuple[str, ...], as_json: bool) -> None:
    """End the pause of these tables, or the source's; take up a dropped source again."""
    from cdc_assets.log.asked import wishes
    from cdc_assets.operations import copying

    config = config_of(ctx)
    resumed: dict[str, bool] = {}
    with opened(config) as pipeline:
        for table in selected(config, tables) if tables else []:
            resumed[str(table)] = wishes.resume(pipeline.store, table)
        if not tables:
            was = wishes.source_paused(pipeline.store) is not None
            if copying.resume(pipeline):
                note("The source was dropped: every table will be copied anew.")
            else:
                resumed[config.name] = was
        if as_json:
            those = [name for name, was in resumed.items() if was]
            echo(pauses(pipeline.store) | {"resumed": those})
            return
        for name, was in resumed.items():
            what = name if tables else f"source {name}"
            say(f"{what}: {'resumed' if was else 'was not paused'}")
        show_paused(pipeline.store)


@cli.command(
    name="drop-source",
    examples=("cdc-assets drop-source --yes app", "cdc-assets drop-source --yes app --files"),
    json_form="an object: source; slot and publication, null where none was removed; refused (what"
    " the publication's owner has to do), files, bytes",
)
@click.option("--yes", metavar="NAME", help="The source's name, so that it is the right one.")
@click.option("--files", is_flag=True, help="Delete the staged changes, too.")
@json_option
@click.pass_context
def drop_source(ctx: click.Context, yes: str | None, files: bool, as_json: bool) -> None:
    """Give the source up: slot and publication are removed, the lake tables stay."""
    from cdc_assets.operations.drop import drop_source as drop
    from cdc_assets.operations.drop import refuse_unmeant

    config = config_of(ctx)
    refuse_unmeant(config, yes, f"Say --yes {config.name} if that is meant.")
    with opened(config) as pipeline:
        done = drop(pipeline, files=files)
    if as_json:
        echo({"source": config.name, **asdict(done)})
        return
    if config.decodes:
        say(f"slot {config.slot}: {'removed' if done.slot else 'there was none'}")
    if done.refused:
        for todo in done.refused:
            note(todo)
    elif config.decodes:
        gone = "removed" if done.publication else "there was none"
        say(f"publication {config.publication}: {gone}")
    if files:
        say(f"staged files: {done.files:,} removed, {done.bytes / 1e6:,.1f} MB")


@cli.command(
    name="drop-table",
    examples=(
        "cdc-assets drop-table public.orders",
        "cdc-assets drop-table public.orders --purge",
    ),
    json_form="an object: table, publications (that it was taken out of), still_in, refused (what"
    " an owner of these has to do), purged, files, bytes",
)
@click.argument("table", metavar="S.T")
@click.option("--purge", is_flag=True, help="Drop the lake table, too, with its files.")
@json_option
@click.pass_context
def drop_table(ctx: click.Context, table: str, purge: bool, as_json: bool) -> None:
    """Give a table up that is out of the configuration: nothing of it is staged any more."""
    from cdc_assets.operations.drop_table import drop_table as drop

    config = config_of(ctx)
    try:
        wanted = TableId.parse(table)
    except ValueError as error:
        raise ConfigurationError(f"{error}.") from error
    with opened(config) as pipeline:
        done = drop(pipeline, wanted, purge=purge)
    if as_json:
        echo({"table": str(wanted), **asdict(done)})
        return
    for name in done.publications:
        say(f"publication {name}: {wanted} is taken out")
    for name in done.still_in:
        say(f"publication {name} still has {wanted}, whose changes nobody stages now")
    for todo in done.refused:
        note(todo)
    if done.purged:
        tables, size = ", ".join(done.purged), f"{done.bytes / 1e6:,.1f} MB"
        say(f"lake table {tables}: dropped, {done.files:,} files, {size}")
    say(f"{wanted} is dropped; maintain removes its staged files in time")


@cli.command(
    examples=(
        "cdc-assets flush",
        "cdc-assets flush --until current",
    )
)
@click.option("--until", metavar="current|LSN", help="End once the log has reached it.")
@click.pass_context
def flush(ctx: click.Context, until: str | None) -> None:
    """Stream the slot and stage its changes; for ever without --until."""
    from cdc_assets.flusher.flusher import run
    from cdc_assets.flusher.reach import flush_target, reach

    if until is None:
        logging.getLogger("cdc_assets").setLevel(logging.INFO)  # it is watched, or has a log
        file = ConfigurationFile(path_of(ctx))
        config = streamed(ctx)
        with file.until_changed(config, reading(ctx), end_within) as stop, services(config):
            run(config, stop=stop)
        return
    config = streamed(ctx)
    stop = until_told(end_within)
    with opened(config) as pipeline:
        try:
            target = flush_target(pipeline, until)
        except ValueError as error:
            raise ConfigurationError(f"--until: {error}.") from error
        reach(pipeline, target, stop)


@cli.command(
    examples=(
        "cdc-assets materialize",
        "cdc-assets materialize --follow",
    ),
    json_form=TABLE_FORM,
)
@tables_option
@click.option("--follow", is_flag=True, help="Go on for ever; share the tables with other workers.")
@json_option
@click.pass_context
def materialize(ctx: click.Context, tables: tuple[str, ...], follow: bool, as_json: bool) -> None:
    """Apply the log to the lake tables; with --follow, copy tables that nobody else copies, too."""
    from cdc_assets.operations import merging, running

    file = ConfigurationFile(path_of(ctx))
    config = streamed(ctx)
    wanted = selected(config, tables)
    if follow:
        if as_json:
            raise click.UsageError("--json: with --follow it goes on, and has no result.", ctx)
        from cdc_assets.materializer.workers.follower import Listener
        from cdc_assets.operations.copying_beside import copying_beside

        with (
            file.until_changed(config, reading(ctx, tables)) as stop,
            services(config),
            running.Spark(config) as spark,
            copying_beside(config, wanted, spark.session, lambda done: note(done.sentence)),
        ):
            merging.follow(config, wanted, stop, Listener(note), spark.session)
        return
    done = Outcomes(wanted, as_json=as_json, copies=False)
    with opened(config) as pipeline, running.Spark(config) as spark, done:
        merging.materialize(pipeline, spark, wanted, done.merged)


@cli.command(
    examples=(
        "cdc-assets sync",
        "cdc-assets sync --table public.orders",
    ),
    json_form=TABLE_FORM,
)
@tables_option
@json_option
@click.pass_context
def sync(ctx: click.Context, tables: tuple[str, ...], as_json: bool) -> None:
    """Snapshot, flush to now, materialize: the lake then equals the source as of the start."""
    from cdc_assets.operations import whole as commands

    config = config_of(ctx)
    wanted = selected(config, tables)
    done = Outcomes(wanted, as_json=as_json)
    with opened(config) as pipeline, done:
        commands.sync(pipeline, wanted, done.copied, note, done.merged)


@cli.command(
    examples=(
        "cdc-assets maintain --json",
        "cdc-assets maintain --table public.orders",
    ),
    json_form="a list with an object a table, and its files and bytes by what was done to them",
)
@tables_option
@json_option
@wide_option
@click.pass_context
def maintain(ctx: click.Context, tables: tuple[str, ...], as_json: bool, wide: bool) -> None:
    """Compact tables, expire snapshots, remove orphans and staged files that nobody needs."""
    from cdc_assets.operations import running
    from cdc_assets.operations import whole as commands

    config = config_of(ctx)
    wanted = selected(config, tables)
    done: list[Maintained] = []
    try:
        with opened(config) as pipeline, running.Spark(config) as spark:
            commands.maintain(pipeline, spark, wanted, done.append)
    finally:
        if as_json:
            echo([found.to_json() for found in done])
        elif done:
            show_maintained(done, wide=wide)


@cli.command(examples=("cdc-assets demo --changes 2000",))
@click.option("--changes", default=20_000, show_default=True, help="Live changes to replicate.")
def demo(changes: int) -> None:
    """The whole thing on an embedded Postgres with live traffic; finite, ends with verify."""
    from cdc_assets.dagster.demo import run_demo

    sys.exit(0 if run_demo(changes, stderr) else 1)
