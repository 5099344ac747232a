"""The only assembler: one source's configuration in, one complete ``Definitions`` out.

Parts are composed here and made elsewhere; tests and other deployments swap them by the overrides.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.assets.health import health_asset
from cdc_assets.dagster.assets.lake import lake_assets
from cdc_assets.dagster.assets.maintenance import maintenance_assets
from cdc_assets.dagster.assets.marks import marks_asset
from cdc_assets.dagster.assets.postgres import source_spec
from cdc_assets.dagster.assets.references import with_references
from cdc_assets.dagster.assets.snapshot import snapshot_assets
from cdc_assets.dagster.assets.staged_log import staged_log_spec
from cdc_assets.dagster.backfills import backfill_jobs, backfills_sensor
from cdc_assets.dagster.checks.ready import ready_checks
from cdc_assets.dagster.checks.sample import sample_checks
from cdc_assets.dagster.checks.tables import table_checks
from cdc_assets.dagster.jobs import operation_jobs
from cdc_assets.dagster.names import all_tables
from cdc_assets.dagster.part import part_for
from cdc_assets.dagster.resources.code_server import tend_runs
from cdc_assets.dagster.resources.flusher import FlusherResource
from cdc_assets.dagster.resources.sources import remember
from cdc_assets.dagster.resources.spark import SparkConnectResource
from cdc_assets.dagster.sensors.checks import checks_job, checks_sensor
from cdc_assets.dagster.sensors.flusher import flusher_sensor
from cdc_assets.dagster.sensors.materializer import materializer_job, materializer_sensor
from cdc_assets.dagster.sensors.observe.alerts import alerts_sensor
from cdc_assets.dagster.sensors.observe.health import health_sensor
from cdc_assets.dagster.sensors.observe.lineage import lineage_sensor
from cdc_assets.dagster.sensors.schedules import (
    maintenance_job,
    maintenance_schedule,
    marks_job,
    marks_schedule,
    sample_job,
    sample_schedule,
)
from cdc_assets.dagster.sensors.services import needed, services_sensor
from cdc_assets.dagster.sensors.snapshot import snapshot_sensor
from cdc_assets.process.collector import uncollected
from cdc_assets.setup.discovery import discovered


@uncollected()
def build_defs(
    config: SourceConfig,
    *,
    resources: Mapping[str, Any] | None = None,
    sensors: Sequence[dg.SensorDefinition] | None = None,
) -> dg.Definitions:
    """Everything of one source; definitions of several are merged.

    ``resources`` replaces some of ``spark_<source>`` (any LazyPySparkResource) and
    ``flusher_<source>``; ``sensors`` replaces all of them. The jobs have executors of their own: no
    other job of the code location gets one from here.
    """
    made = _begun(config, resources)
    tables = all_tables(config)
    asked = [table_checks(config, tables), ready_checks(config, tables)]
    merges, checks = materializer_job(config, tables), checks_job(config, asked)
    care = maintenance_job(config, tables)
    sampled = sample_checks(config, tables)
    samples = sample_job(config, sampled)
    marking = marks_job(config)
    schedules = [
        maintenance_schedule(config, care),
        sample_schedule(config, samples),
        marks_schedule(config, marking),
    ]
    return dg.Definitions(
        assets=[
            *(source_spec(names) for names in tables),
            *(staged_log_spec(names) for names in tables),
            snapshot_assets(config, tables),
            lake_assets(config, tables),
            maintenance_assets(config, tables),
            health_asset(config),
            *([marks_asset(config, tables)] if config.publishes else []),
        ],
        asset_checks=[*asked, *([sampled] if config.query is None else [])],
        jobs=[
            *(merges, checks, care),
            *([samples] if config.query is None else []),
            *operation_jobs(config),
            *backfill_jobs(config),
            *([marking] if config.publishes else []),
        ],
        schedules=[schedule for schedule in schedules if schedule is not None],
        sensors=_sensors(config, merges, checks) if sensors is None else sensors,
        resources=made,
    )


def loaded(config: SourceConfig) -> SourceConfig:
    """``config`` with the tables that its patterns stand for, the same ones in runs and steps.

    A code server asks the source, and keeps the answer; the processes of runs and steps go by that.
    Whoever else looks at the definitions (``dg list defs``) asks, and leaves what is kept alone.
    """
    alone = multiprocessing.parent_process() is None  # else a code server began it
    serves = alone and sys.argv[1:3] == ["api", "grpc"]
    works = not alone or (not serves and sys.argv[1:2] == ["api"])
    return discovered(config, ask=not works, keep=serves)


def process_defs(config: SourceConfig, path: Path | None = None) -> dg.Definitions:
    """:func:`build_defs`; in the process of a run that was asked for, its part of them.

    ``path``: the configuration file that assets refer to, but not in a run, which shows none.
    The part is one operation and one job. Whoever takes a job out of the definitions takes it from
    :func:`build_defs`, where each is there in every process.
    """
    if (part := part_for(config)) is None:
        whole = build_defs(config)
        return whole if path is None else with_references(whole, config, path)
    assets, checks = list[dg.AssetsDefinition](), list[dg.AssetChecksDefinition]()
    jobs: list[dg.UnresolvedAssetJobDefinition] = []
    match part.work:
        case "snapshot":  # of no job: see its sensor
            assets.append(snapshot_assets(config, part.tables))
        case "materialize":
            assets.append(lake_assets(config, part.tables))
            jobs.append(materializer_job(config, part.tables))
        case "maintain":
            assets.append(maintenance_assets(config, part.tables))
            jobs.append(maintenance_job(config, part.tables))
        case "check" | "ready":
            checks += [table_checks(config, part.tables), ready_checks(config, part.tables)]
            jobs.append(checks_job(config, checks))
        case "sample":
            checks.append(sample_checks(config, part.tables))
            jobs.append(sample_job(config, checks[0]))
    return dg.Definitions(
        assets=assets,
        asset_checks=checks,
        jobs=jobs,
        resources=_begun(config, None),
    )


def _begun(config: SourceConfig, resources: Mapping[str, Any] | None) -> dict[str, Any]:
    """Have this process know the source; its resources."""
    remember(config)
    tend_runs()
    return {
        f"spark_{config.name}": SparkConnectResource(source=config.name),
        f"flusher_{config.name}": FlusherResource(source=config.name),
        **(resources or {}),
    }


def _sensors(
    config: SourceConfig,
    merges: dg.UnresolvedAssetJobDefinition,
    checks: dg.UnresolvedAssetJobDefinition,
) -> list[dg.SensorDefinition]:
    return [
        *([services_sensor(config)] if needed(config) else []),
        flusher_sensor(config),
        snapshot_sensor(config),
        materializer_sensor(config, merges),
        checks_sensor(config, checks),
        *([backfills_sensor(config)] if config.streams else []),
        alerts_sensor(config),
        health_sensor(config),
        *([lineage] if (lineage := lineage_sensor(config)) is not None else []),
    ]
