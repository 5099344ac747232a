"""Promise 7: values of rows never stand in messages, and keys only by choice."""

from __future__ import annotations

import ast
import json
import logging
import logging.config
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pyarrow as pa
import pytest
from click.testing import CliRunner
from dagster._core.events.log import EventLogEntry
from dagster_shared.serdes import serialize_value
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import cdc_assets
from cdc_assets.build import build_defs
from cdc_assets.checks import tables as table_checks
from cdc_assets.cli import cli
from cdc_assets.errors import TableProblem, first_line
from cdc_assets.foreign_errors import explained
from cdc_assets.foreign_words import masked, of_server, trace
from cdc_assets.postgres.names import TableId
from cdc_assets.sensors import sessions
from cdc_assets.spark.server import SparkServer
from cdc_assets.spark.session import lost_server
from cdc_assets.traces import traces_path
from cdc_assets.verify.key_names import hashed, salt
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.flusher_support import flushing
from cdc_assets_tests.lake_support import Lake, lake
from cdc_assets_tests.sink_support import Inbox, mailbox, webhook

# Each value is found by the same word or number, wherever it turns up.
WORD, NUMBER = "pLan" + "Ted", str(71717171)
VALUES = (WORD, f"it's {WORD} 'in' \"quotes\"", f"{WORD}\n{WORD} on\n\ttwo lines", f"\"{WORD}', '")


def leaks(text: str) -> bool:
    return WORD in text or NUMBER in text


def _said(error: BaseException) -> str:
    """All that becomes of an error: its sentence, what a person is told, the trace."""
    assert isinstance(error, Exception)
    return "\n".join([first_line(error), str(explained(error, None)), trace(error)])


def _error(do: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - each one is looked at
        do()
    assert isinstance(caught.value, Exception)
    return caught.value


SETUP = """
create table t (k text primary key, n int check (n < 100), e text not null);
create type mood as enum ('fine');
create function shout(v text) returns text language plpgsql as $$ begin
  raise exception 'I saw %', v using errcode = 'check_violation', detail = v, hint = v; end $$;
create function shout_own(v text) returns text language plpgsql as $$ begin
  raise exception 'I saw %', v using errcode = 'AB123'; end $$;
"""
# Statements that Postgres refuses, and what has to be left of what it says.
REFUSED = {
    "select (%s::text)::int": "integer",
    "select (%s::text)::date": "date",
    "select (%s::text)::int[]": "malformed array",
    "select (%s::text)::json": "json",
    "select (%s::text)::mood": "enum mood",
    "select (%s::text)::bytea || '\\x'::bytea || (%s::text)::uuid::text::bytea": "uuid",
    "select to_timestamp(%s, 'YYYY')": "SQL state 22007",
    "insert into t values (%s, 1, ''), (%s, 1, '')": "t_pkey",
    "insert into t values (%s, 100, '')": "t_n_check",
    "insert into t values (%s, 1, null)": "not-null",
    "select shout(%s)": "function",
    "select shout_own(%s)": "function",
    "select xmlparse(document %s)": "",
    "select %s::text ~ '('": "regular expression",
}


@pytest.fixture
def home(tmp_home: Path) -> Path:
    return tmp_home


def test_what_postgres_refuses_is_told_without_the_value(
    postgres_dsn: NewDatabase, home: Path
) -> None:
    with psycopg.connect(postgres_dsn(), autocommit=True) as client:
        client.execute(SETUP.encode())
        for statement, left in REFUSED.items():
            for value in VALUES:
                values = [value] * statement.count("%s")
                error = _error(lambda: client.execute(statement.encode(), values))  # noqa: B023
                assert isinstance(error, psycopg.Error)
                assert not leaks(_said(error)), (statement, _said(error))
                assert left in first_line(error), (statement, first_line(error))
        names = _error(lambda: client.execute(b'select "No Such" from t'))
        assert first_line(names) == 'column "No Such" does not exist'
        number = _error(lambda: client.execute(f"select '{NUMBER}'::smallint".encode()))
        assert "smallint" in first_line(number) and not leaks(_said(number))
    assert leaks(traces_path().read_text()) is False


def _refusals(value: str) -> list[Callable[[], object]]:
    return [
        lambda: pa.array([value]).cast(pa.int32()),
        lambda: pa.array([value], pa.int64()),
        lambda: pa.array([int(NUMBER)]).cast(pa.int8()),
        lambda: pa.array([value]).cast(pa.decimal128(5, 2)),
        lambda: pa.array([f"{NUMBER}.5"]).cast(pa.decimal128(5, 2)),
        lambda: int(value),
        lambda: dict[str, int]()[value],
        lambda: dict[tuple[str, int], int]()[value, int(NUMBER)],
        lambda: value.encode("utf-16").decode("utf-8"),
        lambda: json.loads(value),
    ]


def test_what_libraries_refuse_is_told_without_the_value(home: Path) -> None:
    for value in VALUES:
        for do in _refusals(value):
            error = _error(do)
            assert not leaks(_said(error)), _said(error)

    def chained() -> None:
        try:
            int(VALUES[1])
        except ValueError as error:
            raise RuntimeError("beside") from error

    told = trace(_error(chained))
    assert not leaks(told)
    assert "builtins.ValueError: invalid literal for int()" in told
    assert "RuntimeError: beside" in told and "in chained" in told


@given(st.text(), st.text(max_size=20))
@example("'", "a")
@example('" b" \'', "")
def test_what_is_quoted_is_masked_whatever_it_is(value: str, after: str) -> None:
    for quoted in (f"'{WORD}{value}{WORD}'", f'"{WORD}{value}{WORD}"', repr(f"{WORD}{value}")):
        assert WORD not in masked(f"can't use {quoted} here {after}")
        assert WORD not in of_server(f"invalid input: {quoted}", "22P02")
    assert masked("can't open it: don't ask") == "can't open it: don't ask"


def test_no_logger_is_given_an_error_to_print() -> None:
    """Whose handler prints it isn't known, and Python's and Dagster's print all of it."""
    for file in Path(cdc_assets.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                assert not any(word.arg == "exc_info" for word in node.keywords), file
                name = getattr(node.func, "attr", "")  # a future's exception() has no arguments
                assert name != "format_exc" and not (name == "exception" and node.args), file


def test_an_error_of_postgres_that_names_objects_keeps_its_words() -> None:
    said = 'permission denied for table "Orders"'
    assert of_server(said, "42501") == said
    assert WORD not in of_server(f"I saw {WORD}", "P0001")


pyspark = pytest.mark.spark


@pytest.fixture(scope="module")
def spark_url(spark_server: SparkServer) -> str:
    return spark_server.ensure()


def _worker(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        value = batch.column(0)[0].as_py()
        raise ValueError(f"it has {value!r} and {value}")
        yield batch


@pyspark
@pytest.mark.timeout(300)
def test_what_spark_refuses_is_told_without_the_value(
    spark_url: str, spark_server: SparkServer, postgres_dsn: NewDatabase, home: Path
) -> None:
    made = lake(postgres_dsn(), spark_url, "create table t (id int primary key)", "t")
    with made as source:
        for value in VALUES:
            for name, error in _spark_errors(source.session, value):
                assert not leaks(_said(error)), (name, _said(error))
                if name.startswith("cast(v"):
                    assert "[CAST_INVALID_INPUT]" in first_line(error)
                    assert '"STRING"' in first_line(error)
        [gone] = [_error(lambda: source.session.table("no.such").collect())]
        assert "`no`.`such`" in first_line(gone)
    assert not leaks(traces_path().read_text())
    log = spark_server.log_path.read_text()
    assert not leaks(log)
    assert "PythonException" in log, "it says what went wrong, all the same"


def _spark_errors(session: SparkSession, value: str) -> Iterator[tuple[str, Exception]]:
    frame = session.createDataFrame([(value, f"{NUMBER}.25")], "v string, n string").repartition(1)
    for expression in (
        *("cast(v as int)", "cast(v as date)", "cast(v as timestamp)", "cast(v as boolean)"),
        *("cast(n as decimal(3,1))", "cast(cast(n as double) as tinyint)", "raise_error(v)"),
        *("from_json(v, 'x int', map('mode', 'FAILFAST'))", "unhex(v)", "element_at(array(v), 9)"),
        *("to_date(v, 'yyyy')", "regexp_extract_all(v, v || '(', 1)"),
    ):
        try:
            frame.selectExpr(f"{expression} as x").collect()
        except Exception as error:  # noqa: BLE001 - each one is looked at
            yield expression, error
    literal = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    for statement in (f"select cast({literal} as int)", f"select array({literal}) + 1"):
        yield statement.split(" ")[1][:5], _error(lambda: session.sql(statement).collect())  # noqa: B023
    yield "worker", _error(lambda: frame.mapInArrow(_worker, "v string, n string").collect())


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

    shown = {"verify": {"show_keys": True}}
    made = lake(postgres_dsn(), spark_url, ROWS, "t", TABLES[1], **shown)
    with made as source:
        source.pin()
        source.copy()
        source.flush()
        source.session.sql(f"delete from lake.src.t where k = 'k{WORD}1'")
        source.session.sql("delete from lake.src.loose")
        t, loose = verify(source.pipeline, source.session, [T, LOOSE], lambda _: source.flush())
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
