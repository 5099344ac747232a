"""The sensor that samples a source every minute, and reports its health now and then.

A report is an event of some ten kilobytes: one every ten minutes, and one when the grade changes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import dagster as dg

from cdc_assets.assets.health import health_key, health_metadata
from cdc_assets.config import SourceConfig
from cdc_assets.health.report import look
from cdc_assets.health.samples import EVERY_SECONDS
from cdc_assets.sensors.sessions import NOT_REACHABLE, session, waiting_sentence

REPORT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Reported:
    """The last report: when, and with which grade."""

    at: float
    grade: str


# By source; a new code server reports once more.
_reported: dict[str, Reported] = {}


def due(last: Reported | None, grade: str, now: float) -> bool:
    """Whether a report is due."""
    return last is None or last.grade != grade or now - last.at >= REPORT_SECONDS


def health_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``health_<source>``."""

    @dg.sensor(
        name=f"health_{config.name}",
        minimum_interval_seconds=round(EVERY_SECONDS),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Samples lag, throughput and retained WAL; reports health/… every 10 minutes.",
    )
    def tick() -> dg.SensorResult | dg.SkipReason:
        try:
            with session(config, "health sensor") as pipeline:
                found = look(pipeline)
        except NOT_REACHABLE as error:
            return dg.SkipReason(waiting_sentence(config, error))
        now = time.monotonic()
        if not due(_reported.get(config.name), found.grade, now):
            return dg.SkipReason(f"{config.name} is {found.grade}.")
        _reported[config.name] = Reported(now, found.grade)
        return dg.SensorResult(
            skip_reason=f"{config.name} is {found.grade}; reported.",
            asset_events=[
                dg.AssetMaterialization(health_key(config), metadata=health_metadata(found))
            ],
        )

    return tick
