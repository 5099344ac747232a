"""Backfills in Dagster: jobs that ask for one and steer it, and the sensor that has it carried out.

Level-triggered: as long as a backfill is to be carried out and no run of it is active, a run is
asked for. A tick also takes the signals that were written since the last one.
"""

# No postponed annotations here: Dagster looks at the types of `context` and `config` itself.
from itertools import islice
from typing import Any, Literal

import dagster as dg
from pydantic import Field

from cdc_assets.backfill.carry_out import backfill_lock
from cdc_assets.backfill.request import request
from cdc_assets.config.addresses import selected
from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.jobs import AS_IN_SQL, job_of
from cdc_assets.dagster.names import of_source, run_lock, run_tags
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.dagster.resources.spark import spark_session
from cdc_assets.dagster.sensors.checks import TICK_SECONDS
from cdc_assets.dagster.sensors.pace import reachable, skipped
from cdc_assets.dagster.sensors.runs import active_runs
from cdc_assets.dagster.sensors.services import spark_address
from cdc_assets.dagster.sensors.sessions import session
from cdc_assets.errors import ConfigurationError
from cdc_assets.log import backfills as record
from cdc_assets.log.asked.wishes import paused
from cdc_assets.log.backfills import Backfill
from cdc_assets.messages.texts import described
from cdc_assets.operations.backfilling import backfill as carried_out
from cdc_assets.operations.backfilling import wish
from cdc_assets.operations.signals import bring_signals, take_signals
from cdc_assets.pipeline import Pipeline

# Of a run: the backfill that it carries out.
BACKFILL_TAG = "cdc_assets/backfill"
# Backfills that have a run at once: each reads with some sessions of its own.
_AT_ONCE = 2


class BackfillConfig(dg.Config):
    """A backfill to be asked for, or one that was."""

    tables: list[str] = Field(
        default_factory=list, description=f"Which tables are read again, {AS_IN_SQL}."
    )
    where: str = Field(
        default="", description="Which rows, as an immutable SQL condition; none: all of them."
    )
    replace: bool = Field(
        default=False, description="Remove rows that only the lake has, too: without where alone."
    )
    backfill: int = Field(
        default=0, description="The number of one that was asked for, instead of tables."
    )


class SignalConfig(dg.Config):
    """What is to become of a backfill."""

    kind: Literal["pause", "resume", "stop"]
    backfill: int = Field(description="Its number: cdc-assets backfill --list has it.")


def backfill_jobs(source: SourceConfig) -> list[dg.JobDefinition]:
    """``backfill_<source>`` and ``signal_<source>``."""
    return [
        job_of(
            source,
            "backfill",
            _backfill(source),
            "Reads tables that stream again, all or some of their rows, while they go on: what is"
            " damaged in the lake is healed. Rows that change meanwhile are left to the stream.",
            {"tables": [], "where": "", "replace": False},
        ),
        job_of(
            source,
            "signal",
            _signal(source),
            "Pauses a backfill, resumes or stops it.",
            {"kind": "pause", "backfill": 0},
        ),
    ]


def _backfill(source: SourceConfig) -> dg.OpDefinition:
    resource = f"spark_{source.name}"

    @dg.op(name=f"backfill_tables_of_{source.name}", required_resource_keys={resource})
    @run_of(source)
    def backfill(context: dg.OpExecutionContext, config: BackfillConfig) -> None:
        if bool(config.tables) == bool(config.backfill):
            raise ConfigurationError("name the tables to read again under tables:.")
        with Pipeline.open(source) as pipeline:
            pipeline.store.lock(run_lock(context.run.run_id))
            numbers = [config.backfill] if config.backfill else []
            if config.tables:
                by, where = f"run {context.run_id}", config.where or None
                numbers = [
                    request(pipeline, table, where, replaces=config.replace, by=by).number
                    for table in selected(source, config.tables)
                ]
            spark = spark_session(getattr(context.resources, resource), source)
            done = [carried_out(pipeline, spark, n, context.log.info) for n in numbers]
        context.add_output_metadata(_metadata(done))

    return backfill


def _metadata(done: list[Backfill]) -> dict[str, Any]:
    """Of one backfill or several: the sums."""
    found: dict[str, Any] = {
        "backfills": ", ".join(f"{one.number}: {one.state}" for one in done),
        "read": sum(one.read for one in done),
        "applied": sum(one.applied for one in done),
        "differed": sum(one.differed for one in done),
        "left to the stream": sum(one.superseded for one in done),
        "removed": sum(one.removed for one in done),
        "chunks": sum(one.chunks_done for one in done),
    }
    if len(done) == 1 and (pace := done[0].rows_a_second) is not None:
        found["rows a second"] = round(pace)
    return found


def _signal(source: SourceConfig) -> dg.OpDefinition:
    @dg.op(name=f"signal_backfill_of_{source.name}")
    @run_of(source)
    def signal(context: dg.OpExecutionContext, config: SignalConfig) -> None:
        with Pipeline.open(source) as pipeline:
            done = wish(pipeline, config.kind, config.backfill)
        context.add_output_metadata({"backfill": done.number, "state": done.state})

    return signal


def backfills_sensor(config: SourceConfig) -> dg.SensorDefinition:
    """``backfills_<source>``."""

    @dg.sensor(
        **of_source(config, "backfills"),
        job_name=f"backfill_{config.name}",
        minimum_interval_seconds=TICK_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Takes signals, and has backfills carried out: a run for each.",
    )
    @skipped
    def tick(context: dg.SensorEvaluationContext) -> dg.SkipReason | list[dg.RunRequest]:
        with reachable(config), session(config, "backfills") as pipeline:
            problem = bring_signals(pipeline)
            take_signals(pipeline)
            if not (due := record.backfills(pipeline.store, outstanding=True)):
                return dg.SkipReason(problem or "No backfill is to be carried out.")
            if problem:
                context.log.warning(problem)
            active = active_runs(context.instance, pipeline.store, run_tags(config, "backfill"))
            at_work = {run.tags.get(BACKFILL_TAG) for run in active}
            idle = paused(pipeline.store)
            waiting = {str(one.number) for one in due if one.table in idle}
            left = (
                one
                for one in due
                if str(one.number) not in at_work | waiting
                and not pipeline.store.is_locked(backfill_lock(one.number))
            )
            asked = list(islice(left, max(0, _AT_ONCE - len(at_work - waiting))))
            if not asked:
                said = f"{len(at_work - waiting)} backfills are carried out"
                said += f", {len(waiting)} wait for paused tables" if waiting else ""
                return dg.SkipReason(f"{said}.")
            if spark_address(config) is None:
                return dg.SkipReason("Waiting for Spark.")
            return [_run(config, one) for one in asked]

    return tick


def _run(config: SourceConfig, one: Backfill) -> dg.RunRequest:
    return dg.RunRequest(
        run_config={"ops": {"backfill": {"config": {"backfill": one.number}}}},
        tags={
            **run_tags(config, "backfill", one.table),
            BACKFILL_TAG: str(one.number),
            "cdc_assets/asked_by": described(one.requested_by)[:200],
        },
    )
