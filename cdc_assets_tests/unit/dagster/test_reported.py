"""What a person reads of a failed run: a sentence, whoever raised the error."""

# Not from __future__ import annotations: Dagster reads the contexts' types.

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from pyspark.errors.exceptions.connect import SparkConnectGrpcException

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.resources.reported import run_of
from cdc_assets.errors import TableProblem

JAVA = "[INTERNAL_ERROR] it broke\n\tat org.apache.spark.sql.Dataset.collect(Dataset.scala:1)"


def test_a_failed_run_says_what_is_wrong_without_a_stack_of_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDC_ASSETS_HOME", str(tmp_path))
    config = parse_config(
        {"name": "src", "postgres": {"dsn": "postgresql://h/d"}, "tables": [{"name": "t"}]}, "test"
    )

    @dg.multi_asset(specs=[dg.AssetSpec("one"), dg.AssetSpec("two")])
    @run_of(config)
    def lake(context: dg.AssetExecutionContext) -> Iterator[dg.MaterializeResult[None]]:
        context.log.info("it begins")
        yield dg.MaterializeResult(asset_key="one")
        try:
            raise SparkConnectGrpcException(JAVA)
        except SparkConnectGrpcException as error:
            raise RuntimeError(JAVA) from error

    @dg.op
    @run_of(config)
    def ours() -> None:
        raise TableProblem("public.t", "its key is gone.", "Say resync public.t.")

    @dg.job
    def work() -> None:
        ours()

    made = dg.materialize([lake], raise_on_error=False)
    told = []
    for result in (made, work.execute_in_process(raise_on_error=False)):
        [failed] = [event for event in result.all_events if event.is_step_failure]
        data = failed.step_failure_data
        assert data.error is not None
        assert "org.apache" not in data.error.to_string()
        assert (data.error.cause, data.error.context) == (None, None)
        told.append(data.user_failure_data.description if data.user_failure_data else None)
    assert len(made.asset_materializations_for_node("lake")) == 1
    defect = "cdc-assets has a defect: RuntimeError: [INTERNAL_ERROR] it broke."
    assert told == [
        f"{defect} Please report it. The details are in {tmp_path / 'traces.log'}.",
        "public.t: its key is gone. Say resync public.t.",
    ]
