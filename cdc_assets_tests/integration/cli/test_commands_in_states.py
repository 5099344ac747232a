"""Every command in every state that a source may be in: a message that names what is wrong.

Never a Python traceback, never a Java stack trace, and an exit code that scripts know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from cdc_assets.cli.main import cli
from cdc_assets.config.source import parse_config
from cdc_assets.flusher.progress import Probe, Progress, report
from cdc_assets.lake.catalog import catalog
from cdc_assets.log.asked.wishes import paused
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.conftest import NewDatabase

COMMANDS = (
    ("status",),
    ("status", "--json"),
    ("check",),
    ("check", "--json"),
    ("materialize",),
    ("verify",),
    ("verify", "--json"),
    ("maintain",),
    ("pause",),
    ("resume",),
    ("alert-test",),
    ("flush", "--until", "current"),
    ("snapshot",),
    ("sync",),
    ("resync", "public.t"),
    ("drop-source", "--yes", "states"),
)
# They start a flusher of their own where they get so far, which takes seconds.
COSTLY = {"snapshot", "sync", "resync"}
# Nobody listens there: whatever it is the address of can't be reached, which is said at once.
NOWHERE = "postgresql://nobody:hush@127.0.0.1:1/none"
TRACES = re.compile(r"Traceback|File \"|\bat (org|java|scala|io)\.|JVM stacktrace|<_\w+ of RPC")


def _nothing(_source: psycopg.Connection[Any]) -> None:
    """The state is one of the configuration's."""


@dataclass(frozen=True)
class State:
    """A source with a table ``t``: what is other than usual, and the words that name it."""

    named: str
    settings: dict[str, Any] = field(default_factory=dict)
    make: Callable[[psycopg.Connection[Any]], None] = _nothing
    begun: bool = True
    """A flusher has registered the table."""
    costly: bool = False
    """Whether the costly commands are tried, too."""


def _sql(*statements: str) -> Callable[[psycopg.Connection[Any]], None]:
    def make(source: psycopg.Connection[Any]) -> None:
        for statement in statements:
            source.execute(statement.encode())

    return make


def _refused(source: psycopg.Connection[Any]) -> None:
    """A flusher that has begun, and staged nothing before it was refused, left its report."""
    source.execute("delete from _pg2iceberg.flushed_lsn")
    left = report("process 1", Progress(), Probe(), 0.0)
    source.execute(
        "insert into _pg2iceberg.flusher_reports (source, report) values ('states', %s)",
        (json.dumps(left.to_json()),),
    )


_PARKED = """
update _pg2iceberg.tables set state = 'parked', reason = 'its key is gone: say resync public.t'
"""
# What a command that is ready to work meets here: no Spark, or nothing to do yet.
_LATER = "Spark Connect|public.t: its copy"
STATES = {
    "before the first start": State(_LATER, begun=False, costly=True),
    "the first start was refused": State(_LATER, make=_refused),
    "the source is down": State("postgres.dsn", {"postgres": {"dsn": NOWHERE}}, costly=True),
    "coordination is down": State(
        "state.postgres_url", {"state": {"postgres_url": NOWHERE}}, costly=True
    ),
    "coordination is empty": State(
        f"schema|{_LATER}", make=_sql("create schema _pg2iceberg"), begun=False
    ),
    "coordination is half made": State(
        "_pg2iceberg|Spark Connect", make=_sql("drop table _pg2iceberg.tables cascade"), costly=True
    ),
    "coordination is newer": State(
        "version 999", make=_sql("insert into _pg2iceberg.schema_version values (999)"), costly=True
    ),
    "the catalog is down": State(
        f"catalog|{_LATER}", {"lake": {"catalog": {"type": "sql", "uri": NOWHERE}}}
    ),
    "nobody may write at the staging place": State(
        f"/proc/staging|{_LATER}", {"staging": {"uri": "file:///proc/staging"}}
    ),
    "a table is parked": State("public.t: |Spark Connect", make=_sql(_PARKED), costly=True),
    "a table was dropped": State("public.t: |Spark Connect", make=_sql("drop table t")),
}


@pytest.mark.parametrize("name", STATES)
def test_no_command_ends_in_a_trace(
    postgres_dsn: NewDatabase, tmp_home: Path, tmp_path: Path, name: str
) -> None:
    state, dsn = STATES[name], postgres_dsn()
    settings = {
        "name": "states",
        "postgres": {"dsn": dsn},
        "tables": [{"name": "public.t"}],
        "spark": {"remote": "sc://127.0.0.1:1"},
    }
    file = tmp_path / "states.json"
    file.write_text(json.dumps(settings | state.settings))
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute("create table t (id int primary key)")
        if state.begun:
            with Pipeline.open(parse_config(settings, "test")) as pipeline:
                pins = Pins(pipeline)
                pins.prepare()
                pins.close()
        state.make(source)
    told = []
    for command in COMMANDS:
        if command[0] in COSTLY and not state.costly:
            continue
        done = CliRunner().invoke(cli, ["--config", str(file), *command], prog_name="cdc-assets")
        said = f"$ {' '.join(command)}: {done.exit_code}\n{done.output}"
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            told.append(f"{said}\n{done.exception!r}")
        elif TRACES.search(done.output) or done.exit_code not in (0, 1, 2):
            told.append(said)
        elif done.exit_code and not re.search(state.named, done.output):
            told.append(f"{said}\ndoesn't name {state.named}")
        elif "hush" in done.output:
            told.append(f"{said}\ntells a password")
    catalog._open.cache_clear()
    assert not told, "\n\n".join(told)


def test_a_table_is_paused_before_it_is_registered(
    postgres_dsn: NewDatabase, tmp_home: Path, tmp_path: Path
) -> None:
    dsn = postgres_dsn()
    settings = {"name": "s", "postgres": {"dsn": dsn}, "tables": [{"name": "public.t"}]}
    config = parse_config(settings, "test")
    file = tmp_path / "s.json"
    file.write_text(config.dump())
    done = CliRunner().invoke(cli, ["--config", str(file), "pause", "public.t"])
    assert (done.exit_code, done.output[:22]) == (0, "public.t: paused since")
    with psycopg.connect(dsn, autocommit=True) as source:
        source.execute("create table t (id int primary key)")
    with Pipeline.open(config) as pipeline:
        pins = Pins(pipeline)
        pins.prepare()
        pins.close()
        [row] = pipeline.store.tables()
        assert row.oid
        assert list(paused(pipeline.store)) == [row.table]


def test_what_has_nothing_to_do_says_so(
    postgres_dsn: NewDatabase, tmp_home: Path, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"{{name: s, postgres: {{dsn: '{postgres_dsn()}'}}, tables: [public.t]}}")

    def said(*words: str) -> tuple[str, str]:
        done = CliRunner().invoke(cli, ["--config", str(file), *words])
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    assert said("resume", "t") == ("public.t: was not paused\n", "")
    assert said("resume") == ("source s: was not paused\n", "")
    said("pause", "t")
    said("pause")
    assert said("resume", "t")[0].startswith("public.t: resumed\nsource s: paused since ")
    assert said("resume") == ("source s: resumed\n", "")
    nobody = "Nobody has asked for a backfill of source s yet.\n"
    assert said("backfill", "--list") == ("", nobody)
    assert json.loads(said("backfill", "--list", "--json")[0]) == []
