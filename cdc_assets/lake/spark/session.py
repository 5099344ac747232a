"""A Spark Connect session that knows the lake, and settings that last for one statement.

The server is ours (``lake.spark.server``) or the user's (``spark.remote``); from here on there is
no difference. Only the DataFrame and SQL API is used: a Connect client has nothing else.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pyspark.errors import PySparkException
from pyspark.errors import utils as pyspark_errors
from pyspark.errors.exceptions.connect import SparkConnectException, SparkConnectGrpcException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from pyspark.sql.connect.client import DefaultChannelBuilder
from pyspark.sql.connect.client.reattach import ExecutePlanResponseReattachableIterator
from pyspark.sql.connect.client.retries import DefaultPolicy
from pyspark.sql.connect.session import SparkSession as ConnectSession

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import first_line
from cdc_assets.lake.catalog.catalog import CATALOG, spark_settings
from cdc_assets.lake.catalog.drafts import draft_settings
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets.process.home import home

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 2.0
# Retries of a request, with waits of 0.05, 0.2, 0.8, 3.2 and 12.8 s between.
RETRIES = 5
# A line that carries nothing any more, after a NAT's time-out or a lost host, is noticed while an
# answer is awaited. A Java server ends the line of a client that asks more often than in 5 minutes.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # All channels of a process to one address share the wait between tries, by default up to two
    # minutes: a new session would fail that long although the server is there again.
    ("grpc.max_reconnect_backoff_ms", 3_000),
]
_OTHER_SERVER = ("SESSION_NOT_FOUND", "SESSION_CHANGED", "RESPONSE_ALREADY_RECEIVED")


def _keep_release_threads() -> None:
    """Work around a deadlock of PySpark 4.1 (SPARK-55362, SPARK-55406, mended in a later release).

    Closing any session, even by the garbage collector in the midst of another one's call, shuts
    down a thread pool that all sessions of the process share, and waits for its threads, which may
    wait for that very call. The pool may as well live as long as the process.
    """
    ExecutePlanResponseReattachableIterator.shutdown = classmethod(  # type: ignore[method-assign,assignment]
        lambda _cls: None
    )


_keep_release_threads()


def _release_at_the_end() -> None:
    """Spare the server the requests to forget a statement's responses one by one.

    PySpark sends one for each response, of which the smallest statement has four: half of what it
    costs this process, and a sixth of what it costs the server. A server keeps 10 MB of those that
    were received, and forgets all of them at the statement's end.
    """
    ExecutePlanResponseReattachableIterator._release_until = (  # type: ignore[method-assign]
        lambda self, until_response_id: None  # noqa: ARG005
    )


_release_at_the_end()

# Else the first column that a process names asks the first session that it ever had, whose server
# may be gone, and each one after it notes where in our code it was named.
pyspark_errors._enable_debugging_cache = False  # type: ignore[assignment]

# PySpark logs its errors as JSON with its own and Java's stack, and values; we report them in a
# sentence. Silenced by level, because reconfiguring logging enables loggers that are disabled.
for _name in (
    "DataFrameQueryContextLogger",
    "SQLQueryContextLogger",
    "pyspark.sql.connect.logging",
):
    PySparkLogger.getLogger(_name).setLevel(logging.CRITICAL + 1)


class _Loopback(DefaultChannelBuilder):
    """The channel to our own server, which listens on 127.0.0.1.

    PySpark sends a token without TLS if the host is called localhost. But that name may resolve to
    ::1 first, where the same port is free for any local user, who would get the token.
    """

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._port}"


class Patience(DefaultPolicy):
    """Retries requests after a brief network failure: for 17 s, not ten minutes like PySpark's own.

    A local server that is gone took its sessions with it, even if another one replaces it.
    """

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(max_retries=RETRIES)
        self._config = config

    def can_retry(self, e: BaseException) -> bool:
        local = self._config.spark.remote is None
        return super().can_retry(e) and not (local and server(self._config).url() is None)


def lost_server(error: BaseException) -> bool:
    """Whether the server ended under the session: it isn't there, or is another one."""
    if not isinstance(error, SparkConnectException):
        return False
    return is_unreachable(error) or any(word in str(error) for word in _OTHER_SERVER)


def is_unreachable(error: BaseException) -> bool:
    """Whether nothing answers where the server was."""
    return (
        isinstance(error, SparkConnectGrpcException)
        and error.getGrpcStatusCode().name == "UNAVAILABLE"
    )


def is_usable(session: SparkSession) -> bool:
    """Whether the server knows the session; asks it, which keeps the session, too.

    A server forgets a session that nobody used for an hour.
    """
    try:
        ask(session)
    except PySparkException as error:
        logger.info("a session of Spark is lost: %s", first_line(error))
        return False
    return True


def ask(session: SparkSession) -> None:
    """Ask the server of the session; raises PySparkException if it doesn't know it, or isn't there.

    It keeps the session, which a server forgets that nobody used for an hour.
    """
    session.conf.get("spark.sql.session.timeZone")


_DISTRIBUTION = "spark.sql.iceberg.distribution-mode"
_EXCLUDED = "spark.sql.optimizer.excludedRules"
_WHOLE_FILES = "org.apache.spark.sql.execution.datasources.v2.OptimizeMetadataOnlyDeleteFromTable"
# The first Iceberg that is known to put several deletion vectors of a file together at the commit.
_PUTS_TOGETHER = (1, 12)


@dataclass(frozen=True, slots=True)
class _Server:
    """The version of its Iceberg, and what its user has chosen of the settings that we change."""

    iceberg: tuple[int, ...]
    distribution: str | None
    excluded: str | None


_servers: WeakKeyDictionary[SparkSession, _Server] = WeakKeyDictionary()


def _server_of(session: SparkSession) -> _Server:
    if session not in _servers:
        chosen = (session.conf.get(key, None) for key in (_DISTRIBUTION, _EXCLUDED))
        _servers[session] = _Server(_iceberg(session), *chosen)
    return _servers[session]


@contextmanager
def unshuffled(session: SparkSession) -> Iterator[None]:
    """While it lasts, a task of Iceberg's itself writes the deletion vectors of what it has found.

    Else rows are brought to one task a file, which costs a small merge 15 % of its CPU. Where
    several tasks read a file they write several vectors of it: one too many each, which is an
    orphan at once, and which earlier versions would leave in the table. With those, nothing is
    done.
    """
    of = _server_of(session)
    if of.distribution is not None or of.iceberg < _PUTS_TOGETHER:
        yield
        return
    with _set(session, _DISTRIBUTION, "none", chosen=None):
        yield


@contextmanager
def row_by_row(session: SparkSession) -> Iterator[None]:
    """While it lasts, Spark doesn't ask whether a DELETE is one of whole files, of metadata alone.

    Iceberg would read all manifests for the answer, and once more for the rows: a fifth of what a
    small merge costs the server.
    """
    chosen = _server_of(session).excluded
    excluded = f"{chosen},{_WHOLE_FILES}" if chosen else _WHOLE_FILES
    with _set(session, _EXCLUDED, excluded, chosen=chosen):
        yield


@contextmanager
def _set(session: SparkSession, key: str, value: str, *, chosen: str | None) -> Iterator[None]:
    """While it lasts, a setting has ``value``; then, what its user has ``chosen``, or none."""
    try:
        session.conf.set(key, value)
        yield
    finally:
        if chosen is None:
            session.conf.unset(key)
        else:
            session.conf.set(key, chosen)


def _iceberg(session: SparkSession) -> tuple[int, ...]:
    """The version of the server's Iceberg; of one that isn't a release, nothing."""
    [(version,)] = session.sql(f"select {CATALOG}.system.iceberg_version()").collect()
    found = re.fullmatch(r"(\d+)\.(\d+)\.\d+", version)
    return tuple(map(int, found.groups())) if found else ()


# A snapshot summary's properties go by an option of a DataFrame's write, or by a session setting,
# which MERGE obeys too.
_summaries_lock = threading.Lock()
_summaries: WeakKeyDictionary[SparkSession, threading.RLock] = WeakKeyDictionary()
SUMMARY_OPTION = "snapshot-property."
_SUMMARY = f"spark.sql.iceberg.{SUMMARY_OPTION}"


def server(config: SourceConfig) -> SparkServer:
    """The local Connect server for the source's settings; sources with equal ones share it."""
    spark = config.spark
    return SparkServer(SparkServerSettings(spark.cores, spark.memory, dict(spark.conf)), home())


def connect_url(config: SourceConfig) -> str:
    """``spark.remote``, or the address of the local server, which is started if there is none."""
    return config.spark.remote or server(config).ensure()


def spark_problem(config: SourceConfig) -> str | None:
    """Why nothing answers where Spark Connect should be; None if something does."""
    url = config.spark.remote or server(config).url()
    if url is None:
        return "the local Spark server isn't running"
    address = urlsplit(url.split(";", 1)[0])
    host, port = address.hostname or "", address.port or 15002
    try:
        socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        return f"{host}:{port}: {first_line(error)}"
    return None


def open_session(config: SourceConfig, url: str | None = None) -> SparkSession:
    """A new session of the source's own; the caller stops it."""
    channel = _Loopback if config.spark.remote is None else DefaultChannelBuilder
    session = connected(url or connect_url(config), channel)
    prepare_session(session, config)
    return session


def connected(url: str, channel: type[DefaultChannelBuilder] = _Loopback) -> SparkSession:
    """A new session as Spark has it, of our own server unless another ``channel`` is given."""
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"  # as builder.remote does
    builder = ConnectSession.builder.channelBuilder(channel(url, _KEEPALIVE))
    return cast(SparkSession, builder.create())


def prepare_session(session: SparkSession, config: SourceConfig) -> None:
    """Make ``session`` fit for this source: its catalog, UTC, names as Postgres spells them."""
    session.client.set_retry_policies([Patience(config)])  # type: ignore[operator]
    settings = {
        "spark.sql.session.timeZone": "UTC",
        # Postgres has "Id" beside "id"; so may a table here.
        "spark.sql.caseSensitive": "true",
        "spark.sql.ansi.enabled": "true",
        # A name or a default may have "${…}" in it; it means nothing here.
        "spark.sql.variable.substitute": "false",
        # A batch is small beside a warehouse query: the default of 200 would cost more than the
        # work.
        "spark.sql.shuffle.partitions": str(max(2, config.spark.cores)),
        # Compiled code has no keys in it, so that it can be used again.
        "spark.sql.optimizer.inSetSwitchThreshold": "0",
        # A batch's rows come with their statement, and are gone with it: a plan that is kept, or
        # a relation that is cached by the session, would keep them for as long as the session.
        "spark.sql.session.localRelationCacheThreshold": str(120 * 2**20),
        "spark.connect.session.planCache.enabled": "false",
        **spark_settings(config),
        **draft_settings(config),
    }
    session.conf._set_all(settings, silent=False)  # type: ignore[attr-defined]  # one request


@contextmanager
def summary(session: SparkSession, properties: Mapping[str, str]) -> Iterator[None]:
    """While it lasts, every commit of ``session`` carries these snapshot summary properties.

    Threads that share a session wait for each other.
    """
    with _summaries_lock:
        lock = _summaries.setdefault(session, threading.RLock())
    with lock:
        try:
            for key, value in properties.items():
                session.conf.set(_SUMMARY + key, value)
            yield
        finally:
            for key in properties:
                session.conf.unset(_SUMMARY + key)
