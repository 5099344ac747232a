"""In a table's quiet times nothing is merged but what a person asks for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from cdc_assets.dagster.checks.sample import check_sample
from cdc_assets.dagster.names import all_tables
from cdc_assets.materializer.workers.turns import Turns
from cdc_assets.materializer.workers.worker import Worker
from cdc_assets.observe.status import collect
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.verify.sample import sample
from cdc_assets_tests.support.lake import NewLake

pytestmark = pytest.mark.spark

T = TableId("public", "t")
SETUP = "create table t (id int primary key); insert into t values (1)"


def test_a_sample_waits_and_merges_nothing(copied_lake: NewLake) -> None:
    now = datetime.now(UTC)
    begin, end = (now + timedelta(hours=h) for h in (-1, 2))
    quiet = {"quiet": [f"{begin:%H:%M}-{end:%H:%M}"], "warn": "11h", "fail": "12h"}
    with copied_lake(SETUP, {"name": "t", "freshness": quiet}) as source:
        source.execute("insert into t values (2)")
        source.flush()
        [status] = collect(source.pipeline).tables
        assert f"quiet until {end:%Y-%m-%d %H:%M} UTC" in "; ".join(status.info)
        found = sample(source.pipeline, source.session, T, 100)
        assert "in its quiet times nothing is merged" in str(found.skipped)
        assert source.rows(T) == [(1,)]
        [names] = all_tables(source.config)
        told = check_sample(found, names, now)
        assert told.passed
        assert isinstance(told, dg.AssetCheckResult)
        assert "Not compared now" in str(told.description)
        with (
            Pipeline.open(source.config) as pipeline,
            Worker(pipeline, [T]) as worker,
            Turns(pipeline, source.session, worker, print) as turns,
        ):
            assert turns.pending({T}, also={T}) == []
            assert not turns.waits, "nobody waits for its end"
            assert turns.pending({T}, asked={T}) == [T]
