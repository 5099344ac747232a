"""The command line: thin, and the same for people and scripts.

Exit codes: 0 when done, 1 when the answer is "no", 2 for a usage or configuration error. Results go
to stdout, messages and progress to stderr. Spark takes seconds to import, so only the commands that
need it do.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cdc_assets.config import SourceConfig, home, load_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.foreign_errors import explained
from cdc_assets.pipeline import Pipeline, selected, services
from cdc_assets.process import end_within
from cdc_assets.terminal import (
    CopyBar,
    labelled,
    note,
    say,
    show_compared,
    show_drained,
    show_findings,
    show_health,
    show_maintained,
    show_paused,
    stderr,
)
from cdc_assets.traces import log_to_stderr, noted

if TYPE_CHECKING:
    from cdc_assets.maintenance.run import Maintained

_tables = click.option(
    "--table", "tables", multiple=True, metavar="S.T", help="Only this table, as SQL spells it."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


_CONFIG = "cdc_assets.config"


class _Commands(click.Group):
    """Turns every error into one message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, a person gets a sentence
            problem = explained(error, ctx.meta.get(_CONFIG))
            _fail(str(problem), 2 if isinstance(problem, ConfigurationError) else 1)


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "?"
    error = args.exc_value
    if error is not None:
        logging.getLogger(__name__).error("thread %s ended: %s", name, noted(error))


def _fail(message: str, code: int) -> None:
    labelled("error:", "bold red", message)
    sys.exit(code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", metavar="FILE", help="The source's YAML or JSON file.")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens inside.")
@click.version_option(package_name="cdc-assets")
@click.pass_context
def cli(ctx: click.Context, path: str | None, verbose: bool) -> None:
    """Replicate Postgres tables into Apache Iceberg."""
    log_to_stderr(logging.INFO if verbose else logging.WARNING)
    threading.excepthook = _thread_ended
    ctx.obj = path


def _config(ctx: click.Context) -> SourceConfig:
    if ctx.obj is None:
        raise ConfigurationError("--config FILE is missing:", "it names the source to work on.")
    ctx.meta[_CONFIG] = config = load_config(ctx.obj)
    home()  # whatever the command does: where others may write, nothing is done
    return config


def _following(ctx: click.Context) -> SourceConfig:
    """The configuration of a source that is followed, not only copied."""
    config = _config(ctx)
    if config.snapshot.mode == "snapshot_only":
        raise ConfigurationError(
            "snapshot.mode is snapshot_only: nothing is streamed.",
            "Use snapshot, or set snapshot.mode: initial.",
        )
    return config


@contextmanager
def _pipeline(config: SourceConfig) -> Iterator[Pipeline]:
    with services(config), Pipeline.open(config) as pipeline:
        yield pipeline


@cli.command()
@_json
@click.pass_context
def check(ctx: click.Context, as_json: bool) -> None:
    """Look whether the source is ready, and all that it needs; changes nothing."""
    from cdc_assets import readiness

    config = _config(ctx)
    with services(config):
        findings = readiness.review(config)
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings], indent=2))
    else:
        show_findings(findings)
    sys.exit(1 if any(finding.severity == "error" for finding in findings) else 0)


@cli.command()
@_tables
@click.pass_context
def snapshot(ctx: click.Context, tables: tuple[str, ...]) -> None:
    """Create what is missing, copy what is missing, resume what was interrupted."""
    from cdc_assets import commands

    config = _config(ctx)
    wanted = selected(config, tables)
    with _pipeline(config) as pipeline, commands.Spark(config) as spark, CopyBar() as bar:
        commands.snapshot(pipeline, spark, wanted, bar)


def _until_told(told: Callable[[], None] = lambda: None) -> threading.Event:
    """Set once the process is told to end; ``told`` is called first, once."""
    stop = threading.Event()

    def end(*_: object) -> None:
        if not stop.is_set():
            told()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


@cli.command()
@click.argument("tables", nargs=-1, metavar="[S.T]...")
@click.option("--all", "everything", is_flag=True, help="Every table of the source.")
@click.pass_context
def resync(ctx: click.Context, tables: tuple[str, ...], everything: bool) -> None:
    """Copy tables anew while the others flow; readers see the old rows until it is complete."""
    from cdc_assets import commands

    config = _config(ctx)
    if everything == bool(tables):
        raise ConfigurationError("name the tables to copy anew (S.T), or give --all.")
    wanted = selected(config, tables)
    with _pipeline(config) as pipeline, commands.Spark(config) as spark, CopyBar() as bar:
        commands.resync(pipeline, spark, wanted, bar)


@cli.command(name="alert-test")
@click.pass_context
def alert_test(ctx: click.Context) -> None:
    """Send a message to every sink of alerts:, to see whether it arrives."""
    from cdc_assets.alerts.sinks import try_sinks

    problems = try_sinks(_config(ctx))
    for sink, problem in problems.items():
        say(f"{sink}: {problem or 'sent'}")
    sys.exit(1 if any(problems.values()) else 0)


@cli.command()
@click.argument("tables", nargs=-1, metavar="[S.T]...")
@click.pass_context
def pause(ctx: click.Context, tables: tuple[str, ...]) -> None:
    """Apply nothing more to these tables, or to the whole source; staging goes on."""
    from cdc_assets.log import pauses

    config = _config(ctx)
    wanted = selected(config, tables) if tables else [None]
    with _pipeline(config) as pipeline:
        for table in wanted:
            pauses.pause(pipeline.store, table)
        show_paused(pipeline.store)


@cli.command()
@click.argument("tables", nargs=-1, metavar="[S.T]...")
@click.pass_context
def resume(ctx: click.Context, tables: tuple[str, ...]) -> None:
    """End the pause of these tables, or the source's; take up a dropped source again."""
    from cdc_assets import commands
    from cdc_assets.log import pauses

    config = _config(ctx)
    with _pipeline(config) as pipeline:
        for table in selected(config, tables) if tables else []:
            pauses.resume(pipeline.store, table)
        if not tables and commands.resume(pipeline):
            note("The source was dropped: every table will be copied anew.")
        show_paused(pipeline.store)


@cli.command(name="drop-source")
@click.option("--yes", metavar="NAME", help="The source's name, so that it is the right one.")
@click.pass_context
def drop_source(ctx: click.Context, yes: str | None) -> None:
    """Give the source up: slot and publication are removed, the lake tables stay."""
    from cdc_assets.postgres.drop import drop_source as drop

    config = _config(ctx)
    if yes != config.name:
        raise ConfigurationError(
            f"this removes the slot {config.slot} and the publication {config.publication}.",
            f"Say --yes {config.name} if that is meant.",
        )
    with _pipeline(config) as pipeline:
        done = drop(pipeline)
    say(f"slot {config.slot}: {'removed' if done.slot else 'there was none'}")
    gone = "removed" if done.publication else "there was none"
    say(f"publication {config.publication}: {gone}")


@cli.command()
@click.option("--until", metavar="current|LSN", help="End once the log has reached it.")
@click.pass_context
def flush(ctx: click.Context, until: str | None) -> None:
    """Stream the slot and stage its changes; for ever without --until."""
    from cdc_assets.flusher.main import run
    from cdc_assets.flusher.reach import flush_target, reach

    config = _following(ctx)
    stop = _until_told(end_within)
    if until is None:
        with services(config):
            run(config, stop=stop)
        return
    with _pipeline(config) as pipeline:
        try:
            target = flush_target(pipeline, until)
        except ValueError as error:
            raise ConfigurationError(f"--until: {error}.") from error
        reach(pipeline, target, stop)


@cli.command()
@_tables
@click.option("--follow", is_flag=True, help="Go on for ever; share the tables with other workers.")
@click.pass_context
def materialize(ctx: click.Context, tables: tuple[str, ...], follow: bool) -> None:
    """Apply the log to the lake tables."""
    from cdc_assets import commands

    config = _following(ctx)
    wanted = selected(config, tables)
    if follow:
        with services(config):
            commands.follow(config, wanted, _until_told(), note)
        return
    with _pipeline(config) as pipeline, commands.Spark(config) as spark:
        for done in commands.materialize(pipeline, spark, wanted):
            show_drained(done)


@cli.command()
@_tables
@click.pass_context
def sync(ctx: click.Context, tables: tuple[str, ...]) -> None:
    """Snapshot, flush to now, materialize: the lake then equals the source as of the start."""
    from cdc_assets import commands

    config = _config(ctx)
    wanted = selected(config, tables)
    with _pipeline(config) as pipeline, CopyBar() as bar:
        for done in commands.sync(pipeline, wanted, bar, note):
            show_drained(done)


@cli.command()
@_tables
@_json
@click.option("--show-keys", is_flag=True, help="Print the keys (or rows) that differ, too.")
@click.pass_context
def verify(ctx: click.Context, tables: tuple[str, ...], as_json: bool, show_keys: bool) -> None:
    """Compare every row of source and lake, each table at one LSN; 1 unless all are equal."""
    from cdc_assets import commands

    config = _config(ctx)
    wanted = selected(config, tables)
    with _pipeline(config) as pipeline:
        found = commands.verify_tables(pipeline, wanted, note, show_keys=show_keys)
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


@cli.command()
@_tables
@_json
@click.pass_context
def maintain(ctx: click.Context, tables: tuple[str, ...], as_json: bool) -> None:
    """Compact tables, expire snapshots, remove orphans and staged files that nobody needs."""
    from cdc_assets import commands

    config = _config(ctx)
    wanted = selected(config, tables)
    done: list[Maintained] = []
    try:
        with _pipeline(config) as pipeline, commands.Spark(config) as spark:
            commands.maintain(pipeline, spark, wanted, done.append)
    finally:
        if as_json:
            click.echo(json.dumps([found.to_json() for found in done], indent=2))
        elif done:
            show_maintained(done)


@cli.command(name="status")
@_json
@click.pass_context
def status_command(ctx: click.Context, as_json: bool) -> None:
    """Say where slot, flusher and every table stand."""
    from cdc_assets.health import report
    from cdc_assets.status import collect

    config = _config(ctx)
    with _pipeline(config) as pipeline:
        if as_json:
            click.echo(json.dumps(collect(pipeline).to_json(), indent=2))
            return
        health = report.look(pipeline, sample=False)
    show_health(health)


@cli.command()
@click.option("--changes", default=20_000, show_default=True, help="Live changes to replicate.")
def demo(changes: int) -> None:
    """The whole thing on an embedded Postgres with live traffic; finite, ends with verify."""
    from cdc_assets.demo import run_demo

    sys.exit(0 if run_demo(changes, stderr) else 1)


def main() -> None:
    """The entry point of ``cdc-assets``."""
    cli(prog_name="cdc-assets")


if __name__ == "__main__":
    main()
