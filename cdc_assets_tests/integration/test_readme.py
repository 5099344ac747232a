"""What the README has a newcomer paste is enough, word for word, for the role that it makes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from cdc_assets.cli.main import cli
from cdc_assets.config.snapshot import SnapshotConfig
from cdc_assets.config.source import SourceConfig, load_config
from cdc_assets.config.tables import TableConfig
from cdc_assets.demo.schema import connection_environment
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.errors import NotReady
from cdc_assets.flusher.flusher import run
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.messages.findings import Finding
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness import surroundings as readiness
from cdc_assets.readiness.flushing import refuse_to_flush

README = Path(__file__).parents[2] / "README.md"
TABLES = """
create table public.orders (id bigint primary key, body text);
create table public."My.Table" (a int, b text, primary key (a, b));
insert into orders select g, 'order ' || g from generate_series(1, 300) g;
insert into "My.Table" select g, 'b' from generate_series(1, 300) g;
"""
CHANGES = """
update orders set body = 'changed' where id % 3 = 0;
delete from "My.Table" where a % 5 = 0;
insert into orders values (1000, null);
"""


def block(language: str) -> str:
    """The only block of that language below "Your own Postgres"."""
    section = README.read_text().split("## Your own Postgres", 1)[1].split("\n## ", 1)[0]
    (found,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(found)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """The database ``app`` of the README, whose tables an ordinary role owns."""

    server: EmbeddedPostgres
    admin: str
    owner: str
    folder: Path

    def paste(self, statements: str) -> None:
        """Into psql, as an administrator."""
        done = subprocess.run(
            [str(self.server.program("psql")), "-X", "-q", "-v", "ON_ERROR_STOP=1"],
            env=connection_environment(self.admin),
            input=statements,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def config(self, monkeypatch: pytest.MonkeyPatch) -> SourceConfig:
        for name, role in (("APP_DSN", "cdc"), ("APP_STREAM_DSN", "cdc_stream")):
            monkeypatch.setenv(name, make_conninfo(self.admin, user=role, password="…"))
        file = self.folder / "defs.yaml"
        file.write_text(block("yaml"))
        return load_config(file)


@pytest.fixture
def newcomer(postgres: EmbeddedPostgres, tmp_home: Path) -> Iterator[Newcomer]:
    with newcomer_at(postgres, tmp_home) as made:
        yield made


@contextmanager
def newcomer_at(postgres: EmbeddedPostgres, folder: Path) -> Iterator[Newcomer]:
    server = postgres.start()
    with psycopg.connect(server, autocommit=True) as superuser:
        superuser.execute("create role app_owner login password 'o'")
        superuser.execute("create database app owner app_owner")
    admin = make_conninfo(server, dbname="app")
    owner = make_conninfo(admin, user="app_owner", password="o")
    try:
        with psycopg.connect(owner, autocommit=True) as connection:
            connection.execute(TABLES.encode())
        yield Newcomer(postgres, admin, owner, folder)
    finally:
        with psycopg.connect(server, autocommit=True) as superuser:
            superuser.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = 'app'"
            )
            superuser.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                " where database = 'app'"
            )
            superuser.execute("drop database app with (force)")
            superuser.execute("drop role app_owner; drop role if exists cdc, cdc_stream")
            superuser.execute("alter system reset wal_level")


def test_the_steps_of_the_readme_are_enough(
    any_postgres: EmbeddedPostgres, tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with newcomer_at(any_postgres, tmp_home) as newcomer:
        _follow_the_readme(newcomer, monkeypatch)


def _follow_the_readme(newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch) -> None:
    newcomer.paste(block("sql"))
    config = newcomer.config(monkeypatch)
    assert [f for f in readiness.review(config) if f.severity == "error"] == []
    with psycopg.connect(newcomer.owner, autocommit=True) as owner:
        run(config, until=current_lsn(owner))
        owner.execute(CHANGES.encode())
        done = run(config, until=current_lsn(owner))
    assert done.rows == 100 + 60 + 1
    _give_it_up(newcomer)


@pytest.mark.spark
def test_the_command_line_of_the_readme_copies_and_compares(
    newcomer: Newcomer, spark_server: SparkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomer.paste(block("sql"))
    newcomer.config(monkeypatch)
    spark_server.ensure()
    monkeypatch.setenv("CDC_ASSETS_HOME", str(spark_server.home))  # whose Spark server runs

    def command(verb: str) -> str:
        assert f"    cdc-assets --config FILE {verb} " in README.read_text()
        done = subprocess.run(
            [sys.executable, "-m", "cdc_assets", "--config", newcomer.folder / "defs.yaml", verb],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        return done.stdout

    command("sync")
    with psycopg.connect(newcomer.owner, autocommit=True) as owner:
        owner.execute(CHANGES.encode())
    said = [line.partition(" at ")[0] for line in command("verify").splitlines()]
    assert said == ["public.orders: equal, 301 rows", 'public."My.Table": equal, 240 rows']


def _give_it_up(newcomer: Newcomer) -> None:
    """The administrator's publication is named with the SQL for it; then nothing is left."""

    def drop() -> tuple[int, str]:
        file = newcomer.folder / "defs.yaml"
        done = CliRunner().invoke(cli, ["--config", str(file), "drop-source", "--yes", "app"])
        return done.exit_code, done.output

    code, said = drop()
    assert (code, "slot cdc_app: removed" in said) == (0, True), said
    newcomer.paste(said.partition("somebody else's: ")[2].replace("\n", " "))
    assert drop() == (0, "slot cdc_app: there was none\npublication cdc_app: there was none\n")
    with psycopg.connect(newcomer.owner) as owner:
        left = owner.execute(
            "select slot_name::text from pg_replication_slots where database = 'app'"
            " union all select pubname from pg_publication"
        )
        assert left.fetchall() == []


BEFORE = """
create table public.parted (id int primary key, body text) partition by range (id);
create table public.parted_1 partition of parted for values from (0) to (100);
"""
# What is wrong, the code of it in check, and whose trouble it is: the source's, or that table's.
STATES = [
    ("alter role cdc_stream noreplication", "replication_privilege", None),
    ("drop schema _pg2iceberg", "coordination_schema catalog_unwritable", None),
    ("drop publication cdc_app", "publication_privilege", None),
    ("alter publication cdc_app drop table orders", "table_owner", "public.orders"),
    ("revoke select on orders from cdc", "select_privilege", "public.orders"),
    ("revoke select on parted_1 from cdc", "select_privilege", "public.parted"),
    ("alter table orders enable row level security", "row_security", "public.orders"),
    ("alter table orders drop constraint orders_pkey", "replica_identity", "public.orders"),
    ("alter table parted_1 replica identity nothing", "replica_identity", "public.parted"),
]


@pytest.mark.parametrize(("wrong", "code", "table"), STATES, ids=[wrong for wrong, *_ in STATES])
def test_check_says_ready_exactly_when_a_start_succeeds(
    newcomer: Newcomer, monkeypatch: pytest.MonkeyPatch, wrong: str, code: str, table: str | None
) -> None:
    newcomer.paste(BEFORE + block("sql"))
    newcomer.paste(
        "grant select on parted, parted_1 to cdc; alter publication cdc_app add table parted;"
        f"{wrong};"
    )
    monkeypatch.setattr(readiness, "_spark", lambda _: [])
    config = newcomer.config(monkeypatch)
    tables = [*config.tables, TableConfig(name="public.parted")]
    nothing_to_copy = SnapshotConfig(mode="never")  # so no other table waits with the parked one
    config = config.model_copy(update={"tables": tuple(tables), "snapshot": nothing_to_copy})

    def errors() -> list[Finding]:
        return [f for f in readiness.review(config) if f.severity == "error"]

    found = errors()
    assert [(f.code, f.table) for f in found] == [(each, table) for each in code.split()]
    parked = _start(config, refused=None if table else code.split(maxsplit=1)[0])
    assert set(parked) == ({table} if table else set())
    assert all(found[0].remedy.split(" --")[0] in reason for reason in parked.values())

    newcomer.paste(found[0].remedy)
    assert errors() == []
    with Pipeline.open(config) as pipeline:
        mark_for_copy(pipeline, [TableId.parse(name) for name in parked])  # as resync does
        pins = Pins(pipeline)
        pins.tick()  # a flusher that runs does no more
        pins.close()
        assert "parked" not in {row.state for row in pipeline.store.tables()}
    assert _start(config) == {}


def _start(config: SourceConfig, refused: str | None = None) -> dict[str, str]:
    """What a flusher does before it streams; the tables that are parked, with the reason."""
    if refused is not None:
        with pytest.raises(NotReady) as caught:
            refuse_to_flush(config)
        assert caught.value.codes == (refused,)
        return {}
    refuse_to_flush(config)
    with Pipeline.open(config) as pipeline:
        pins = Pins(pipeline)
        pins.prepare()
        pins.close()
        rows = pipeline.store.tables()
        return {str(row.table): row.reason or "" for row in rows if row.state == "parked"}
