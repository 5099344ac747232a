"""Promise 3: a Spark server that ends under a table's merge or care doesn't end for ever."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import pytest
from pyspark.errors import PySparkException

from cdc_assets.errors import TableProblem
from cdc_assets.lake.catalog.drafts import DRAFTS
from cdc_assets.lake.spark import session as sessions
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.lake.spark.session import lost_server, open_session
from cdc_assets.maintenance.lost_care import surviving
from cdc_assets.maintenance.run import maintain
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

GOOD, BAD = TableId("public", "good"), TableId("public", "bad")
SETUP = """
create table good (id int primary key); create table bad (id int primary key);
insert into good values (1); insert into bad values (1);
"""


class Fragile:
    """A server that ends when it is asked for something: the real one, behind a relay that does."""

    def __init__(self, target: str, fatal: bytes) -> None:
        self._target = urlsplit(target)
        self._fatal = fatal
        self._links: list[socket.socket] = []
        self.start()

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = f"sc://localhost:{port}{self._target.path}"  # the path has the token
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def end(self) -> None:
        for each in (self._listener, *self._links):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._links.clear()

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was closed
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target.port or 0))
                self._links += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._relay, args=(one, other), daemon=True).start()

    def _relay(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if self._fatal in data:
                    self.end()
                other.sendall(data)


@contextmanager
def _fragile(source: Lake, fragile: Fragile) -> Iterator[None]:
    """A new session by way of the relay, as of a worker that was started again."""
    before = source.session
    source.session = open_session(source.config, fragile.url)
    try:
        yield
    finally:
        with suppress(PySparkException):
            source.session.stop()
        source.session = before


@pytest.fixture
def source(copied_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lake]:
    monkeypatch.setattr(sessions, "RETRIES", 2)
    with copied_lake(SETUP, "good", "bad") as opened:
        yield opened


def test_a_batch_that_ends_two_servers_parks_its_table_alone(
    source: Lake, spark_server: SparkServer
) -> None:
    for table in ("good", "bad"):
        source.execute(f"insert into {table} values (2); delete from {table} where id = 1")
    source.flush()
    draft = f"{DRAFTS}.`{source.lake_table(BAD).loaded().metadata.table_uuid}`"
    fragile = Fragile(spark_server.ensure(), f"delete from {draft}".encode())
    with closing(source.pipeline.store.connection.cursor()) as cursor:

        def counted() -> list[tuple[str, int]]:
            return cursor.execute("select table_name, times from lost_merges").fetchall()

        with _fragile(source, fragile):
            with pytest.raises(PySparkException) as lost:
                source.drain(BAD)
            assert lost_server(lost.value)
            assert counted() == [(str(BAD), 1)]
            # A server that is gone before the merge begins wasn't ended by it.
            with pytest.raises(PySparkException):
                source.drain(BAD)
            assert counted() == [(str(BAD), 1)]
        fragile.start()
        with _fragile(source, fragile):
            assert source.drain(GOOD).merges == 1
            with pytest.raises(TableProblem, match=r"2 Spark servers ended .* resync"):
                source.drain(BAD)
        row = source.row(BAD)
        assert row.state == "parked" and counted() == []
        assert [row[0] for row in source.rows(GOOD)] == [2]
        assert [row[0] for row in source.rows(BAD)] == [1]


def test_promise_3_care_that_ends_two_servers_is_left_alone_and_its_table_flows_on(
    source: Lake, spark_server: SparkServer
) -> None:
    store = source.pipeline.store

    def compacted() -> str:
        told = "its compaction"
        with surviving(store, BAD, told):
            source.session.sql("select count(*) from lake.src.bad").collect()
        return told

    fragile = Fragile(spark_server.ensure(), b"from lake.src.bad")
    for _ in range(2):
        with _fragile(source, fragile), pytest.raises(PySparkException) as lost:
            compacted()
        assert lost_server(lost.value)
        fragile.start()
    with pytest.raises(TableProblem, match="2 Spark servers ended during its compaction"):
        compacted()
    (done,) = maintain(source.pipeline, lambda: source.session, [BAD])
    assert done.problem is not None and "left alone for a day" in str(done.problem)
    source.execute("insert into bad values (2)")
    source.flush()
    assert source.drain(BAD).merges == 1
    # A day later it is tried again, and what succeeds is forgotten.
    store.connection.execute("update lost_care set ended_at = now() - interval '25 h'")
    compacted()
    store.connection.execute("update lost_care set times = 1, ended_at = now()")
    compacted()
    assert store.connection.execute("select from lost_care").rowcount == 0
    fragile.end()
