"""When an asset on lake tables is built again: once their rows changed, and not too often."""

# No postponed annotations here: Dagster looks at what an operation returns.
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from cdc_assets.dagster.downstream import after_merges
from cdc_assets.dagster.metadata import DATA_VERSION_TAG

NOON = datetime(2026, 1, 1, 12, 0, 30, tzinfo=UTC)


@dg.asset(deps=["busy", "quiet"], automation_condition=after_merges("*/5 * * * *"))
def mart() -> None: ...


@dg.multi_asset(name="materialize", specs=[dg.AssetSpec("busy"), dg.AssetSpec("quiet")])
def merging() -> Iterator[dg.MaterializeResult[None]]:
    yield from ()


class Daemon:
    """Evaluates as the automation sensor does, on the day's clock of the test."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self.defs = dg.Definitions([mart, merging])
        self._cursor: object = None

    def report(self, table: str, version: str) -> None:
        self.instance.report_runless_asset_event(
            dg.AssetMaterialization(table, tags={DATA_VERSION_TAG: version})
        )

    def asks(self, minutes: float) -> bool:
        """Whether it asks for a run so long after noon; what it asks for is built at once."""
        result = dg.evaluate_automation_conditions(
            defs=self.defs,
            instance=self.instance,
            cursor=self._cursor,  # type: ignore[arg-type]
            evaluation_time=NOON + timedelta(minutes=minutes),
        )
        self._cursor = result.cursor
        if result.total_requested:
            self.instance.report_runless_asset_event(dg.AssetMaterialization("mart"))
        return bool(result.total_requested)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon(dg.DagsterInstance.ephemeral())


def test_it_is_built_when_rows_changed_and_at_most_once_in_the_cap(daemon: Daemon) -> None:
    assert not daemon.asks(0.0)
    daemon.report("busy", "1:10")
    assert not daemon.asks(0.25), "a dependency is still missing"
    daemon.report("quiet", "1:0")
    assert daemon.asks(0.5)
    for quarter in range(3, 18):
        daemon.report("busy", f"1:{quarter * 10}")
        assert not daemon.asks(quarter / 4), "it was built since 12:00"
    assert daemon.asks(4.75), "12:05 is over; what changed before isn't forgotten"
    assert not daemon.asks(5.0)


def test_a_report_without_new_rows_is_no_reason(daemon: Daemon) -> None:
    daemon.asks(0.0)
    daemon.report("busy", "1:10")
    daemon.report("quiet", "1:0")
    assert daemon.asks(0.5)
    for minute in range(1, 12):
        daemon.report("busy", "1:10")
        daemon.report("quiet", "1:0")
        assert not daemon.asks(minute + 0.5)
    daemon.report("quiet", "2:0")
    assert daemon.asks(12.5), "another copy has other rows"


def test_a_run_that_merges_for_ever_is_not_waited_for(daemon: Daemon) -> None:
    daemon.asks(0.0)
    daemon.report("busy", "1:10")
    daemon.report("quiet", "1:0")
    job = daemon.defs.resolve_implicit_global_asset_job_def()
    daemon.instance.create_run_for_job(
        job,
        status=dg.DagsterRunStatus.STARTED,
        asset_selection=frozenset({dg.AssetKey("busy"), dg.AssetKey("quiet")}),
    )
    assert daemon.asks(0.5)
