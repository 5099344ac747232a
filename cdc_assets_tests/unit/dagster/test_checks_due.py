"""Which tables' checks are due: those that changed, failed, or weren't looked at for long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.names import TableAssets
from cdc_assets.dagster.sensors.checks import AGAIN_SECONDS, Look, Memory, again_seconds
from cdc_assets.observe.status import TableStatus
from cdc_assets.postgres.names import TableId

CONFIG = {
    "name": "src",
    "postgres": {"dsn": "postgresql://nowhere/db"},
    "tables": [{"name": "public.t"}],
}
NAMES = TableAssets(parse_config(CONFIG, "test"), TableId("public", "t"))
KEY = NAMES.lake
LOOK = Look("streaming", 1, 10, waits=False, late=False)
AT = 1_000_000.0


def _run(*, succeeded: bool, created: float) -> dg.RunRecord:
    status = dg.DagsterRunStatus.SUCCESS if succeeded else dg.DagsterRunStatus.FAILURE
    at = datetime.fromtimestamp(created, UTC)
    return dg.RunRecord(1, dg.DagsterRun("check", status=status), at, at)


def _checked(*, failed: bool = False, succeeded: bool = True, created: float = AT) -> Memory:
    def failing(keys: Iterable[dg.AssetKey]) -> set[dg.AssetKey]:
        return set(keys) if failed else set()

    memory = Memory()
    memory.ask({KEY: LOOK}, AT)
    assert memory.asks
    memory.settle(_run(succeeded=succeeded, created=created), failing)
    assert not memory.asks
    return memory


def _is_due(memory: Memory, look: Look = LOOK, seconds: float = 700.0) -> bool:
    return memory.is_due(KEY, look, AT + seconds, AGAIN_SECONDS)


def test_checks_cost_in_proportion_to_changes() -> None:
    assert _is_due(Memory())
    assert not _is_due(_checked())
    assert _is_due(_checked(), seconds=AGAIN_SECONDS)


@pytest.mark.parametrize(
    "look",
    [
        replace(LOOK, applied_offset=11),
        replace(LOOK, epoch=2),
        replace(LOOK, state="parked"),
        replace(LOOK, late=True),
        replace(LOOK, waits=True),
    ],
)
def test_a_table_that_changed_is_checked(look: Look) -> None:
    assert _is_due(_checked(), look)


def test_a_table_whose_changes_wait_is_checked_each_time() -> None:
    waits = replace(LOOK, waits=True)
    memory = Memory()
    memory.ask({KEY: waits}, AT)
    memory.settle(_run(succeeded=True, created=AT), lambda _: set())
    assert _is_due(memory, waits)


def test_a_table_that_failed_is_checked_until_it_passes() -> None:
    memory = _checked(failed=True)
    assert _is_due(memory)
    memory.ask({KEY: LOOK}, AT + 700)
    memory.settle(_run(succeeded=True, created=AT + 701), lambda _: set())
    assert not _is_due(memory)


def test_a_run_that_failed_or_never_came_checked_nothing() -> None:
    assert _is_due(_checked(succeeded=False))
    assert _is_due(_checked(created=AT - 60))  # the one before
    memory = Memory()
    memory.ask({KEY: LOOK}, AT)
    memory.settle(None, lambda _: set())
    assert _is_due(memory)
    assert not memory.knows(KEY)


def test_late_is_what_the_lag_check_warns_of() -> None:
    status = TableStatus("public.t", "src.t", "streaming")
    for seconds, late in ((299.0, False), (301.0, True), (None, False)):
        seen = Look.of(replace(status, lag_seconds=seconds), NAMES, unfinished=False)
        assert seen.late is late


def test_a_table_waits_while_changes_or_files_of_it_do() -> None:
    status = TableStatus("public.t", "src.t", "streaming")
    assert not Look.of(status, NAMES, unfinished=False).waits
    assert Look.of(status, NAMES, unfinished=True).waits
    assert Look.of(replace(status, pending_rows=1), NAMES, unfinished=False).waits


def test_quiet_tables_are_checked_before_an_alert_tells_of_them() -> None:
    assert again_seconds(NAMES.config) == AGAIN_SECONDS
    often = parse_config({**CONFIG, "verify": {"every": "1h", "fail_after": "4h"}}, "test")
    assert timedelta(seconds=again_seconds(often)) == timedelta(hours=3)
