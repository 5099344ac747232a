"""The commands before there is a source, and those that help to write its configuration."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click
import psycopg
from psycopg.conninfo import conninfo_to_dict

from cdc_assets.cli.group import cli, config_of, json_option, wide_option
from cdc_assets.cli.outcomes import echo
from cdc_assets.cli.terminal import labelled, note, say, show_findings, show_tables
from cdc_assets.config.addresses import services, source_dsn
from cdc_assets.config.source import SourceConfig, load_config, parse_config
from cdc_assets.errors import CdcError, ConfigurationError, EnvironmentProblem, first_line
from cdc_assets.postgres.names import TableId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdc_assets.postgres.session.connect import Connection
    from cdc_assets.setup.choice import Choice
    from cdc_assets.setup.files import Files
    from cdc_assets.setup.inventory import Listed
    from cdc_assets.setup.roles import Role, Roles

_BETWEEN = re.compile(r'[,\s]+(?=(?:[^"]*"[^"]*")*[^"]*\Z)')
_SHOWN = 40
_ANY = TableId("public", "any")


@cli.command(
    examples=(
        "cdc-assets init",
        "APP_DSN=postgresql://… cdc-assets init app --yes",
        "cdc-assets init app --table 'public.*' --exclude 'public.tmp_*'",
    )
)
@click.argument("name", required=False)
@click.option("--address", metavar="DSN", help="The source's, if not in NAME_DSN.")
@click.option("--table", "wanted", multiple=True, metavar="S.T", help="A table, or as in public.*")
@click.option("--exclude", multiple=True, metavar="S.T", help="Not these.")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The YAML file; the SQL is written beside it.",
)
@click.option(
    "--own-roles/--same-role",
    default=None,
    help="Make roles of their own, that only read and stream, or use the address's.",
)
@click.option("-y", "--yes", is_flag=True, help="Ask nothing: every table that can be replicated.")
@click.pass_context
def init(
    ctx: click.Context,
    name: str | None,
    address: str | None,
    wanted: tuple[str, ...],
    exclude: tuple[str, ...],
    output: Path | None,
    own_roles: bool | None,
    yes: bool,
) -> None:
    """Look at a database, and write the configuration and the administrator's SQL.

    It asks for what it isn't given; --yes asks nothing.
    """
    from cdc_assets.postgres.session.connect import LOCK_SECONDS, connect
    from cdc_assets.setup import files, inventory, roles
    from cdc_assets.setup.choice import called

    if name is not None:
        _trial(name, "postgresql://localhost")  # before variables have its name
    asks = not yes and sys.stdin.isatty()
    if not asks and not yes:
        note("Nothing can be asked here, which isn't a terminal: it goes on as with --yes.")
    dsn = _address(name, address, asks=asks)
    name = name or _name_of(dsn)
    _trial(name, dsn)  # whether they can be read at all, before anybody waits
    written = files.files_of(name, output, Path())
    for path in (written.yaml, written.sql):
        if path.exists():
            raise ConfigurationError(
                f"{path} is there already.", "Remove it, or give another NAME or --output."
            )
    try:
        with connect(dsn, application_name="cdc_assets init", lock_seconds=LOCK_SECONDS) as source:
            found = inventory.inventory(source, _trial(name, dsn))
            labelled("source:", "bold", f"{source.info.dbname} at {_place(source)}")
            largest = sorted(found, key=lambda t: -t.bytes)[:_SHOWN]
            show_tables([t for t in found if t in largest], stderr=True)
            if len(found) > _SHOWN:
                note(f"These are the largest {_SHOWN} of {len(found):,} tables.")
            tables = _chosen(found, wanted, exclude, asks=asks)
            for table, other in (names := called(tables)).items():
                note(f"{table} is {other} in the lake, as another table has its name.")
            config = _trial(name, dsn, tables, names)
            role = roles.role_of(source, tables)
            who = _roles(name, role, own_roles, asks=asks)
            restarts = _write(source, dsn, config, who, written)
    except psycopg.OperationalError as error:
        raise EnvironmentProblem(
            f"the source can't be reached: {first_line(error)}",
            "Start it, mend the network, or correct the address, with its role and password.",
        ) from error
    _finish(ctx, dsn, name, who, written, administers=role.administers, restarts=restarts)


def _address(name: str | None, given: str | None, *, asks: bool) -> str:
    from cdc_assets.setup.addresses import has_password

    variable = f"{name.upper()}_DSN" if name else None
    if given is not None:
        if has_password(given):
            note(
                "The address has a password in it, which others on this machine can see in the list"
                " of processes: an environment variable is safer."
            )
        return given
    if variable is not None and variable in os.environ:
        return os.environ[variable]
    if asks:
        return str(
            click.prompt(
                "Address (postgresql://user:password@host:5432/database), not shown",
                hide_input=True,
                err=True,
            )
        )
    raise ConfigurationError(
        "the source's address is missing:",
        f"export {variable or 'NAME_DSN (and say: cdc-assets init NAME)'}, or give --address.",
    )


def _name_of(dsn: str) -> str:
    """A source's name, by the database's."""
    try:
        database = str(conninfo_to_dict(dsn).get("dbname") or "app")
    except psycopg.Error:
        return "app"
    word = re.sub(r"[^a-z0-9_]+", "_", database.lower()).strip("_")[:40]
    return word if re.match("[a-z]", word) else f"db_{word}"[:40]


def _trial(
    name: str,
    dsn: str,
    tables: Sequence[TableId] = (_ANY,),
    called: Mapping[TableId, str] = MappingProxyType({}),
) -> SourceConfig:
    entries = [
        {"name": str(table), "as": called[table]} if table in called else str(table)
        for table in tables
    ]
    data = {"name": name, "postgres": {"dsn": dsn}, "tables": entries}
    return parse_config(data, "cdc-assets init", expanded=True)


def _place(source: Connection) -> str:
    version = source.info.parameter_status("server_version")
    return f"{source.info.host or 'a local socket'}:{source.info.port}, Postgres {version}"


def _chosen(
    found: Sequence[Listed], wanted: Sequence[str], exclude: Sequence[str], *, asks: bool
) -> Sequence[TableId]:
    from cdc_assets.setup.choice import choose, free

    choice: Choice | None = None
    while not wanted and asks and choice is None:
        every = f"all {len(free(found)):,} that nothing stands in the way of"
        question = "Tables, by names or patterns like public.*"
        answer = str(click.prompt(question, default=every, err=True))
        names = [name for name in _BETWEEN.split(answer) if name]
        try:
            choice = choose(found, () if answer == every else names, exclude)
        except CdcError as problem:
            note(str(problem))
    choice = choice or choose(found, wanted, exclude)
    if choice.left:
        note(
            f"left out, as something is in the way: {', '.join(map(str, choice.left))}. Where it is"
            " the replica identity, --table S.T takes the table, with the SQL that mends it."
        )
    return choice.tables


def _roles(name: str, role: Role, own: bool | None, *, asks: bool) -> Roles:
    from cdc_assets.setup.addresses import user_of
    from cdc_assets.setup.roles import Roles

    streams = os.environ.get(f"{name.upper()}_STREAM_DSN")
    if own is None:
        own = bool(role.why_not)
        if own and asks:
            own = click.confirm(
                f"{role.why_not}. Make roles that only read, and only stream?", True, err=True
            )
    reads = f"cdc_{name}" if own else role.name
    if streams is not None:
        return Roles(reads, user_of(streams) or role.name)
    if not own and role.replicates:
        return Roles(reads, reads, may_replicate=True, superuser=role.superuser)
    return Roles(reads, f"cdc_{name}_stream")


def _write(source: Connection, dsn: str, config: SourceConfig, who: Roles, written: Files) -> bool:
    """The two files; whether the server has to be started anew before anything is streamed."""
    from cdc_assets.readiness.source.server import preflight
    from cdc_assets.setup import files, roles, statements

    schema = None
    if roles.owner_of(source, config.state.schema_) not in (None, who.reads):
        schema = f"{config.state.schema_}_{config.name}"
        state = config.state.model_copy(update={"schema_": schema})
        config = config.model_copy(update={"state": state})
    server = preflight(source, config, None, dsn, tables=(), record=False)
    sql = statements.prepared(source, config, who, server)
    tables = [table.id for table in config.tables]
    text = files.text_of(
        config.name,
        tables,
        component=written.component,
        apart=who.apart,
        schema=schema,
        called={table.id: table.as_ for table in config.tables if table.as_ is not None},
    )
    if sql:
        files.write(written.sql, sql)
        say(f"wrote {written.sql}")
    files.write(written.yaml, text)
    say(f"wrote {written.yaml}: {len(tables):,} tables")
    return any(finding.code == "wal_level" for finding in server)


def _finish(
    ctx: click.Context,
    dsn: str,
    name: str,
    who: Roles,
    written: Files,
    *,
    administers: bool,
    restarts: bool,
) -> None:
    """``check``, if all is there that it needs; else what is to be done before."""
    from cdc_assets.setup.addresses import of_role, user_of

    reads, streams = f"{name.upper()}_DSN", f"{name.upper()}_STREAM_DSN"
    known = os.environ.get(reads) == dsn
    unset = {reads: who.reads} if not known or user_of(dsn) != who.reads else {}
    if who.apart and user_of(os.environ.get(streams, "")) != who.streams:
        unset[streams] = who.streams
    exports = [
        f"export {variable}={shlex.quote(of_role(dsn, role))}" for variable, role in unset.items()
    ]
    if written.sql.exists():
        ours = administers and known and user_of(dsn) != who.reads
        admin = f'"${reads}"' if ours else "ADMIN_ADDRESS"
        say("next:")
        say(f"  psql {admin} -f {shlex.quote(str(written.sql))}   # as an administrator")
        if restarts:
            say("  restart the server: it takes wal_level only then")
        for export in exports:
            say(f"  {export}")
        say(f"  cdc-assets --config {shlex.quote(str(written.yaml))} check")
        return
    from cdc_assets.readiness.surroundings import review

    os.environ[reads] = dsn
    ctx.obj = str(written.yaml)
    config = load_config(written.yaml)
    findings = review(config)
    show_findings(findings, len(config.tables))
    for export in exports:
        say(f"next: {export}")
    sys.exit(1 if any(finding.severity == "error" for finding in findings) else 0)


@cli.command(
    examples=(
        "cdc-assets tables --wide",
        "cdc-assets tables --json",
    ),
    json_form="a list with an object a table: table, rows, bytes, key, obstacles, configured, …",
)
@json_option
@wide_option
@click.pass_context
def tables(ctx: click.Context, as_json: bool, wide: bool) -> None:
    """List the database's tables, and what keeps one from being replicated."""
    from cdc_assets.postgres.session.connect import LOCK_SECONDS, connect
    from cdc_assets.setup.inventory import inventory

    config = config_of(ctx)
    with (
        services(config),
        connect(
            source_dsn(config), application_name="cdc_assets tables", lock_seconds=LOCK_SECONDS
        ) as source,
    ):
        found = inventory(source, config)
    if as_json:
        echo([table.to_json() for table in found])
    else:
        show_tables(found, wide=wide)


@cli.group(name="config")
def config_group() -> None:
    """What the configuration may say."""


@config_group.command(examples=("cdc-assets config schema > cdc_assets.schema.json",))
def schema() -> None:
    """Print the JSON schema of the configuration, for editors."""
    from cdc_assets.config.schema import file_schema

    click.echo(json.dumps(file_schema(), indent=2, ensure_ascii=False))


@config_group.command(examples=("cdc-assets config reference > configuration.md",))
def reference() -> None:
    """Print every key with its default, as Markdown."""
    from cdc_assets.config.reference import page

    click.echo(page(), nl=False)
