"""The sensor that keeps what the platform runs itself: the embedded Postgres, its traffic, Spark.

Only what the configuration asks for. Nothing is waited for: a tick starts what is down (each with
its own back-off) and says what is up. All of it ends with the code server.
"""

from __future__ import annotations

import dagster as dg

from cdc_assets.config import SourceConfig
from cdc_assets.errors import SparkProblem
from cdc_assets.pipeline import embedded_postgres
from cdc_assets.spark.session import server

TICK_SECONDS = 5


def needed(config: SourceConfig) -> bool:
    """Whether anything has to be kept running for this source besides its flusher."""
    return config.postgres.embedded or config.spark.remote is None


def spark_address(config: SourceConfig) -> str | None:
    """Where Spark Connect is; None while the local server doesn't run yet."""
    return config.spark.remote or server(config).url()


def _spark(config: SourceConfig) -> str:
    spark = server(config)
    status = spark.start()
    if not status.running:
        raise SparkProblem(
            f"the local Spark server ended with code {status.last_returncode}"
            f" ({status.failures} times in a row).",
            f"It is started again in {status.next_start_in_seconds:.0f} s; its log is"
            f" {spark.log_path}.",
        )
    return "Spark is up" if spark.url() else "Spark is starting"


def services_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``services_<source>``."""

    @dg.sensor(
        name=f"services_{config.name}",
        minimum_interval_seconds=TICK_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Keeps the embedded Postgres, its demo traffic and the local Spark running.",
    )
    def tick() -> dg.SkipReason:
        said = []
        if config.postgres.embedded:
            dsn = embedded_postgres(config).start(wait=False)
            said.append("Postgres is up" if dsn else "Postgres is starting")
            if dsn is not None and config.postgres.demo:
                said.append(start_workload(config))
        if config.spark.remote is None:
            said.append(_spark(config))
        return dg.SkipReason("; ".join(said) + ".")

    return tick
