"""Other people's errors: one sentence that names the thing, and a trace only in the file for it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import psycopg
import pytest
from botocore.exceptions import NoCredentialsError
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from requests import ConnectTimeout

from cdc_assets.config.source import parse_config
from cdc_assets.errors import SparkProblem, first_line
from cdc_assets.messages.foreign_words import without_stack
from cdc_assets.process.traces import PlainFormatter
from cdc_assets.readiness.foreign_errors import explained

JAVA = """[INTERNAL_ERROR] it broke
\tat org.apache.spark.sql.Dataset.collect(Dataset.scala:1)
Caused by: java.lang.StackOverflowError"""
GRPC = """<_MultiThreadedRendezvous of RPC that terminated with:
\tstatus = StatusCode.UNAVAILABLE
\tdetails = "failed to connect to all addresses"
\tdebug_error_string = "UNKNOWN"
>"""
CONFIG = parse_config(
    {
        "name": "shop",
        "postgres": {"dsn": "postgresql://cdc:pLanTed@source.example/shop"},
        "state": {"postgres_url": "postgresql://cdc:pLanTed@state.example:5433/cdc"},
        "tables": [{"name": "t"}],
    },
    "test",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CDC_ASSETS_HOME", str(tmp_path))
    return tmp_path


def refused(host: str, port: int) -> psycopg.OperationalError:
    return psycopg.OperationalError(
        f'connection failed: connection to server at "{host}" (10.0.0.1), port {port} failed:'
        " Connection refused\n\tIs the server running on that host?"
    )


def denied(why: str) -> psycopg.OperationalError:
    return psycopg.OperationalError(
        'connection failed: connection to server at "source.example" (10.0.0.1), port 5432 failed:'
        f" FATAL:  {why}"
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SparkProblem("no Spark.", "Start it."), ["no Spark. Start it."]),
        (refused("source.example", 5432), ["the source shop", "correct postgres.dsn"]),
        (refused("state.example", 5433), ["the coordination database", "state.postgres_url"]),
        (denied('password authentication failed for user "cdc"'), ["doesn't take the login"]),
        (denied('database "shop" does not exist'), ["The server answers; correct postgres.dsn."]),
        (denied("the database system is starting up"), ["can't be reached, or ended"]),
        (psycopg.OperationalError("the connection is lost"), ["the Postgres of source shop"]),
        (psycopg.errors.UndefinedTable('relation "tables"'), ["schema _pg2iceberg isn't whole"]),
        (psycopg.errors.QueryCanceled("statement timeout"), ["Postgres refused a statement"]),
        (psycopg.errors.AdminShutdown("terminating connection"), ["can't be reached, or ended"]),
        (psycopg.errors.InsufficientPrivilege("permission denied for t"), ["denied for t"]),
        (SparkConnectGrpcException(JAVA), ["Spark can't do it: [INTERNAL_ERROR] it broke."]),
        (SparkConnectGrpcException(GRPC), ["failed to connect to all addresses"]),
        (ConnectTimeout("the server says nothing"), ["the catalog can't do it: the server says"]),
        (NoCredentialsError(), ["AWS can't do it: Unable to locate credentials."]),
        (PermissionError(13, "Permission denied", "/lake/x"), ["Permission denied: '/lake/x'"]),
        (IndexError("pop"), ["cdc-assets has a defect: IndexError: pop", "Please report it"]),
    ],
)
def test_a_sentence_names_the_thing_and_where_the_trace_is(
    home: Path, error: Exception, told: list[str]
) -> None:
    said = str(explained(error, CONFIG))
    for part in told:
        assert part in said
    assert "\n" not in said
    traces = home / "traces.log"
    assert traces.exists() == (f"in {traces}" in said) == (not isinstance(error, SparkProblem))
    if traces.exists():
        assert type(error).__name__ in traces.read_text()
        assert traces.stat().st_mode & 0o777 == 0o600


def test_the_setting_is_named_whose_role_or_address_was_refused() -> None:
    dsns = {
        "dsn": "postgresql://cdc:pLanTed@source.example/shop",
        "replication_dsn": "postgresql://streams:pLanTed@source.example/shop",
    }

    def said(error: Exception, **state: object) -> str:
        config = parse_config(
            {"name": "shop", "postgres": dsns, "state": state, "tables": [{"name": "t"}]}, "test"
        )
        return str(explained(error, config))

    both = "correct postgres.dsn or postgres.replication_dsn."
    denied = psycopg.errors.InvalidPassword(
        'connection to server at "source.example" (10.0.0.1), port 5432 failed: FATAL:  password'
        ' authentication failed for user "streams"'
    )
    elsewhere = "postgresql://cdc:pLanTed@state.example:5433/cdc"
    for state in ({}, {"postgres_url": elsewhere}):
        assert both in said(refused("source.example", 5432), **state)
        assert "correct postgres.replication_dsn." in said(denied, **state)
    assert "the source shop" in said(denied)
    assert "state.postgres_url" in said(refused("state.example", 5433), postgres_url=elsewhere)


def test_a_home_that_takes_no_file_is_no_second_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDC_ASSETS_HOME", "/proc/nowhere")
    assert "details" not in str(explained(IndexError("pop"), CONFIG))


def test_what_is_logged_to_a_terminal_has_no_stack(home: Path) -> None:
    plain = PlainFormatter("%(levelname)s %(message)s")

    def line(message: str, error: BaseException | None = None) -> str:
        trace = (type(error), error, error.__traceback__) if error is not None else None
        return plain.format(logging.LogRecord("x", logging.ERROR, "", 0, message, (), trace))

    assert line(f"it failed: {JAVA}") == "ERROR it failed: [INTERNAL_ERROR] it broke"
    assert line("the decoder failed:\nTraceback (most recent call last):\n  File") == (
        "ERROR the decoder failed:"
    )
    try:
        raise IndexError("pop")
    except IndexError:
        said = line("merging t", sys.exception())
    assert said == f"ERROR merging t: IndexError: pop (see {home / 'traces.log'})"
    assert without_stack("two\nlines") == "two\nlines"
    assert first_line(SparkConnectGrpcException(GRPC)) == "failed to connect to all addresses"
