"""Which tables' checks are due: those that changed, failed, or weren't looked at for long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest
from dagster._core.utils import make_new_run_id

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.names import TableAssets
from cdc_assets.dagster.sensors.checks import (
    AGAIN_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Look,
    Memory,
    again_seconds,
    due_tables,
    times,
    wait_seconds,
)
from cdc_assets.dagster.sensors.schedules import rest
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


def _run(tags: dict[str, str], *, succeeded: bool = True, again: bool = False) -> dg.RunRecord:
    """``again``: executed again by a person, with the tags of the first one."""
    status = dg.DagsterRunStatus.SUCCESS if succeeded else dg.DagsterRunStatus.FAILURE
    parent = make_new_run_id() if again else None
    run = dg.DagsterRun("check", status=status, tags=tags, parent_run_id=parent, root_run_id=parent)
    return dg.RunRecord(1, run, datetime.now(UTC), datetime.now(UTC))


def _checked(*, failed: bool = False, **run: bool) -> Memory:
    def failing(keys: Iterable[dg.AssetKey]) -> set[dg.AssetKey]:
        return set(keys) if failed else set()

    memory = Memory()
    tags = memory.ask({KEY: LOOK}, AT)
    assert memory.asks
    memory.settle(_run(tags, **run), failing)
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
    memory.settle(_run(memory.ask({KEY: waits}, AT)), lambda _: set())
    assert _is_due(memory, waits)


def test_a_table_that_failed_is_checked_until_it_passes() -> None:
    memory = _checked(failed=True)
    assert _is_due(memory)
    memory.settle(_run(memory.ask({KEY: LOOK}, AT + 700)), lambda _: set())
    assert not _is_due(memory)


def test_a_run_that_failed_or_never_came_checked_nothing() -> None:
    assert _is_due(_checked(succeeded=False))
    assert _is_due(_checked(again=True))  # perhaps a part of it
    for last in (None, _run(Memory().ask({KEY: LOOK}, AT))):  # none, and the one before
        memory = Memory()
        memory.ask({KEY: LOOK}, AT)
        memory.settle(last, lambda _: set())
        assert _is_due(memory)
        assert not memory.knows(KEY)


def test_a_table_that_rests_is_checked_for_all_but_what_is_known_of_it() -> None:
    memory = _checked()

    def names(look: Look) -> set[str]:
        return {key.name for key in memory.checks_of(NAMES, look)}

    rested = {"primary_key_unique", "values_representable", "ready"}
    assert names(LOOK) == rested
    for changed in (replace(LOOK, late=True), replace(LOOK, applied_offset=11)):
        assert names(changed) == {*rested, "replication_lag"}


def test_a_clock_that_is_set_back_holds_up_no_check() -> None:
    assert _is_due(_checked(), seconds=-60.0)


def _due(look: Look, *, copying: bool = False, seconds: float = 700.0) -> bool:
    memory = _checked()
    return bool(due_tables(memory, [(NAMES, look)], AT + seconds, AGAIN_SECONDS, copying=copying))


def test_a_table_that_was_parked_is_checked_once_more_and_says_so() -> None:
    parked = replace(LOOK, state="parked")
    assert _due(parked)
    assert not _due(replace(LOOK, state="waiting"))


def test_while_tables_are_copied_only_what_was_checked_long_ago_is() -> None:
    changed = replace(LOOK, applied_offset=11)
    assert not _due(changed, copying=True)
    assert _due(changed, copying=True, seconds=AGAIN_SECONDS)
    assert not due_tables(Memory(), [(NAMES, LOOK)], AT, AGAIN_SECONDS, copying=True)


def test_a_run_that_never_started_makes_no_pause() -> None:
    cancelled = dg.RunRecord(1, dg.DagsterRun("check"), datetime.now(UTC), datetime.now(UTC))
    began, ended = times(cancelled._replace(start_time=None, end_time=AT)) or (0.0, 0.0)
    assert (began, ended) == (AT, AT)
    assert wait_seconds((began, ended), AT, unchecked=["t"]) == 0.0
    assert wait_seconds((0.0, AT), AT, unchecked=["t"]) == LONGEST_PAUSE_SECONDS


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


@pytest.mark.parametrize("hours", [1, 2, 6, 12])
@pytest.mark.parametrize("fail_after", ["2h", "1d", "7d"])
def test_no_comparison_is_put_off_until_an_alert_tells_of_it(hours: int, fail_after: str) -> None:
    every = timedelta(hours=hours)
    config = parse_config({**CONFIG, "verify": {"fail_after": fail_after}}, "test")
    oldest = max(rest(config, every) + every, every)
    assert oldest <= max(timedelta(hours=22), every)
    assert oldest < config.verify.fail_after or every >= config.verify.fail_after
