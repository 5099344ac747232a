"""What a tick decides, as pure functions: reconciling chunks, runs, back-off, heartbeats."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import psycopg
import pytest
from dagster._core.instance import InstanceRef
from dagster._serdes import deserialize_value, serialize_value

from cdc_assets.config.source import parse_config
from cdc_assets.dagster.names import FAILED_TAG, SEVERAL, TABLE_TAG, TableAssets, run_tags
from cdc_assets.dagster.sensors import checks, flusher, materializer, runs, sessions, snapshot
from cdc_assets.dagster.sensors.pace import PACE_SECONDS, UnderWay
from cdc_assets.dagster.sensors.runs import PastRun, delay_seconds, failures_in_a_row, wait_seconds
from cdc_assets.log.copies.chunks import ChunkProgress
from cdc_assets.observe.status import SourceStatus, TableStatus
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.ctid import plan_chunks
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId


def _names(**freshness: str) -> TableAssets:
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": "postgresql://nowhere/db"},
            "tables": [{"name": "public.t", "freshness": freshness}],
        },
        "test",
    )
    return TableAssets(config, TableId("public", "t"))


NAMES = _names(warn="60s", fail="5m")
CONFIG = NAMES.config
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _plan(landed: int, epoch: int = 1) -> tuple[ChunkProgress, ...]:
    return tuple(
        ChunkProgress(c.key(epoch), c, "landed" if i < landed else "planned", 1, 1, 1.0)
        for i, c in enumerate(plan_chunks(4, 1))
    )


def _copy(
    landed: int,
    *,
    state: str = "copying",
    known: int = 4,
    marked: int | None = None,
    active: bool = False,
    wait: float = 0.0,
    epoch: int = 1,
) -> snapshot.Copy:
    keys = [chunk.key for chunk in _plan(0, 1)]
    return snapshot.Copy(
        NAMES,
        state,
        _plan(landed, epoch),
        frozenset(keys[:known]),
        frozenset(keys[: landed if marked is None else marked]),
        active,
        wait,
    )


KEYS = [chunk.key for chunk in _plan(0)]


def test_a_new_copy_gets_its_partitions_and_one_run_over_all_of_them() -> None:
    decision = snapshot.decide(_copy(0, known=0), may_run=True)
    assert decision == snapshot.Decision(tuple(KEYS), (), (), (KEYS[0], KEYS[-1]))


def test_a_killed_copy_goes_on_where_it_was_and_marks_what_landed_unsaid() -> None:
    decision = snapshot.decide(_copy(2, marked=1), may_run=True)
    assert decision.run == (KEYS[2], KEYS[3])
    assert [chunk.key for chunk in decision.mark] == [KEYS[1]]


@pytest.mark.parametrize(
    "copy",
    [_copy(1, active=True), _copy(1, wait=3.0), _copy(4, state="streaming")],
    ids=["a run is at it", "backing off", "complete"],
)
def test_no_second_run(copy: snapshot.Copy) -> None:
    assert snapshot.decide(copy, may_run=True).run is None


def test_no_run_beyond_max_parallel_tables() -> None:
    assert snapshot.decide(_copy(1), may_run=False).run is None


def test_an_active_run_marks_its_own_chunks() -> None:
    assert snapshot.decide(_copy(2, marked=0, active=True), may_run=True).mark == ()


def test_a_tick_looks_again_while_a_copy_is_at_work() -> None:
    with pytest.raises(UnderWay, match="a run is at it"):
        snapshot._result(CONFIG, [_copy(2, active=True)], 1)


def test_landed_chunks_whose_copy_nobody_finished_get_a_run_that_finishes_it() -> None:
    assert snapshot.decide(_copy(4), may_run=True).run == (KEYS[-1], KEYS[-1])


def test_partitions_of_an_old_epoch_are_deleted() -> None:
    decision = snapshot.decide(_copy(0, epoch=2), may_run=True)
    assert decision.delete == tuple(KEYS)
    assert decision.add[0].startswith("0002:")


def _small(*names: str, failed: bool = False) -> list[snapshot.Copy]:
    """Tables of one chunk that wait to be copied."""
    [chunk, *_] = _plan(0)
    return [
        replace(
            _copy(0),
            names=replace(NAMES, table=TableId("public", name)),
            plan=(chunk,),
            known=frozenset([chunk.key]),
            failed=failed,
        )
        for name in names
    ]


def _asked(copies: list[snapshot.Copy], at_work: int = 0) -> list[list[str]]:
    """The tables of each run that is asked for."""
    result = snapshot._result(MANY, copies, at_work)
    assert isinstance(result, dg.SensorResult)
    return [[key.path[-1] for key in r.asset_selection or ()] for r in result.run_requests or ()]


MANY = parse_config(
    {
        "name": "src",
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": f"public.{name}"} for name in ("t", *"abcde")],
        "snapshot": {"max_parallel_tables": 2},
    },
    "test",
)


def test_small_tables_share_a_run_and_a_large_one_has_its_own() -> None:
    assert _asked([*_small("a"), _copy(0), *_small("b", "c")]) == [["t"], ["a", "b", "c"]]
    assert _asked([*_small("a"), _copy(0), *_small("b", "c")], at_work=1) == [["a", "b", "c"]]
    assert _asked([_copy(0), *_small("a", "b")], at_work=1) == [["t"]]
    with pytest.raises(UnderWay, match="its turn comes"):  # and it looks again, in a second
        _asked(_small("a", "b"), at_work=2)


def test_a_shared_run_has_no_range_of_partitions_and_says_what_it_is() -> None:
    result = snapshot._result(MANY, _small("a", "b"), 0)
    assert isinstance(result, dg.SensorResult)
    [request] = result.run_requests or ()
    assert request.tags == {**run_tags(CONFIG, "snapshot"), TABLE_TAG: SEVERAL}


def test_a_shared_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "TABLES_A_RUN", 2)
    assert _asked(_small(*"abcde")) == [["a", "b"], ["c", "d"]]


def test_a_small_table_that_failed_has_a_run_of_its_own() -> None:
    copies = [*_small("a"), *_small("b", failed=True), *_small("c")]
    assert _asked(copies) == [["b"], ["a", "c"]]


def _past(*succeeded: bool, **more: Any) -> list[PastRun]:
    return [
        PastRun(ok, NOW - timedelta(seconds=number), **({} if ok else more))
        for number, ok in enumerate(succeeded)
    ]


def test_back_off_doubles_and_is_capped() -> None:
    assert [delay_seconds(n) for n in (0, 1, 2, 3, 99)] == [0.0, 0.0, 6.0, 12.0, 600.0]
    assert failures_in_a_row(_past(False, False, True, False)) == 2
    assert wait_seconds(_past(False, False), NOW + timedelta(seconds=5)) == 1.0
    assert wait_seconds(_past(True, False), NOW) == 0.0


def test_a_table_is_not_blamed_for_another_ones_failure() -> None:
    for table, seconds in (("public.bad", 0.0), ("public.t", 6.0)):
        past = _past(False, False, failed_tables=frozenset({table}))
        assert wait_seconds(past, NOW, NAMES) == seconds


def test_a_run_without_the_table_ends_no_back_off_of_it() -> None:
    without = PastRun(succeeded=True, ended_at=NOW, assets=frozenset({dg.AssetKey("other")}))
    assert wait_seconds([without, *_past(False, False)], NOW, NAMES) == 6.0
    within = PastRun(succeeded=True, ended_at=NOW, assets=frozenset({NAMES.lake}))
    assert wait_seconds([within, *_past(False, False)], NOW, NAMES) == 0.0


def _look(
    *,
    pending: int = 0,
    reported: float | None = 5.0,
    state: str = "streaming",
    wait: float = 0.0,
    altered: bool = False,
) -> materializer.Look:
    status = TableStatus(
        *("public.t", "src.t", state, None, 1, "0/1", "0/10", 0, 0.0, pending, 1, 1, 1),
        altered=altered,
    )
    return materializer.Look(NAMES, status, reported, wait)


def test_a_backlog_gets_a_run_unless_one_is_active_or_the_table_backs_off() -> None:
    to_merge = materializer.to_merge
    assert to_merge([_look(pending=3)], active=False, proven=True) == (NAMES,)
    assert to_merge([_look(pending=3)], active=True, proven=True) == ()
    assert to_merge([_look(pending=3, wait=9.0)], active=False, proven=True) == ()
    assert to_merge([_look(pending=3, state="parked")], active=False, proven=True) == ()
    assert to_merge([_look()], active=False, proven=True) == ()


def test_a_run_is_relieved_soon_where_a_table_waits_for_its_end() -> None:
    other = dg.AssetKey("other")
    run = dg.DagsterRun(job_name="j", asset_selection=frozenset({NAMES.lake}))
    awaited = runs.is_awaited
    assert not awaited(run, {NAMES.lake})
    assert awaited(run, {NAMES.lake, other})  # one that was parked, paused or failing at its launch
    assert not awaited(dg.DagsterRun(job_name="j"), {other})  # it serves all
    assert awaited(run.with_tags({FAILED_TAG: "[]"}), set())


def test_a_run_that_a_lock_holds_up_keeps_only_the_table_that_it_is_at() -> None:
    a, b, c = (dg.AssetKey(name) for name in "abc")
    several = dg.DagsterRun(job_name="j", asset_selection=frozenset({a, b}))
    alone = dg.DagsterRun(job_name="j", asset_selection=frozenset({c}))
    assert snapshot.at_work([several, alone], (), ()) == {a, b, c}
    assert snapshot.at_work([several, alone], {several.run_id}, {a}) == {a, c}


def test_a_schema_change_that_no_row_tells_gets_a_run_once_the_log_is_level() -> None:
    look = _look(altered=True, reported=99.0)
    assert materializer.to_merge([look], active=False, proven=True) == (NAMES,)
    assert materializer.to_merge([look], active=False, proven=False) == ()
    assert materializer.due([look], proven=True) == []


def test_a_run_is_given_every_table_that_may_go_on() -> None:
    looks = [_look(pending=3), _look(), _look(state="copying"), _look(wait=9.0)]
    assert len(materializer.to_merge(looks, active=False, proven=True)) == 3
    assert materializer.to_merge(looks[1:], active=False, proven=True) == ()


def test_a_table_that_was_just_copied_gets_its_first_report_from_a_run() -> None:
    looks = [_look(reported=None)]
    assert materializer.to_merge(looks, active=False, proven=True) == (NAMES,)
    assert materializer.due(looks, proven=True) == []


@pytest.mark.parametrize(
    ("look", "proven", "heartbeat"),
    [
        (_look(reported=21.0), True, True),  # the table warns after 60 s
        (_look(reported=19.0), True, False),
        (_look(reported=21.0), False, False),
        (_look(reported=21.0, pending=1), True, False),
        (_look(reported=21.0, state="copying"), True, False),
    ],
)
def test_only_a_table_proven_level_gets_a_heartbeat(
    look: materializer.Look, proven: bool, heartbeat: bool
) -> None:
    assert bool(materializer.due([look], proven=proven)) is heartbeat


def test_a_table_that_may_be_old_gets_fewer_heartbeats() -> None:
    names = _names(warn="1h", fail="2h")
    for seconds, is_due in ((1769.0, False), (1770.0, True)):
        look = replace(_look(reported=seconds), names=names)
        assert bool(materializer.due([look], proven=True)) is is_due


@pytest.mark.parametrize("apart", [PACE_SECONDS, 20.0, 2.0 * PACE_SECONDS])
def test_late_ticks_prove_that_a_quiet_log_is_level(
    apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its WAL grows a little, and its log follows every ten seconds."""
    proven = list[bool]()
    monkeypatch.setattr(materializer, "_ends", {})
    for tick in range(10):
        now = 1000.0 + tick * apart
        status = SimpleNamespace(applied_lsn="0/0", lag_bytes=int(now * 1000))
        flushed = Lsn(int((now - now % 10.5) * 1000))
        found = SimpleNamespace(flusher=SimpleNamespace(flushed_lsn=flushed), tables=[status])
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        proven.append(materializer._is_proven(CONFIG, cast("SourceStatus", found)))
    assert sum(proven) >= 5


def test_a_staged_log_is_reported_at_first_sight_then_once_a_minute_if_it_grew() -> None:
    last = flusher.Reported(100.0, 10)
    assert flusher.due(None, 0, 0.0)
    assert not flusher.due(last, 20, 130.0)
    assert flusher.due(last, 20, 160.0)
    assert not flusher.due(last, 10, 999.0)


def test_checks_pause_longer_than_they_took_and_new_tables_come_sooner() -> None:
    assert checks.wait_seconds(None, 0.0, unchecked=[]) == 0.0
    assert checks.wait_seconds((0.0, 2.0), 10.0, unchecked=[]) == 592.0
    assert checks.wait_seconds((0.0, 2.0), 10.0, unchecked=["src/t"]) == 32.0
    assert checks.wait_seconds((0.0, 100.0), 100.0, unchecked=[]) == 2000.0


def test_ticks_of_a_code_server_share_one_instance(tmp_path: Path) -> None:
    def ticked(folder: Path) -> dg.DagsterInstance:
        """The instance of a tick, whose reference came over the wire as each tick's does."""
        folder.mkdir(exist_ok=True)
        told = serialize_value(InstanceRef.from_dir(str(folder)))
        ref = deserialize_value(told, InstanceRef)
        with dg.SensorEvaluationContext(ref, None, None, None, None, "r") as context:
            sessions.keep_instance(context)
            return context.instance

    first = ticked(tmp_path / "a")
    assert ticked(tmp_path / "a") is first
    assert ticked(tmp_path / "b") is not first
    assert first.get_runs() == []  # it outlives its tick


def test_sensors_that_tick_together_look_at_the_source_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But one that acts sees none of another's, and nobody what is old, failed or known to it."""
    looks, now = list[object](), [100.0]

    def collect(_pipeline: object) -> object:
        looks.append(object())
        if len(looks) == 4:
            raise psycopg.OperationalError("gone")
        return looks[-1]

    monkeypatch.setattr(sessions, "collect", collect)
    monkeypatch.setattr(sessions, "_looks", {})
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pipeline = cast("Pipeline", SimpleNamespace(config=CONFIG))

    def told(sensor: str) -> object:
        return sessions.status_of(pipeline, sensor, within_seconds=sessions.LOOK_SECONDS)

    first = sessions.status_of(pipeline, "acts")
    assert told("a") is first
    second = told("a")
    assert second is not first
    assert told("b") is second
    now[0] += sessions.LOOK_SECONDS
    third = told("b")
    assert third not in (first, second)
    with pytest.raises(psycopg.OperationalError):
        sessions.status_of(pipeline, "acts")
    assert told("b") is looks[4]
    assert sessions.status_of(pipeline, "acts") is looks[5]


def test_no_sensor_waits_for_another_ones_look(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def collect(_pipeline: object) -> object:
        together.wait(20)  # a source that hangs, for each of them
        raise psycopg.OperationalError("gone")

    monkeypatch.setattr(sessions, "collect", collect)
    monkeypatch.setattr(sessions, "_looks", {})
    pipeline = cast("Pipeline", SimpleNamespace(config=CONFIG))

    def look(sensor: str) -> object:
        return sessions.status_of(pipeline, sensor, within_seconds=sessions.LOOK_SECONDS)

    with ThreadPoolExecutor(3) as threads:
        looks = [threads.submit(look, sensor) for sensor in ("a", "b", "c")]
        errors = [one.exception() for one in looks]
    assert [type(error) for error in errors] == [psycopg.OperationalError] * 3
