"""The facts that alerts are made of: of both databases, the slot, Spark, and what Dagster says.

Reads only, with short time-outs. What Dagster knows (freshness, runs, checks) is handed in, because
the engine doesn't know Dagster.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from cdc_assets.alerts.settings import Severity
from cdc_assets.config import SourceConfig
from cdc_assets.errors import CdcError, first_line
from cdc_assets.log.store import GROUP
from cdc_assets.pipeline import Pipeline, coordination_dsn, source_dsn
from cdc_assets.postgres.connect import connect
from cdc_assets.spark.session import server
from cdc_assets.status import SourceStatus, collect

_SPARK_SECONDS = 2.0
# Postgres 17 notes since when nobody reads from a slot.
_INACTIVE_SINCE = 170000
_UNREACHABLE = (CdcError, psycopg.OperationalError)


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """The slot as a danger to its source. Bytes, seconds, transactions.

    ``safe_bytes``: what may still be written before the slot loses WAL; None without
    ``max_slot_wal_keep_size`` (``keep_bytes``).
    """

    active: bool
    wal_status: str | None
    retained_bytes: int
    safe_bytes: int | None = None
    keep_bytes: int | None = None
    inactive_seconds: float | None = None
    xmin_age: int | None = None


@dataclass(frozen=True, slots=True)
class Stale:
    """A lake table that isn't fresh by Dagster's freshness policy."""

    lake_table: str
    severity: Severity
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailedRun:
    """The last finished run of a job (``name``) failed, with how many before it in a row."""

    name: str
    run_id: str
    in_a_row: int
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """An asset check whose last evaluation failed, what it said, and what helps if it knows."""

    asset: str
    name: str
    severity: Severity
    said: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One moment of a source. ``…_problem``: why that part can't be reached, None if it can.

    ``merged_seconds``: since the newest cursor moved.
    """

    now: datetime
    source_problem: str | None = None
    log_problem: str | None = None
    spark_problem: str | None = None
    status: SourceStatus | None = None
    slot: SlotFacts | None = None
    merged_seconds: float | None = None
    stale: tuple[Stale, ...] = ()
    failed_runs: tuple[FailedRun, ...] = ()
    failed_checks: tuple[FailedCheck, ...] = ()


def facts(pipeline: Pipeline) -> Facts:
    """Ask everything. Raises psycopg.OperationalError when a database can't be reached."""
    config, store = pipeline.config, pipeline.store
    status = collect(pipeline)
    with pipeline.connect_source("alerts") as source:
        slot = slot_facts(source, config.slot)
    merged = store.connection.execute(
        "select extract(epoch from clock_timestamp() - max(updated_at))::float8 from mat_cursor"
        " where consumer_group = %s and source = %s",
        (GROUP, config.name),
    ).fetchone()
    return Facts(
        datetime.now(UTC),
        spark_problem=spark_problem(config),
        status=status,
        slot=slot,
        merged_seconds=merged[0] if merged is not None else None,
    )


def unreachable(config: SourceConfig, error: Exception) -> Facts:
    """What can be said where :func:`facts` can't be had: which of the databases it is."""
    found = Facts(datetime.now(UTC), spark_problem=spark_problem(config))
    source = _problem(lambda: source_dsn(config))
    log = _problem(lambda: coordination_dsn(config))
    if source is None and log is None:  # it is back, or it is something else
        source = first_line(error)
    return replace(found, source_problem=source, log_problem=log if log != source else None)


def _problem(dsn: Callable[[], str]) -> str | None:
    try:
        connect(dsn(), application_name="cdc_assets alerts").close()
    except _UNREACHABLE as error:
        return first_line(error)
    return None


def spark_problem(config: SourceConfig) -> str | None:
    """Why nothing answers where Spark Connect should be; None if something does."""
    url = config.spark.remote or server(config).url()
    if url is None:
        return "the local Spark server isn't running"
    address = urlsplit(url.split(";", 1)[0])
    host, port = address.hostname or "", address.port or 15002
    try:
        socket.create_connection((host, port), timeout=_SPARK_SECONDS).close()
    except OSError as error:
        return f"{host}:{port}: {first_line(error)}"
    return None


def slot_facts(source: psycopg.Connection[tuple[object, ...]], name: str) -> SlotFacts | None:
    """See :class:`SlotFacts`; None if there is no slot of that name."""
    inactive = "null::float8"
    if source.info.server_version >= _INACTIVE_SINCE:
        inactive = "extract(epoch from clock_timestamp() - inactive_since)::float8"
    row = source.execute(
        sql.SQL(
            "select active, wal_status, coalesce(pg_wal_lsn_diff(case when pg_is_in_recovery()"
            " then pg_last_wal_replay_lsn() else pg_current_wal_lsn() end, restart_lsn), 0)"
            "::bigint,"
            " safe_wal_size::bigint,"
            " (select case when setting::bigint >= 0 then setting::bigint * 1024 * 1024 end"
            "  from pg_catalog.pg_settings where name = 'max_slot_wal_keep_size'),"
            " {}, age(catalog_xmin)::bigint"
            " from pg_catalog.pg_replication_slots where slot_name = %s"
        ).format(sql.SQL(inactive)),
        (name,),
    ).fetchone()
    return None if row is None else SlotFacts(*row)  # type: ignore[arg-type]
