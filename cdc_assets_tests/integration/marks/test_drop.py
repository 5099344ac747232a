"""Dropping a mark: no table keeps its tag, whatever the mark says of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from pyspark.sql.connect.client.retries import DefaultPolicy

from cdc_assets.lake.spark.session import connected
from cdc_assets.log.asked import marks as log
from cdc_assets.marks.make import drop, mark
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets_tests.integration.marks.test_marks import SETUP, A, B, states
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "public.a", "public.b") as opened:
        yield opened


def refs(source: Lake) -> list[set[str]]:
    return [{*source.lake_table(table).loaded().metadata.refs} for table in (A, B)]


def test_a_tag_that_was_never_recorded_is_dropped_too(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a later mark of that name, which misses the table, would show rows of this one."""
    log.make(source.pipeline.store, "x", source.tables)

    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("cdc_assets.materializer.marking.settle", killed)
        with pytest.raises(RuntimeError, match="killed"):
            source.drain(A)
    mark_for_copy(source.pipeline, [A])
    source.pin()
    source.copy()
    source.catch_up()
    assert states(source, "x") == ["missed", "tagged"]
    assert refs(source) == [{"main", "mark_x"}] * 2
    drop(source.pipeline, source.session, "x")
    assert refs(source) == [{"main"}] * 2


def test_a_branch_of_that_name_is_somebody_elses_and_stays(source: Lake) -> None:
    name = source.lake_table(A).sql_name
    source.session.sql(f"alter table {name} create branch mark_x")
    mark(source.pipeline, source.session, "x")
    assert states(source, "x") == ["missed", "tagged"]
    drop(source.pipeline, source.session, "x")
    assert refs(source) == [{"main", "mark_x"}, {"main"}]


def test_a_lost_server_ends_it_at_once_and_not_once_a_table(source: Lake) -> None:
    mark(source.pipeline, source.session, "x")
    lost = connected("sc://127.0.0.1:1")
    lost.client.set_retry_policies([DefaultPolicy(max_retries=0)])  # type: ignore[operator]
    with pytest.raises(SparkConnectGrpcException):
        drop(source.pipeline, lost, "x")
    drop(source.pipeline, source.session, "x")
    assert refs(source) == [{"main"}] * 2
