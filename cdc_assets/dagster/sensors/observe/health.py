"""The sensor that samples a source every minute, and reports its health now and then.

A report is an event of some ten kilobytes: one every ten minutes, and one when the grade changes.
The source's tables are looked at, too; those whose columns or comments changed are observed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from cdc_assets.config.addresses import source_dsn
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.assets.health import health_metadata
from cdc_assets.dagster.metadata import described_metadata
from cdc_assets.dagster.names import TableAssets, all_tables, health_key, of_source
from cdc_assets.dagster.sensors.pace import reachable, skipped
from cdc_assets.dagster.sensors.sessions import session
from cdc_assets.observe.report import look
from cdc_assets.observe.samples import EVERY_SECONDS
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.comments import Described, described
from cdc_assets.postgres.names import TableId

REPORT_SECONDS = 600.0
# An event costs some 44 ms on SQLite, and a tick has a minute: the rest comes with the next ones.
AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class Reported:
    """The last report: when, and with which grade."""

    at: float
    grade: str


# By source; a new code server reports once more.
_reported: dict[str, Reported] = {}
# By source, each table as it was last observed.
_observed: dict[str, dict[TableId, Described]] = {}


def due(last: Reported | None, grade: str, now: float) -> bool:
    """Whether a report is due."""
    return last is None or last.grade != grade or now - last.at >= REPORT_SECONDS


def health_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``health_<source>``."""
    tables = all_tables(config)

    @dg.sensor(
        **of_source(config, "health"),
        minimum_interval_seconds=round(EVERY_SECONDS),
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Samples lag, throughput and retained WAL; reports health/… every 10 minutes.",
    )
    @skipped
    def tick() -> dg.SensorResult:
        with reachable(config), session(config, "health sensor") as pipeline:
            found, seen = look(pipeline), observations(pipeline, tables)
        now, said = time.monotonic(), f"{config.name} is {found.grade}"
        if not due(_reported.get(config.name), found.grade, now):
            return dg.SensorResult(skip_reason=f"{said}.", asset_events=seen)
        _reported[config.name] = Reported(now, found.grade)
        report = dg.AssetMaterialization(health_key(config), metadata=health_metadata(found))
        return dg.SensorResult(skip_reason=f"{said}; reported.", asset_events=[report, *seen])

    return tick


def observations(pipeline: Pipeline, tables: Sequence[TableAssets]) -> list[dg.AssetObservation]:
    """Observations of the source's tables that changed since the last one; at most AT_ONCE."""
    config = pipeline.config
    with pipeline.connect_source("health") as source:
        now = described(source, [names.table for names in tables])
    before = _observed.setdefault(config.name, {})
    changed = [
        names
        for names in tables
        if names.table in now and not _alike(now[names.table], before.get(names.table))
    ][:AT_ONCE]
    before |= {names.table: now[names.table] for names in changed}
    dsn = source_dsn(config)
    return [
        dg.AssetObservation(names.source, metadata=described_metadata(now[names.table], dsn))
        for names in changed
    ]


def _alike(now: Described, before: Described | None) -> bool:
    """Whether nothing changed except, by less than a tenth, the estimated number of rows."""
    if before is None or (now.comment, now.columns) != (before.comment, before.columns):
        return False
    rows, known = now.rows or 0, before.rows or 0
    return abs(rows - known) * 10 <= known
