"""The command line: thin, and the same for people and scripts.

Exit codes: 0 when done, 1 when the answer is "no", 2 for a usage or configuration error, 130 when
interrupted. Results go to stdout, messages and progress to stderr. Spark takes seconds to import,
so only the commands that need it do.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cdc_assets.cli.pasted import called_by
from cdc_assets.cli.terminal import labelled
from cdc_assets.config.addresses import selected, services
from cdc_assets.config.reading.documents import value_of
from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.errors import CdcError, ConfigurationError
from cdc_assets.messages.texts import command
from cdc_assets.pipeline import Pipeline
from cdc_assets.process.home import home
from cdc_assets.process.traces import log_to_stderr, noted
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets.setup.discovery import discovered

_CONFIG = "cdc_assets.config"
_DEFAULT, _NAMED = "cdc_assets.yaml", 5
_INTERRUPTED = 130  # as shells have it, of SIGINT
_PLACES = ("*/defs/*/defs.yaml", "src/*/defs/*/defs.yaml")  # of a Dagster project
_PLAIN = re.compile(r"\A[a-z0-9_.]+\Z")  # of a name that no shell needs quotes for


def table_names(ctx: click.Context, _: click.Parameter, begun: str) -> list[str]:
    """Tables of the file as they are written there: a shell waits, so nobody is asked for more."""
    try:
        data = value_of(Path(ctx.find_root().params.get("path") or _DEFAULT))
        tables = data.get("attributes", data)["tables"]
        names = [table.get("name") if isinstance(table, dict) else table for table in tables]
    except (CdcError, LookupError, TypeError, AttributeError):
        return []  # the command itself says what is wrong
    plain = [name for name in names if isinstance(name, str) and _PLAIN.match(name)]
    return [name for name in plain if name.startswith(begun)]


tables_option = click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="S.T",
    help="Only this table, as SQL spells it.",
    shell_complete=table_names,
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
wide_option = click.option("--wide", is_flag=True, help="Wrap nothing in a narrow terminal.")


class _Command(click.Command):
    """A command whose help ends with the form of its JSON, and with examples."""

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), json_form: str = "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.examples, self.json_form = examples, json_form

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)  # they are taken out one by one
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            for option in ctx.find_root().command.params:
                if isinstance(option, click.Option) and error.option_name in option.opts:
                    own = _before(option, error.option_name, given)
                    said = command(*own, *ctx.command_path.split()[1:])
                    raise click.UsageError(
                        f"{error.option_name} goes before the command: {said}", ctx
                    ) from error
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.json_form:
            with formatter.section("With --json"):
                formatter.write_text(f"It prints {self.json_form}.")
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {example}\n" for example in self.examples))
        super().format_epilog(ctx, formatter)


def _before(option: click.Option, name: str, given: Sequence[str]) -> list[str]:
    """The option as it is to be given, with its value if there was one."""
    if option.is_flag:
        return [name]
    values = [arg.partition("=")[2] for arg in given if arg.startswith(f"{name}=")]
    if name in given:
        values += given[given.index(name) + 1 :]
    return [name, next(iter(values), option.metavar or "VALUE")]


class _Group(click.Group):
    command_class = _Command


class _Commands(_Group):
    """Turns every error into one message and an exit code."""

    group_class = _Group

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click ends quietly where nobody reads any more
        except KeyboardInterrupt:
            labelled("interrupted:", "bold", "what was done stays.")
            sys.exit(_INTERRUPTED)
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
@click.option(
    "--config",
    "path",
    metavar="FILE",
    type=click.Path(),
    envvar="CDC_ASSETS_CONFIG",
    show_envvar=True,
    help=f"The source's YAML or JSON file; {_DEFAULT} if there is one here.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log what happens inside.")
@click.version_option(package_name="cdc-assets")
@click.pass_context
def cli(ctx: click.Context, path: str | None, verbose: bool) -> None:
    """Replicate Postgres tables into Apache Iceberg."""
    log_to_stderr(logging.INFO if verbose else logging.WARNING)
    threading.excepthook = _thread_ended
    ctx.obj = path
    was_given = ctx.get_parameter_source("path") is ParameterSource.COMMANDLINE
    called_by(path if was_given else None, cli.commands)


def path_of(ctx: click.Context) -> Path:
    """The file that names the source; raises ConfigurationError if there is none."""
    path = ctx.obj or (_DEFAULT if Path(_DEFAULT).is_file() else None)
    if path is None:
        here = [path for places in _PLACES for path in sorted(Path().glob(places))][:_NAMED]
        known = f"Here are: {', '.join(map(str, here))}." if here else "cdc-assets init makes one."
        raise ConfigurationError(f"--config FILE is missing: it names the source. {known}")
    return Path(path)


def config_of(ctx: click.Context) -> SourceConfig:
    path = path_of(ctx)
    home()  # raises where others may write: no command works there
    ctx.meta[_CONFIG] = config = load_config(path)
    ctx.meta[_CONFIG] = config = discovered(config)
    return config


def streamed(ctx: click.Context) -> SourceConfig:
    """The configuration of a source that is streamed, not only copied."""
    return _streams(config_of(ctx))


def _streams(config: SourceConfig) -> SourceConfig:
    if not config.streams:
        raise ConfigurationError(
            "snapshot.mode is snapshot_only: nothing is streamed.",
            "Use snapshot, or set snapshot.mode: initial.",
        )
    return config


def reading(ctx: click.Context, tables: Sequence[str] = ()) -> Callable[[], SourceConfig]:
    """What reads the file anew, for a command that streams, with these tables of ``--table``."""
    path = path_of(ctx)

    def read() -> SourceConfig:
        config = _streams(discovered(load_config(path)))
        selected(config, tables)
        return config

    return read


@contextmanager
def opened(config: SourceConfig) -> Iterator[Pipeline]:
    with services(config), Pipeline.open(config) as pipeline:
        yield pipeline
