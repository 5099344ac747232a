"""Backfills from the UI: the jobs, and the sensor that has them carried out."""

from __future__ import annotations

import dagster as dg
import pytest

from cdc_assets.backfill.carry_out import backfill_lock
from cdc_assets.backfill.request import request
from cdc_assets.lake.spark.session import open_session
from cdc_assets.log import backfills as record
from cdc_assets.log.asked.wishes import pause, resume
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.integration.dagster.world import World, copy_by_command

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

BIG = TableId("public", "big")


def run(world: World, verb: str, **config: object) -> dg.JobExecutionResult:
    given = {"ops": {verb: {"config": config}}}
    return world.execute(dg.RunRequest(job_name=f"{verb}_world", run_config=given))


def test_a_sensor_has_a_backfill_carried_out_once(world: World) -> None:
    copy_by_command(world)
    assert world.said("backfills") == "No backfill is to be carried out."
    session = open_session(world.config)
    with Pipeline.open(world.config) as pipeline:
        before = session.table("lake.world.big").count()
        number = request(pipeline, BIG).number
        [asked] = world.runs("backfills")
        assert asked.job_name == "backfill_world"
        with Pipeline.open(world.config) as other:
            assert other.store.try_lock(backfill_lock(number))  # the command carries it out
            assert world.runs("backfills") == []
        done = world.execute(asked)
        assert done.success
        assert record.backfill(pipeline.store, number).state == "done"
        [event] = [
            e
            for e in done.all_events
            if e.is_step_materialization or "OUTPUT" in str(e.event_type_value)
        ]
        told = event.event_specific_data.metadata  # type: ignore[union-attr]
        assert (told["read"].value, told["applied"].value) == (2000, 2000)
        assert told["backfills"].value == f"{number}: done"
        assert world.said("backfills") == "No backfill is to be carried out."
        assert session.table("lake.world.big").count() == before

        # Asked for in the launchpad, it is carried out at once; and steered there.
        assert run(world, "backfill", tables=["public.big"], where="id <= 10").success
        last = record.backfills(pipeline.store)[-1]
        assert (last.state, last.applied) == ("done", 10)
        number = request(pipeline, BIG).number
        assert run(world, "signal", kind="pause", backfill=number).success
        assert record.backfill(pipeline.store, number).state == "paused"
        assert world.runs("backfills") == []
        pipeline.store.connection.execute(
            "insert into signals (source, id, kind) values ('world', 'go', 'resume-snapshot')"
        )
        pause(pipeline.store, BIG)  # it would wait, in the place of another one
        assert world.said("backfills") == "0 backfills are carried out, 1 wait for paused tables."
        resume(pipeline.store, BIG)
        [again] = world.runs("backfills")
        assert again.tags["cdc_assets/backfill"] == str(number)
    session.stop()


def test_a_backfill_that_cannot_be_done_fails_its_run_with_the_reason(world: World) -> None:
    copy_by_command(world)
    with Pipeline.open(world.config) as pipeline:
        forged = record.request(
            pipeline.store, BIG, "note = (select 1)", replaces=False, by="somebody"
        )
        [asked] = world.runs("backfills")
        assert not world.execute(asked).success
        assert record.backfill(pipeline.store, forged.number).state == "failed"
        assert world.said("backfills") == "No backfill is to be carried out."
