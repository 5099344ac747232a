"""A table that didn't change isn't cared for at each turn, nor compared; a table that did is."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.checks.sample import NAME
from cdc_assets.dagster.names import all_tables, run_tags
from cdc_assets.log.session import LogSession
from cdc_assets.log.store import LogStore
from cdc_assets.log.verified import (
    compared_at_rest,
    note_written,
    remember_compared,
    remember_missed,
    version,
)
from cdc_assets.maintenance.compact import NOT_COMPACTED, Busy, Compacted
from cdc_assets.maintenance.due import due
from cdc_assets.marks.make import mark
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.integration.maintenance.care import SETUP, M, P, maintained, settings
from cdc_assets_tests.support.lake import Lake, NewLake

pytestmark = pytest.mark.spark

HALF_A_DAY = timedelta(hours=12)


@pytest.fixture
def source(copied_lake: NewLake) -> Iterator[Lake]:
    with copied_lake(SETUP, "m", "p") as opened:
        yield opened


def _due(source: Lake, pipeline: Pipeline | None = None) -> set[TableId]:
    return {*due(pipeline or source.pipeline, source.tables)}


def _later(source: Lake, interval: str) -> None:
    """So long later: what was noted was noted so long ago."""
    until = f"split_part(value, ' ', 2)::timestamptz - interval '{interval}'"
    source.execute(
        "update _pg2iceberg.pipeline_meta set value = concat_ws(' ', split_part(value, ' ', 1),"
        f" to_jsonb({until}) #>> '{{}}', split_part(value, ' ', 3))"
        " where key like 'maintenance.cared:%'"
    )


def compared_now(store: LogStore, table: TableId, share: float, **found: int) -> None:
    remember_compared(store, table, share, saw=version(store, table), **found)


def _ended(tags: dict[str, str], status: dg.DagsterRunStatus) -> dg.DagsterRun:
    return dg.DagsterRun("maintain_src_tables", status=status, tags=tags)


def test_care_is_due_after_a_merge_and_once_a_day(source: Lake) -> None:
    assert _due(source) == {M, P}
    maintained(source, source.pipeline)
    assert _due(source) == set()
    source.execute("update m set v = 'changed' where id = 1")
    source.catch_up(M)
    assert _due(source) == {M}
    maintained(source, source.pipeline, M)
    assert _due(source) == set()
    source.pipeline.store.park(P, "for the test")
    assert _due(source) == {P}
    maintained(source, source.pipeline, P)
    assert _due(source) == set()
    _later(source, "24 hours")
    assert _due(source) == {M, P}


@pytest.mark.parametrize("of", ["mat_cursor", "tables"])
def test_a_change_is_seen_whatever_the_coordination_servers_clock_says(
    source: Lake, of: str
) -> None:
    """As of a clock that was set back, or of a transaction that is open while others look."""
    source.execute("update m set v = 'changed' where id = 1")
    source.catch_up(M)
    maintained(source, source.pipeline)
    compared_now(source.pipeline.store, M, 0.0)
    source.execute(
        f"update _pg2iceberg.{of} set updated_at = updated_at - interval '1 hour'"
        f" where table_name = '{M}'"
    )
    assert _due(source) == {M}
    assert compared_at_rest(source.pipeline.store, HALF_A_DAY) == set()


def test_rows_written_in_the_midst_of_care_are_cared_for(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_meanwhile(*_: object, **__: object) -> Compacted:
        note_written(source.pipeline.store, M)
        return NOT_COMPACTED

    with monkeypatch.context() as patched:
        patched.setattr("cdc_assets.maintenance.run.compact", written_meanwhile)
        maintained(source, source.pipeline, M)
    assert M in _due(source)


def test_care_by_other_settings_is_due(source: Lake) -> None:
    maintained(source, source.pipeline)
    with settings(source) as other:
        assert _due(source, other) == {M, P}
        maintained(source, other, M)
        assert _due(source, other) == {P}
    assert _due(source) == {M}


def test_care_that_could_not_be_done_is_due_at_the_next_turn(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise Busy("somebody writes")

    with monkeypatch.context() as patched:
        patched.setattr("cdc_assets.maintenance.run.compact", busy)
        assert maintained(source, source.pipeline)[M].left_alone == "somebody writes"
    assert _due(source) == {M, P}
    maintained(source, source.pipeline, budget_seconds=0.0)
    assert _due(source) == {M, P}


def test_snapshots_that_are_too_many_are_looked_at_once_they_are_old(source: Lake) -> None:
    with settings(source, keep_snapshots={"count": 1, "age": "10m"}) as pipeline:
        source.execute("update m set v = 'changed' where id = 1")
        source.catch_up(M)
        assert maintained(source, pipeline)[M].snapshots > 1
        assert _due(source, pipeline) == set()
        _later(source, "10 minutes")
        assert _due(source, pipeline) == {M}


def test_snapshots_that_tags_keep_are_not_looked_at_again_and_again(
    source: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = LogSession.server_now
    with settings(source, keep_snapshots={"count": 1, "age": "10m"}) as pipeline:
        for number in range(3):
            source.execute(f"update m set v = 'changed{number}' where id = 1")
            source.catch_up(M)
            mark(source.pipeline, source.session, f"m{number}")
        monkeypatch.setattr(LogSession, "server_now", lambda log: now(log) + timedelta(days=2))
        assert maintained(source, pipeline)[M].snapshots > 1
        _, until, _ = (source.pipeline.store.meta(f"maintenance.cared:{M}") or "").split()
        rests = datetime.fromisoformat(until) - source.pipeline.store.server_now()
        assert timedelta(hours=23) < rests <= timedelta(days=1)


def test_rows_that_were_repaired_are_cared_for(source: Lake) -> None:
    table = source.lake_table(M)
    source.verify()
    maintained(source, source.pipeline)
    source.session.sql(f"update {table.sql_name} set v = 'spoilt' where id = 1")
    source.verify(repair=True)
    assert source.equal(M)
    assert _due(source) == {M}


def test_a_comparison_is_due_of_what_changed_or_was_not_compared_whole(source: Lake) -> None:
    store = source.pipeline.store

    def resting(rest: timedelta = HALF_A_DAY) -> frozenset[TableId]:
        return compared_at_rest(store, rest)

    assert resting() == set()
    source.verify()  # beside the rounds, and no run of the check whose age alerts look at
    assert resting() == set()
    compared_now(store, M, 0.0)
    compared_now(store, P, 0.5)
    assert resting() == {M}
    compared_now(store, P, 0.0)
    assert resting() == {M, P}
    assert resting(timedelta(0)) == set()
    remember_missed(store, P)
    assert resting() == {M}
    source.execute("update m set v = 'changed' where id = 1")
    source.catch_up(M)
    assert resting() == set()
    compared_now(store, M, 0.0, differs=1)
    assert resting() == set()


def test_the_schedules_ask_for_the_tables_that_are_due(source: Lake, tmp_path: Path) -> None:
    defs, names = build_defs(source.config), {n.table: n for n in all_tables(source.config)}

    def asked(schedule: str) -> Any:
        with (
            dg.DagsterInstance.local_temp(str(tmp_path)) as instance,
            dg.build_schedule_context(instance) as context,
        ):
            tick = defs.resolve_schedule_def(schedule).evaluate_tick(context)
        if tick.skip_message is not None:
            return tick.skip_message
        (request,) = tick.run_requests or ()
        return [*(request.asset_selection or ()), *(request.asset_check_keys or ())]

    assert asked("maintenance_src") == [names[table].maintenance for table in (M, P)]
    assert asked("sample_src") == [dg.AssetCheckKey(names[t].lake, NAME) for t in (M, P)]
    maintained(source, source.pipeline, P)
    compared_now(source.pipeline.store, M, 0.0)
    assert asked("maintenance_src") == [names[M].maintenance]
    assert asked("sample_src") == [dg.AssetCheckKey(names[P].lake, NAME)]
    maintained(source, source.pipeline, M)
    compared_now(source.pipeline.store, P, 0.0)
    # Of no table that is due: its run prunes Dagster's history.
    assert asked("maintenance_src") == [names[M].maintenance]
    tags = run_tags(source.config, "maintain")
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.add_run(_ended(tags, dg.DagsterRunStatus.FAILURE))
    assert asked("maintenance_src") == [names[M].maintenance]
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.add_run(_ended(tags, dg.DagsterRunStatus.SUCCESS))
    said = "Nothing has changed since the last run."
    assert [asked("maintenance_src"), asked("sample_src")] == [said, said]
