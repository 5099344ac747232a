"""A Spark Connect session over the hours: idle, forgotten by its server, its line silent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.lake.catalog import catalog
from cdc_assets.lake.spark import session as sessions
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import is_usable, open_session
from cdc_assets.materializer.workers import turns as module
from cdc_assets.materializer.workers.turns import Turns
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.jvm import instances
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def _config(remote: str, dsn: str) -> SourceConfig:
    settings = {
        "name": "src",
        "postgres": {"dsn": dsn},
        "tables": [{"name": "public.t"}],
        "spark": {"remote": remote},
    }
    return parse_config(settings, "test")


class Line:
    """Passes a client's connections on to the server; those there are fall silent when told to."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url.split(";", 1)[0])
        assert parts.port is not None
        self._server = parts.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = url.replace(f":{parts.port}", f":{self._listener.getsockname()[1]}", 1)
        self._silent = list[threading.Event]()
        self._ends = list[socket.socket]()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self._silent)

    def fall_silent(self) -> None:
        for silent in self._silent:
            silent.set()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server))
                silent = threading.Event()
                self._silent.append(silent)
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(*ends, silent), daemon=True).start()

    @staticmethod
    def _pass(come: socket.socket, go: socket.socket, silent: threading.Event) -> None:
        with suppress(OSError):
            while piece := come.recv(65536):
                if not silent.is_set():  # else it is read, and lost
                    go.sendall(piece)


@pytest.fixture
def line(spark_server: SparkServer) -> Iterator[Line]:
    line = Line(spark_server.ensure())
    yield line
    line.close()


def test_a_line_that_falls_silent_is_noticed_and_the_statement_goes_on(
    line: Line, postgres_dsn: NewDatabase, tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"grpc.keepalive_time_ms": 8_000, "grpc.keepalive_timeout_ms": 2_000}
    kept = [(name, quick.get(name, value)) for name, value in sessions._KEEPALIVE]
    monkeypatch.setattr(sessions, "_KEEPALIVE", kept)
    session = open_session(_config(line.url, postgres_dsn()))
    try:
        assert session.sql("select 1").collect()[0][0] == 1
        before = line.connections
        line.fall_silent()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: session.sql("select 2").collect()[0][0])
            try:
                assert answer.result(120) == 2
            except TimeoutError:
                line.close()  # or the pool would wait for ever
                raise
        assert line.connections > before
    finally:
        session.stop()


def test_keepalive_asks_no_more_often_than_a_server_allows() -> None:
    """A Java server ends the line of a client that asks more often than in five minutes."""
    assert dict(sessions._KEEPALIVE)["grpc.keepalive_time_ms"] > 300_000


def test_a_statements_responses_are_released_at_once(
    spark_server: SparkServer, postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    session = open_session(_config(spark_server.ensure(), postgres_dsn()))
    try:
        client: Any = session.client  # type: ignore[operator]
        released, release = list[Any](), client._stub.ReleaseExecute

        def counted(request: Any, **more: Any) -> Any:
            released.append(request)
            return release(request, **more)

        client._stub.ReleaseExecute = counted
        assert len(session.range(0, 40_000, 1, 4).collect()) == 40_000
        wait_for(lambda: released)
        time.sleep(0.5)
        assert [request.HasField("release_all") for request in released] == [True]
    finally:
        session.stop()


def test_a_session_that_its_server_forgot_is_not_usable(
    spark_server: SparkServer, postgres_dsn: NewDatabase, tmp_home: Path
) -> None:
    session = open_session(_config(spark_server.ensure(), postgres_dsn()))
    try:
        assert is_usable(session)
        session.client.release_session()  # type: ignore[operator]
        assert not is_usable(session)
    finally:
        session.stop()  # else PySpark asks it, as this process's, for settings


def test_sessions_that_merge_nothing_are_used_so_that_they_are_kept(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()

    def ask(session: object) -> None:
        asked.append(session)
        if len(asked) > 3:
            raise PySparkException("it isn't there")

    monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(module, "_ASK_SECONDS", 0.0)
    with copied_lake("create table t (id int primary key)", "t") as source:
        tables = [TableId("public", "t")]
        with (
            Worker(source.pipeline, tables) as worker,
            Turns(source.pipeline, source.session, worker, lambda _: None) as turns,
        ):
            turns.wait(0.0)
            assert len(set(asked)) == source.config.lake.max_parallel_tables + 1 == 3
            with pytest.raises(PySparkException, match="lost while nothing was merged"):
                turns.wait(0.0)


def _slowly(batches: Any) -> Any:
    time.sleep(5)
    yield from batches


def test_connections_of_closed_sessions_to_the_catalog_end(
    copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they stay until the JVM collects them; a session that is still used makes a new one."""
    monkeypatch.setattr(catalog, "IDLE_SECONDS", 1)
    with copied_lake("create table t (id int primary key)", "t") as source:
        name = source.lake_table(TableId("public", "t")).sql_name
        for _ in range(3):
            session = open_session(source.config)
            session.table(name).collect()
            session.stop()
        jdbc = (
            "select pid from pg_stat_activity where application_name = 'PostgreSQL JDBC Driver'"
            " and datname = current_database()"
        )
        wait_for(lambda: not source.execute(jdbc))
        source.execute("insert into t values (1)")
        source.catch_up()
        # One ends within a statement, too, between the look at the table and the commit.
        slow = source.session.sql("select 2 as id").mapInArrow(_slowly, "id int")
        slow.writeTo(name).append()
        assert source.rows(TableId("public", "t")) == [(1,), (2,)]


def test_sessions_that_compacted_leave_nothing_in_the_jvm(
    copied_lake: NewLake, spark_server: SparkServer
) -> None:
    """Iceberg's hook for each compaction's pool kept the session: for good, with its catalog."""
    with copied_lake("create table t (id int primary key)", "t") as source:
        source.execute("insert into t values (1)")
        source.catch_up()
        name = source.lake_table(TableId("public", "t")).procedure_name
        compact = (
            f"call {catalog.CATALOG}.system.rewrite_data_files(table => {name},"
            " options => map('rewrite-all', 'true'))"
        )
        state = "org.apache.spark.sql.internal.SessionState"
        before = instances(spark_server, state)
        for _ in range(3):
            session = open_session(source.config)
            session.sql(compact).collect()
            session.stop()
        wait_for(lambda: instances(spark_server, state) <= before)


def test_reads_of_files_leave_nothing_in_the_jvm(
    copied_lake: NewLake, spark_server: SparkServer
) -> None:
    """Iceberg never closes a reader's allocator; some a second would fill the heap in a month."""
    allocator = "org.apache.iceberg.shaded.org.apache.arrow.memory.ChildAllocator"
    with copied_lake("create table t (id int primary key)", "t") as source:
        source.execute("insert into t values (1)")
        source.catch_up()
        rows = source.session.table(source.lake_table(TableId("public", "t")).sql_name)
        rows.collect()
        before = instances(spark_server, allocator)
        for _ in range(20):
            assert len(rows.collect()) == 1
        assert instances(spark_server, allocator) < before + 10


@pytest.mark.parametrize("joined", [False, True])
def test_closed_sessions_leave_nothing_in_the_jvm(
    copied_lake: NewLake, spark_server: SparkServer, *, joined: bool
) -> None:
    """While others go on: threads of Spark's pools keep the session that they were made under."""
    kept = "org.apache.iceberg.jdbc.JdbcCatalog"
    parts = {"name": "p", "partition_by": ["part"]}
    setup = "create table t (id int primary key); create table p (id int primary key, part int);"
    setup += "insert into t values (1); insert into p select i, i % 5 from generate_series(1, 99) i"
    with copied_lake(setup, "t", parts) as source:
        t, p = (source.lake_table(table).sql_name for table in source.tables)
        query = f"select id, count(*) from {t} group by id"
        if joined:  # partitions are chosen by what the other table has
            query = f"select p.id from {p} p join {t} t on p.part = t.id where t.id + 1 = 2"
            assert "dynamicpruning" in source.session.sql(f"explain {query}").collect()[0][0]
        before = instances(spark_server, kept)
        for _ in range(8):
            session = open_session(source.config)
            session.sql(query).collect()
            session.stop()
        wait_for(lambda: instances(spark_server, kept) < before + 4, 30)
