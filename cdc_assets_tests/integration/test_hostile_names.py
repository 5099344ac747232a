"""Names that would be statements if anybody forgot to quote them go all the way, and do no harm."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest
from click.testing import CliRunner
from psycopg import sql

from cdc_assets.cli.main import cli
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.names import all_tables
from cdc_assets.dagster.sensors import sessions
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.maintenance.run import maintain
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.verify.sample import sample
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import lake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

BAD = '"; drop table y; --'
X = TableId("s" + BAD, "x" + BAD)
Z = TableId("public", "z'; drop table y; --`${HOME}.%s{}\\")
KEY = "id" + BAD
COLUMNS = ["c'); drop table y; --", "`tick`", "${HOME}", "a.b", "%s {0}", "back\\slash", "dé\tjà"]
SETUP = sql.SQL(
    "create table y (id int primary key); insert into y values (1);"
    " create schema {schema}; create table {x} ({key} int, {listed}, primary key ({key}));"
    " create table {z} ({key} int, {listed}, primary key ({key}));"
    " insert into {x} select i, {values} from generate_series(1, 50) i;"
    " insert into {z} select i, {values} from generate_series(1, 50) i;"
    " comment on table {x} is {comment}"
).format(
    schema=sql.Identifier(X.schema),
    x=X.identifier,
    z=Z.identifier,
    key=sql.Identifier(KEY),
    listed=sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(c)) for c in COLUMNS),
    values=sql.SQL(", ").join(sql.Literal("'\"; --" + c) for c in COLUMNS),
    comment=sql.Literal("'; drop table y; --"),
)


def _written(text: str) -> str:
    """As a configuration has it, where ${…} is a reference."""
    return text.replace("${", "$${")


def test_they_are_replicated_end_to_end(
    postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path
) -> None:
    publication = "p'" + BAD
    settings = {"publication": publication, "verify": {"sample_rows": 1000}}
    tables = [
        {"name": str(X), "partition_by": ["bucket(4, `" + KEY + "`)"]},
        {"name": _written(str(Z)), "columns": {"exclude": [COLUMNS[0]]}},
    ]
    setup = SETUP.as_string(None)
    url = spark_server.ensure()
    with lake(postgres_dsn(), url, setup, *tables, **settings) as source:
        for table in (X, Z):
            assert TableId.parse(str(table)) == table
        source.pin()
        source.copy()
        with flushing(source.config) as progress:
            wait_for(lambda: progress.state == "streaming")
            change = sql.SQL(
                "update {t} set {c} = 'changed' where {k} < 10; delete from {t} where {k} = 20;"
                " update {t} set {k} = {k} + 100 where {k} = 30; alter table {t} add {new} text"
                " default {d}; insert into {t} ({k}) values (200)"
            )
            for table in (X, Z):
                source.execute(
                    change.format(
                        t=table.identifier,
                        c=sql.Identifier(COLUMNS[3]),
                        k=sql.Identifier(KEY),
                        new=sql.Identifier("new" + BAD),
                        d=sql.Literal("'; drop table y; --"),
                    ).as_string(None)
                )
            target = current_lsn(source.source)
            wait_for(lambda: (source.pipeline.store.flushed_lsn() or Lsn.ZERO) >= target)
            source.drain_all()
            for done in maintain(source.pipeline, lambda: source.session, source.tables):
                assert done.problem is None
            for table in (X, Z):
                source.session.sql(
                    f"update {source.lake_table(table).sql_name} set `a.b` = 'wrong'"
                    f" where `{KEY}` = 5"
                )
                found = sample(source.pipeline, source.session, table, 1000)
                assert (found.skipped, found.rows, found.looked_up) == (None, 50, 50)
                assert (found.differing, found.columns) == (1, ("a.b",))
            _by_commands_and_dagster(source.config.dump(), tmp_home)
        assert source.execute("select count(*) from y") == [(1,)]
        names = source.execute("select tablename from pg_publication_tables order by 1")
        assert names == [(X.name,), (Z.name,)]


def _by_commands_and_dagster(config: str, home: Path) -> None:
    file = home / "src.json"
    file.write_text(_written(config))

    def command(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["--config", str(file), *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    command("resync", str(X), str(Z))
    assert [one["equal"] for one in json.loads(command("verify", "--json"))] == [True, True]
    status = json.loads(command("status", "--json"))
    assert {table["name"]: table["state"] for table in status["tables"]} == {
        str(X): "streaming",
        str(Z): "streaming",
    }
    command("status")
    command("check")
    from cdc_assets.config.source import load_config

    loaded = load_config(file)
    keys = [names.lake for names in all_tables(loaded)]
    assert all(part.replace("_", "").isalnum() for key in keys for part in key.path)
    defs = build_defs(loaded)
    with dg.DagsterInstance.ephemeral() as instance:
        for job in ("materialize_src_tables", "check_src_tables", "sample_src_tables"):
            assert defs.resolve_job_def(job).execute_in_process(instance=instance).success
        event = instance.get_latest_materialization_event(keys[0])
        assert event is not None
    sessions.close_all()
