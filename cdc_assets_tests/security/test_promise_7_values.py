"""Promise 7: values of rows never stand in messages, and keys only by choice."""

from __future__ import annotations

import ast
import json
import logging
import logging.config
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner
from dagster._core.events.log import EventLogEntry
from dagster_shared.serdes import serialize_value
from pyspark.errors import PySparkException

import cdc_assets
from cdc_assets.cli.main import cli
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.checks import tables as table_checks
from cdc_assets.dagster.sensors import sessions
from cdc_assets.errors import TableProblem, first_line
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import lost_server
from cdc_assets.postgres.names import TableId
from cdc_assets.process.traces import trace, traces_path
from cdc_assets.verify.key_names import hashed, salt
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.security.planted import NUMBER, WORD, leaks
from cdc_assets_tests.support.flusher import flushing
from cdc_assets_tests.support.lake import Lake, lake
from cdc_assets_tests.support.sinks import Inbox, mailbox, webhook


@pytest.fixture
def home(tmp_home: Path) -> Path:
    return tmp_home


def test_no_logger_is_given_an_error_to_print() -> None:
    """Whose handler prints it isn't known, and Python's and Dagster's print all of it."""
    for file in Path(cdc_assets.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                assert not any(word.arg == "exc_info" for word in node.keywords), file
                name = getattr(node.func, "attr", "")  # a future's exception() has no arguments
                assert name != "format_exc" and not (name == "exception" and node.args), file


pyspark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


ROWS = f"""
create table t (k text primary key, v text, n numeric(20,2), a text[], b bytea, d date, j jsonb,
                c char(10), f float8, ts timestamptz, r int4range);
create table loose (v text, n int);
alter table loose replica identity full;
create table strict (id text primary key, a text[], d date);
create table keyed (a text[] primary key, v text);
create table lossy (id text primary key, a text[], n numeric(12,2));
insert into t select 'k{WORD}' || i, '{WORD}', {NUMBER}, array['{WORD}'], '{WORD}', '2001-02-03',
    '{{"{WORD}": {NUMBER}}}', '{WORD}', {NUMBER}, now(), '[{NUMBER},)' from generate_series(1, 9) i;
insert into loose values ('{WORD}', {NUMBER});
insert into lossy values ('{WORD}', '{{{{{WORD}}}}}', 'NaN');
"""
TABLES: tuple[Any, ...] = (
    "t",
    {"name": "loose", "mode": "mirror"},
    {"name": "strict", "columns": {"unrepresentable": "fail"}},
    "keyed",
    {"name": "lossy", "columns": {"unrepresentable": "clamp"}},
)
T, LOOSE, STRICT, KEYED, LOSSY = (
    TableId("public", name) for name in ("t", "loose", "strict", "keyed", "lossy")
)


class Seen:
    """Everything that is said, by where it was."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, where: str, text: object) -> None:
        self.texts[where] = f"{self.texts.get(where, '')}\n{text}"

    @property
    def leaks(self) -> dict[str, list[str]]:
        found = re.compile(f".{{0,80}}(?:{WORD}|{NUMBER}).{{0,80}}")
        return {where: found.findall(text) for where, text in self.texts.items() if leaks(text)}


def _settings(slack: Inbox, mail: Inbox) -> dict[str, Any]:
    at = {"host": "127.0.0.1", "port": mail.port, "security": "none"}
    sinks = [
        {"type": "log"},
        {"type": "webhook", "url": f"http://127.0.0.1:{slack.port}/x"},
        {"type": "mail", **at, "from": "cdc@example.com", "to": ["ops@example.com"]},
    ]
    return {"alerts": {"sinks": sinks, "min_interval": 0, "health": {"warn": 0, "fail": 1}}}


@pyspark
@pytest.mark.timeout(600)
def test_no_value_stands_in_a_message_an_event_an_alert_or_a_log(
    spark_url: str,
    spark_server: SparkServer,
    postgres_dsn: NewDatabase,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    seen = Seen()
    with webhook() as slack, mailbox() as mail:
        made = lake(postgres_dsn(), spark_url, ROWS, *TABLES, **_settings(slack, mail))
        with made as source:
            source.pin()
            source.copy()
            _refused_by_the_lake(source, seen)
            _differing(source)
            (home / "dagster").mkdir()
            with dg.DagsterInstance.local_temp(str(home / "dagster")) as instance:
                _runs(source, instance, seen, monkeypatch)
                seen.add("events", _events(instance))
            rows = source.execute(
                "select tablename from pg_tables where schemaname = '_pg2iceberg'"
            )
            for (table,) in rows:
                seen.add(f"table {table}", source.execute(f'select * from _pg2iceberg."{table}"'))
            file = home / "source.json"
            file.write_text(source.config.dump())
            only = ["--table", "public.t", "--table", "public.loose"]
            for arguments in (["verify", *only], ["status"], ["status", "--json"]):
                done = CliRunner().invoke(cli, ["--config", str(file), *arguments])
                seen.add(" ".join(arguments), done.output)
            secret = salt(source.pipeline.store)
            asked = CliRunner().invoke(cli, ["--config", str(file), "verify", "--show-keys", *only])
        seen.add("webhook", slack.received)
        seen.add("mail", mail.received)
        assert slack.received and mail.received
    sessions.close_all()
    seen.add("log", "\n".join(map(logging.Formatter().format, caplog.records)))
    seen.add("traces", traces_path().read_text() if traces_path().exists() else "")
    seen.add("Spark's log", spark_server.log_path.read_text())
    seen.add("console", "\n".join(capfd.readouterr()))
    assert seen.leaks == {}
    # What is said instead: which column, and by which hash a person finds the row.
    key = hashed(secret, T, json.dumps({"k": f"k{WORD}1"}, separators=(",", ":")))
    for where in ("events", " ".join(["verify", *only]), "webhook"):
        assert key in seen.texts[where], where
    assert "column a got a value" in seen.texts["refused"]
    assert f'{key} {{"k":"k{WORD}1"}}' in asked.output, "whoever asks at the terminal sees them"
    assert f'"v":"{WORD} surplus"' in asked.output, "of a table without a key, the row"


@pyspark
def test_keys_that_are_named_in_a_statement_stand_in_no_message_when_it_fails(
    spark_url: str,
    spark_server: SparkServer,
    postgres_dsn: NewDatabase,
    home: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are numbers; a data file that is gone fails the statement."""
    caplog.set_level(logging.INFO)
    named, seen = TableId("public", "named"), Seen()
    setup = "create table named (id bigint primary key, v text);"
    setup += f"insert into named values ({NUMBER}, 'a'), (1, 'b')"
    with lake(postgres_dsn(), spark_url, setup, "named") as source:
        source.pin()
        source.copy()
        [file] = home.rglob("warehouse/**/named/data/*.parquet")
        file.unlink()
        source.execute("update named set v = 'c'")
        source.flush()
        with pytest.raises(PySparkException) as failed:
            source.drain(named)
        seen.add("error", f"{first_line(failed.value)}\n{trace(failed.value)}")
    seen.add("log", caplog.text)
    seen.add("spark", spark_server.log_path.read_text())
    assert seen.leaks == {}


def _refused_by_the_lake(source: Lake, seen: Seen) -> None:
    source.execute(f"insert into strict values ('k{WORD}', '{{{{{WORD}}}}}', 'infinity')")
    source.execute(f"insert into keyed values ('{{{{{WORD}}}}}', '{WORD}')")
    source.flush()
    for table in (STRICT, KEYED):
        with pytest.raises(TableProblem) as refused:
            source.drain(table)
        seen.add("refused", f"{refused.value}\n{trace(refused.value)}")
    for table in (T, LOOSE, LOSSY):
        source.drain(table)


def _differing(source: Lake) -> None:
    for statement in (
        f"delete from lake.src.t where k = 'k{WORD}1'",
        f"update lake.src.t set v = 'other {WORD}' where k = 'k{WORD}2'",
        f"insert into lake.src.loose values ('{WORD} surplus', {NUMBER})",
        f"insert into lake.src.t select * from lake.src.t where k = 'k{WORD}3'",
    ):
        source.session.sql(statement)


def _runs(
    source: Lake, instance: dg.DagsterInstance, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    defs = build_defs(source.config)
    repository = defs.get_repository_def()
    with flushing(source.config):
        for name, config in (
            ("verify_src", {"ops": {"verify": {"config": {"tables": []}}}}),
            ("sample_src", None),
            ("check_src_tables", None),
        ):
            jobs = [job for job in repository.get_all_jobs() if job.name.startswith(name)]
            assert jobs, [job.name for job in repository.get_all_jobs()]
            for job in jobs:
                job.execute_in_process(run_config=config, instance=instance, raise_on_error=False)
        # An error of somebody else's that quotes a value, raised in the midst of a run.
        spark = source.session

        def quoting(*_: object) -> object:
            frame = spark.createDataFrame([(WORD,)], "v string").repartition(1)
            return frame.selectExpr("cast(v as int)").collect()

        monkeypatch.setattr(table_checks, "_look", quoting)
        for job in [j for j in repository.get_all_jobs() if j.name == "check_src_tables"]:
            job.execute_in_process(instance=instance, raise_on_error=False)
        cursor = None
        for sensor in ("cdc_alerts_src", "health_src"):
            with dg.build_sensor_context(
                instance=instance, cursor=cursor, repository_def=repository
            ) as context:
                ticked = repository.get_sensor_def(sensor).evaluate_tick(context)
                seen.add(sensor, serialize_value(ticked.asset_events))
                seen.add(sensor, f"{ticked.skip_message} {ticked.cursor}")


def _events(instance: dg.DagsterInstance) -> str:
    logged: list[EventLogEntry] = []
    for run in instance.get_runs():
        logged += instance.all_logs(run.run_id)
    return serialize_value(logged)


@pyspark
@pytest.mark.timeout(300)
def test_keys_are_shown_where_the_configuration_says_so_and_rows_never(
    spark_url: str, postgres_dsn: NewDatabase, home: Path
) -> None:
    from cdc_assets.verify.compare import verify

    def flush_to(lsn: object, *, seconds: float | None = None) -> None:
        source.flush()

    shown = {"verify": {"show_keys": True}}
    made = lake(postgres_dsn(), spark_url, ROWS, "t", TABLES[1], **shown)
    with made as source:
        source.pin()
        source.copy()
        source.flush()
        source.session.sql(f"delete from lake.src.t where k = 'k{WORD}1'")
        source.session.sql("delete from lake.src.loose")
        t, loose = verify(source.pipeline, source.session, [T, LOOSE], flush_to)
        again = salt(source.pipeline.store)
        assert salt(source.pipeline.store) == again and len(again) == 64
    assert len(t.keys) == 1 and f'{{"k":"k{WORD}1"}} (source 1, lake 0)' in t.keys[0]
    assert re.fullmatch(r"#[0-9a-f]{12} \(source 1, lake 0\)", loose.keys[0])


@pytest.mark.parametrize(
    "name", ["DataFrameQueryContextLogger", "SQLQueryContextLogger", "pyspark.sql.connect.logging"]
)
def test_pyspark_logs_no_error_by_itself_whoever_configures_logging(name: str) -> None:
    """Dagster does, and enables every logger that there is."""
    assert lost_server(ValueError()) is False  # the module has been imported
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    assert not logging.getLogger(name).isEnabledFor(logging.CRITICAL)
