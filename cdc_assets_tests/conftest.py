"""Real servers for the tests: Postgres 16 and 18 (embedded), Debian's 15, one Spark Connect server.

Servers are started at first use and live for the session; databases are made for one test each.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from pyspark.logger import PySparkLogger
from pyspark.logger.logger import JSONFormatter

from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.materializer import winners
from cdc_assets_tests.support import long_tests
from cdc_assets_tests.support.flusher import Bench, bench, named_after
from cdc_assets_tests.support.jvm import QUICK_JVM
from cdc_assets_tests.support.lake import NewLake, copied, lake
from cdc_assets_tests.support.s3 import GATEWAY, KEYS, ObjectStore, object_store
from cdc_assets_tests.support.tls import Authority, TlsServer, tls_server

NewDatabase = Callable[[], str]
"""Makes an empty database and returns its DSN; it is dropped, slots first, after the test."""

# Tests make and drop whole databases; their data needn't survive a power cut.
_FAST = {
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "max_prepared_transactions": "10",
}


class Timeout(Protocol):
    """pytest-timeout's settings of a test."""

    timeout: float  # seconds


_STDERR = pytest.StashKey[int]()

_DEBIANS_15 = Path("/usr/lib/postgresql/15/bin")

# Nobody's real keys are used, and every process that is started finds these.
os.environ |= KEYS
os.environ |= QUICK_JVM

# A shell's background job hands down signals to be ignored, and every process we start inherits
# that: none of them could be told to end.
for _number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = frozenset(long_tests.listed())
    for item in items:
        if long_tests.is_long(item.nodeid, long):
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: long_tests.place(item.nodeid))


def pytest_configure(config: pytest.Config) -> None:
    """What pytest captures from here on doesn't reach this: a process that ends can tell why."""
    config.stash[_STDERR] = os.dup(2)


def pytest_timeout_set_timer(item: pytest.Item, settings: Timeout) -> bool:
    """A test that hangs ends its process, and says where each thread is.

    Of pytest-timeout's own words nothing is seen where pytest-xdist runs the tests.
    """
    seconds = long_tests.at_most(settings.timeout)
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_STDERR])
    return True


def pytest_timeout_cancel_timer() -> bool:
    faulthandler.cancel_dump_traceback_later()
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if long_tests.is_too_late(long="long" in item.keywords):
        pytest.skip("not reached in the time that CI has")


# A shared machine pauses in the middle of an example: how long one takes says nothing.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session", autouse=True)
def logs_keep_their_form() -> Iterator[None]:
    """Loggers of PySpark give no form of theirs to a handler that has one.

    pytest adds its own handler to every logger that doesn't propagate, and PySpark makes such a
    logger of JSON at the first error of a query: what later tests read of the log would be JSON.
    """

    def add(logger: logging.Logger, handler: logging.Handler) -> None:
        if handler.formatter is None:
            handler.setFormatter(JSONFormatter())
        logging.Logger.addHandler(logger, handler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PySparkLogger, "addHandler", add)
        yield


@pytest.fixture(scope="session")
def public_directory() -> Iterator[Path]:
    """A folder that the user whom root starts Postgres as can get to; pytest's own are private."""
    directory = Path(tempfile.mkdtemp(prefix="cdc_assets-tests-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def tmp_home(public_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run-time home of the test's own."""
    home = Path(tempfile.mkdtemp(prefix="home-", dir=public_directory))
    monkeypatch.setenv("CDC_ASSETS_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def postgres_servers(public_directory: Path) -> Iterator[Callable[[int], EmbeddedPostgres]]:
    """The running server of a major version (15: Debian's), started once a session."""
    servers: dict[int, EmbeddedPostgres] = {}

    def server(version: int) -> EmbeddedPostgres:
        if version not in servers:
            bindir = _DEBIANS_15 if version == 15 else None
            if bindir is not None and not bindir.exists():
                pytest.skip("Debian's Postgres 15 is not installed")
            servers[version] = EmbeddedPostgres(
                public_directory / f"pg{version}", version, bindir, _FAST
            )
        servers[version].start()  # a test of processes may have stopped it
        return servers[version]

    yield server
    for made in servers.values():
        made.stop()


@pytest.fixture(scope="session")
def postgres(postgres_servers: Callable[[int], EmbeddedPostgres]) -> EmbeddedPostgres:
    """The session's Postgres 18."""
    return postgres_servers(18)


@pytest.fixture
def postgres_dsn(postgres: EmbeddedPostgres) -> Iterator[NewDatabase]:
    """A factory of empty databases on Postgres 18."""
    with databases(postgres) as new:
        yield new


@pytest.fixture(params=[15, 16, 18], ids="pg{}".format)
def any_postgres(
    request: pytest.FixtureRequest, postgres_servers: Callable[[int], EmbeddedPostgres]
) -> EmbeddedPostgres:
    """Each version that is tested, in turn."""
    return postgres_servers(request.param)


@pytest.fixture
def any_postgres_dsn(any_postgres: EmbeddedPostgres) -> Iterator[NewDatabase]:
    """A factory of empty databases on each version in turn."""
    with databases(any_postgres) as new:
        yield new


@pytest.fixture
def postgres_version() -> int:
    """Which Postgres ``source`` is on: a file or a test may want another one."""
    return 18


@pytest.fixture
def source(
    postgres_version: int,
    postgres_servers: Callable[[int], EmbeddedPostgres],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[Bench]:
    """A database with a log of its own; files that need more begin with this one."""
    with bench(postgres_servers(postgres_version).start(), named_after(request), tmp_path) as made:
        yield made


@pytest.fixture
def any_source(
    any_postgres: EmbeddedPostgres, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Bench]:
    """The same on each version in turn."""
    with bench(any_postgres.start(), named_after(request), tmp_path) as made:
        yield made


@pytest.fixture
def s3(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    """An S3-protocol server with an empty bucket, whose faults are the test's to choose."""
    of_aws = request.node.get_closest_marker("aws") is not None
    with object_store("" if of_aws else GATEWAY) as store:
        yield store


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkServer]:
    """The session's Spark Connect server, running; its settings are those of a source's default."""
    server = SparkServer(SparkServerSettings(), tmp_path_factory.mktemp("spark"))
    server.ensure()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def authority(public_directory: Path) -> Authority:
    """The authority of ``secured``'s certificates."""
    return Authority(public_directory / "authority")


@pytest.fixture(scope="session")
def _tls_server(public_directory: Path, authority: Authority) -> Iterator[TlsServer]:
    if not _DEBIANS_15.exists():
        pytest.skip("Debian's Postgres 15 is not installed; the embedded ones have no TLS")
    folder = public_directory / "tls"
    folder.mkdir()
    folder.chmod(0o755)
    with tls_server(folder, _DEBIANS_15, authority) as server:
        yield server


@pytest.fixture
def secured(_tls_server: TlsServer) -> str:
    """The DSN of who is let in by TLS, password and certificate, with all three."""
    return _tls_server()  # a test of processes may have stopped it


@pytest.fixture
def new_lake(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> NewLake:
    """Opens lakes of the test's own on the session's servers."""
    spark_server.ensure()  # now: a server begins with the environment, which a test may change
    return lambda *given, **more: lake(postgres_dsn(), spark_server.ensure(), *given, **more)


@pytest.fixture
def copied_lake(postgres_dsn: NewDatabase, spark_server: SparkServer, tmp_home: Path) -> NewLake:
    """The same, whose tables are copied."""
    spark_server.ensure()
    return lambda *given, **more: copied(postgres_dsn(), spark_server.ensure(), *given, **more)


@contextmanager
def databases(server: EmbeddedPostgres) -> Iterator[NewDatabase]:
    dsn = server.start()
    names: list[str] = []

    def new() -> str:
        name = f"test_{secrets.token_hex(4)}"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        names.append(name)
        return with_database(dsn, name)

    yield new
    with psycopg.connect(server.start(), autocommit=True) as connection:
        for name in names:
            _drop(connection, name)


def with_database(dsn: str, name: str) -> str:
    """The same server, another database; as a URI."""
    parts = conninfo_to_dict(dsn)
    return (
        f"postgresql://{parts['user']}:{parts['password']}@{parts['host']}:{parts['port']}/{name}"
    )


def _drop(connection: psycopg.Connection[tuple[object, ...]], name: str) -> None:
    # A walsender holds its slot, and a slot holds its database.
    connection.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [name]
    )
    connection.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s",
        [name],
    )
    connection.execute(
        sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
    )


@pytest.fixture
def folded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether batches are folded "here", as small ones are, or "by Spark", as large ones."""
    if request.param == "by Spark":
        monkeypatch.setattr(winners, "_STAGED_BYTES", -1)
