"""The sensor that keeps the platform's own services up: the embedded Postgres, its traffic, Spark.

It keeps only what the configuration asks for. A tick doesn't wait: it starts what is down (each
with its own back-off) and reports what is up. All of it ends with the code server.

At a source's first start Spark leaves the processors to the flusher, which makes the slot, for a
moment: until there is something to copy (``snapshot``), or the second tick.
"""

from __future__ import annotations

from contextlib import suppress

import dagster as dg
import psycopg

from cdc_assets.config.addresses import embedded_postgres
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.names import of_source
from cdc_assets.dagster.sensors.pace import PACE_SECONDS, NotYet, reachable
from cdc_assets.errors import CdcError, SparkProblem, TableProblem
from cdc_assets.lake.spark.session import server
from cdc_assets.log.states import TableState
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.catalog import describe
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.session.connect import connect


def needed(config: SourceConfig) -> bool:
    """Whether anything has to be kept running for this source besides its flusher."""
    return config.postgres.embedded or config.spark.remote is None


def spark_address(config: SourceConfig) -> str | None:
    """Where Spark Connect is; None while the local server doesn't run yet."""
    return config.spark.remote or server(config).url()


def demo_is_made(config: SourceConfig) -> bool:
    """Whether the demo's tables are complete; a table pinned before that would be parked.

    Raises psycopg.OperationalError.
    """
    dsn = embedded_postgres(config).dsn()
    if config.name in _made or dsn is None:
        return config.name in _made
    with connect(dsn, application_name=f"cdc_assets {config.name} services") as source:
        try:
            # pgbench's tables come first, then all of the shop in one transaction.
            describe(source, TableId("shop", "customers"))
        except TableProblem:
            return False
    _made.add(config.name)
    return True


# Sources whose demo tables are known to be there.
_made: set[str] = set()


def begin_spark(config: SourceConfig) -> None:
    """Start the local Spark, once, if the services' tick has left it; returns at once.

    The services' next tick tells what comes of it, and starts it from then on.
    """
    if config.name in _left:
        _left.discard(config.name)
        with suppress(CdcError, OSError):
            server(config).start()


def _leaves_first(config: SourceConfig) -> bool:
    """Whether this is the first tick, and the source's tables have yet to be pinned."""
    if config.name in _ticked or config.postgres.embedded:  # a database takes longer to be made
        return False
    _ticked.add(config.name)
    try:
        with reachable(config), Pipeline.open(config) as pipeline:
            states = {row.state for row in pipeline.store.tables()}
            return states <= {TableState.WAITING, TableState.PARKED}
    except (NotYet, CdcError, psycopg.Error):  # there is no log yet, or nobody can have one now
        return True


# Sources that had a tick in this process, and those whose Spark it has left to the first copy.
_ticked, _left = set[str](), set[str]()


def _spark(config: SourceConfig) -> str:
    if _leaves_first(config):
        _left.add(config.name)
        return "Spark starts once a table is pinned"
    _left.discard(config.name)
    spark = server(config)
    status = spark.start()
    if (end := status.end) is not None:
        raise SparkProblem(
            f"the local Spark server {end}.", f"{status.again}; its log is {spark.log_path}."
        )
    return "Spark is up" if spark.url() else "Spark is starting"


def services_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``services_<source>``."""

    @dg.sensor(
        **of_source(config, "services"),
        minimum_interval_seconds=PACE_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Keeps the embedded Postgres, its demo traffic and the local Spark running.",
    )
    def tick() -> dg.SkipReason:
        said = []
        if config.postgres.embedded:
            postgres = embedded_postgres(config)
            up = postgres.start(wait=False) is not None
            said.append("Postgres is up" if up else "Postgres is starting")
            if config.postgres.demo:
                from cdc_assets.demo.workload import supervise_workload

                running = supervise_workload(postgres).running  # it waits for the server
                said.append("demo traffic runs" if running else "demo traffic starts again soon")
        if config.spark.remote is None:
            said.append(_spark(config))
        return dg.SkipReason("; ".join(said) + ".")

    return tick
