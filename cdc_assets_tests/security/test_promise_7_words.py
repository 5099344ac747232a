"""Promise 7: the words of others are told without values, and with what a person needs of them."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from cdc_assets.errors import CdcError, first_line
from cdc_assets.flusher.standstill import Stuck
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.messages.foreign_words import masked, of_server
from cdc_assets.postgres.copy_out.kinds import TEXT
from cdc_assets.postgres.copy_out.session import DirectSession, open_session
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.process.traces import trace, traces_path
from cdc_assets.readiness.foreign_errors import explained
from cdc_assets_tests.conftest import NewDatabase, with_database
from cdc_assets_tests.security.planted import NUMBER, VALUES, WORD, leaks
from cdc_assets_tests.support.lake import copied, lake
from cdc_assets_tests.support.s3 import REGION, ObjectStore


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
    "select shout(%s)": "a function raised an error of its own (SQL state 23514)",
    "select shout_own(%s)": "a function raised an error of its own (SQL state AB123)",
    "select xmlparse(document %s)": "",
    "select %s::text ~ '('": "regular expression",
}


@pytest.fixture(autouse=True)
def home(tmp_home: Path) -> Path:
    return tmp_home


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port of this machine at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


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
    for quoted in (
        f"'{WORD}{value}{WORD}'",
        f'"{WORD}{value}{WORD}"',
        repr(f"{WORD}{value}"),
        repr(f"{WORD}{value}".encode("utf-8", "surrogatepass")),
    ):
        assert WORD not in masked(f"can't use {quoted} here {after}")
        assert WORD not in of_server(f"invalid input: {quoted}", "22P02")
    assert masked("can't open it: don't ask") == "can't open it: don't ask"


def test_an_error_of_postgres_that_names_objects_keeps_its_words() -> None:
    said = 'permission denied for table "Orders"'
    assert of_server(said, "42501") == said
    assert WORD not in of_server(f"I saw {WORD}", "P0001")


def _refused(dead_port: int, dsn: str) -> dict[str, tuple[str, ...]]:
    """Addresses at which no session is given, and what a person has to read of each."""
    server = re.sub(r".*@(.*):(.*)/.*", r'server at "\1", port \2', dsn)
    return {
        f"postgresql://u@127.0.0.1:{dead_port}/d": (f'"127.0.0.1", port {dead_port}',),
        with_database(dsn, "no_such_db"): (server, 'database "no_such_db" does not exist'),
        re.sub(r":[^:@]*@", f":{WORD}@", dsn): (
            server,
            'authentication failed for user "postgres"',
        ),
    }


def test_of_a_connection_host_port_database_and_user_are_told(
    dead_port: int, postgres_dsn: NewDatabase
) -> None:
    for dsn, told in _refused(dead_port, postgres_dsn()).items():
        for connect in (psycopg.connect, open_session):
            said = first_line(_error(lambda: connect(dsn)))  # noqa: B023
            assert all(part in said for part in told), (told, said)
            assert not leaks(said)


def test_of_a_statement_past_libpq_the_sql_state_is_told_and_no_value(
    postgres_dsn: NewDatabase,
) -> None:
    with psycopg.connect(dsn := postgres_dsn()) as client:
        client.execute(SETUP.encode())
    shouting = SETUP.replace("check_violation", "insufficient_privilege")
    with psycopg.connect(dsn) as client:
        client.execute(
            shouting[shouting.index("create function") :].replace("shout", "cry").encode()
        )
    with closing(open_session(dsn)) as session:
        assert isinstance(session, DirectSession)
        for statement, told in {
            f"select '{WORD}'::int": 'type integer: "…" (SQL state 22P02)',
            f"select cry('{WORD}')": "a function raised an error of its own (SQL state 42501)",
            "select * from no_such": 'relation "no_such" does not exist',
        }.items():
            for ask in (session.execute, lambda s: list(session.read(s, [TEXT]))):
                said = _said(_error(lambda: ask(statement)))  # noqa: B023
                assert told in said and not leaks(said), said


def test_of_a_slot_its_name_is_told(postgres_dsn: NewDatabase) -> None:
    with psycopg.connect(postgres_dsn()) as client:
        gone = _error(lambda: client.execute("select pg_drop_replication_slot('gone_slot')"))
    assert 'replication slot "gone_slot" does not exist' in first_line(gone)


def test_of_files_buckets_and_services_places_and_names_are_told(
    dead_port: int, s3: ObjectStore, tmp_path: Path
) -> None:
    bad = tmp_path / "it's bad.parquet"
    bad.write_bytes(b"no parquet at all")
    uri = f"sqlite:///{tmp_path / 'catalog.db'}"
    catalog = load_catalog("c", type="sql", uri=uri, warehouse=tmp_path.as_uri())

    def client(port: int, region: str = REGION) -> Any:
        config = Config(retries={"total_max_attempts": 1})
        at = f"http://127.0.0.1:{port}"
        return boto3.client("s3", endpoint_url=at, region_name=region, config=config)

    schema = pa.schema([("a", pa.int32())])
    asked: list[tuple[str, Callable[[], object]]] = [
        (f"http://127.0.0.1:{dead_port}/", client(dead_port).list_buckets),
        ("'no region'", lambda: client(s3.port, "no region")),
        ("(NoSuchBucket)", lambda: client(s3.port).list_objects_v2(Bucket="nowhere")),
        ("parameter Key", lambda: client(s3.port).get_object(Bucket="bucket", Key=3)),
        (str(bad), lambda: pq.read_table(bad)),
        (str(tmp_path / "none"), lambda: pq.read_table(tmp_path / "none")),
        ("'no_namespace'", lambda: catalog.create_table("no_namespace.t", schema)),
        ("a.no_table", lambda: catalog.load_table("a.no_table")),
    ]
    for told, do in asked:
        assert told in first_line(_error(do)), first_line(_error(do))
    refused = ClientError({"Error": {"Code": "X", "Message": f"I saw '{WORD}'"}}, "Get")
    assert "(X)" in first_line(refused) and not leaks(_said(refused))
    broken = pa.ArrowInvalid(f"Could not open Parquet input source '/a/b': it has '{WORD}'")
    assert "'/a/b'" in first_line(broken) and not leaks(_said(broken))
    assert masked(f"at https://h:4711/x: {NUMBER}, '{WORD} http://h/{WORD} {WORD}'") == (
        "at https://h:4711/x: … '…'"
    )


def test_of_our_own_words_the_remedy_is_told_however_long_what_is_wrong_is() -> None:
    stuck = Stuck(Lsn(7), 3, "e" * 500)
    assert first_line(stuck) == str(stuck)
    assert first_line(CdcError("x" * 100_000)).endswith("x…")
    assert first_line(ValueError("x" * 100_000)).endswith("x…")


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
    spark_url: str,
    spark_server: SparkServer,
    postgres_dsn: NewDatabase,
    home: Path,
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


@pyspark
@pytest.mark.timeout(300)
def test_of_spark_paths_names_settings_and_addresses_are_told(
    spark_url: str,
    spark_server: SparkServer,
    postgres_dsn: NewDatabase,
    dead_port: int,
    home: Path,
) -> None:
    with copied(postgres_dsn(), spark_url, "create table t (id int primary key)", "t") as source:
        _catalog_in_s3(source.session, postgres_dsn(), f"http://127.0.0.1:{dead_port}")
        _named(source.session, dead_port, home)
        _in_partitions(source.session, home / "parts")
    log = spark_server.log_path.read_text()
    assert "parts/data/k=.../n=.../" in log and not leaks(log)


def _named(session: SparkSession, dead_port: int, home: Path) -> None:
    for told, do in {
        f"file:{home}/none": lambda: session.read.parquet(f"{home}/none").collect(),
        "`nowhere`": lambda: session.sql("use nowhere"),
        '"spark.executor.memory"': lambda: session.conf.set("spark.executor.memory", "1g"),
        "spark.sql.shuffle.partitions": lambda: session.conf.set(
            "spark.sql.shuffle.partitions", WORD
        ),
        "spark.no.such": lambda: session.conf.get("spark.no.such"),
        "data source: nowhere": lambda: session.read.format("nowhere").load().collect(),
        f"http://127.0.0.1:{dead_port}": lambda: session.sql("create table s3.n.t (a int)"),
    }.items():
        said = _said(_error(do))
        assert told in said.partition("\n")[0] and not leaks(said), said


def _in_partitions(session: SparkSession, at: Path) -> None:
    """The folders of a partitioned table are called after values."""
    table = "lake.src.parts"
    session.sql(
        f"create table {table} (k string, n int) using iceberg partitioned by (k, n)"
        f" location 'file://{at}'"
    )
    session.sql(f"insert into {table} values ('{WORD} /=', {NUMBER})")
    [file] = at.glob("data/*/*/*.parquet")
    file.unlink()
    said = _said(_error(lambda: session.table(table).collect()))
    assert f"{at}/data/k=…/n=…/{file.name}" in said and not leaks(said), said


def _catalog_in_s3(session: SparkSession, dsn: str, endpoint: str) -> None:
    at = conninfo_to_dict(dsn)
    for key, value in {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "jdbc",
        ".uri": f"jdbc:postgresql://{at['host']}:{at['port']}/{at['dbname']}",
        ".jdbc.user": at["user"],
        ".jdbc.password": at["password"],
        ".warehouse": "s3://bucket/x",
        ".io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
        ".s3.endpoint": endpoint,
        ".s3.retry.num-retries": "0",
        ".s3.access-key-id": "test",
        ".s3.secret-access-key": "test",
        ".client.region": REGION,
    }.items():
        session.conf.set(f"spark.sql.catalog.s3{key}", str(value))
    session.sql("create namespace s3.n")
