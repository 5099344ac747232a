"""The facts behind alerts: of both databases, the slot, Spark, and what Dagster reports.

Reads only, with short time-outs. What Dagster knows (freshness, runs, checks) is handed in, because
the engine doesn't know Dagster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import psycopg

from cdc_assets.config.addresses import coordination_dsn, source_dsn
from cdc_assets.config.alerts import Severity
from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import CdcError, first_line
from cdc_assets.lake.spark.session import spark_problem
from cdc_assets.log.tables import GROUP
from cdc_assets.observe.status import SourceStatus, collect
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.session.connect import connect
from cdc_assets.readiness.foreign_errors import explained

_UNREACHABLE = (CdcError, psycopg.OperationalError)


@dataclass(frozen=True, slots=True)
class Stale:
    """A lake table that isn't fresh by Dagster's freshness policy."""

    lake_table: str
    severity: Severity
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailedRun:
    """The last finished run of a job (``name``) failed, the last of ``in_a_row`` failures."""

    name: str
    run_id: str
    in_a_row: int
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """An asset check whose last evaluation failed, its message, and its remedy if it has one."""

    asset: str
    name: str
    severity: Severity
    said: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Unchecked:
    """``tables`` of a check, and when the one waiting longest was checked; None: never yet."""

    name: str
    tables: int
    since: datetime | None


@dataclass(frozen=True, slots=True)
class Facts:
    """One moment of a source. ``…_problem``: why that part can't be reached, None if it can.

    ``problem``: why nothing can be asked though both databases can be reached.
    ``merged_seconds``: since the newest cursor moved.
    """

    now: datetime
    problem: str | None = None
    source_problem: str | None = None
    log_problem: str | None = None
    spark_problem: str | None = None
    status: SourceStatus | None = None
    merged_seconds: float | None = None
    stale: tuple[Stale, ...] = ()
    failed_runs: tuple[FailedRun, ...] = ()
    failed_checks: tuple[FailedCheck, ...] = ()
    unchecked: tuple[Unchecked, ...] = ()


def facts(pipeline: Pipeline, status: SourceStatus | None = None) -> Facts:
    """Ask everything that ``status`` doesn't have, which is collected unless it is given.

    Raises psycopg.OperationalError when a database can't be reached.
    """
    config, store = pipeline.config, pipeline.store
    status = status or collect(pipeline)
    merged = store.connection.execute(
        "select extract(epoch from clock_timestamp() - max(updated_at))::float8 from mat_cursor"
        " where consumer_group = %s and source = %s",
        (GROUP, config.name),
    ).fetchone()
    return Facts(
        datetime.now(UTC),
        spark_problem=spark_problem(config),
        status=status,
        merged_seconds=merged[0] if merged is not None else None,
    )


def unreachable(config: SourceConfig, error: Exception) -> Facts:
    """The facts if :func:`facts` fails: which of the databases can't be reached."""
    found = Facts(datetime.now(UTC), spark_problem=spark_problem(config))
    source = log = _problem(lambda: source_dsn(config))
    if config.state.postgres_url is not None:
        log = _problem(lambda: coordination_dsn(config))
    if source is None and log is None:  # reachable again, or another problem
        return replace(found, problem=str(explained(error, config)))
    return replace(found, source_problem=source, log_problem=log if log != source else None)


def _problem(dsn: Callable[[], str]) -> str | None:
    try:
        connect(dsn(), application_name="cdc_assets alerts").close()
    except _UNREACHABLE as error:
        return first_line(error)
    return None
