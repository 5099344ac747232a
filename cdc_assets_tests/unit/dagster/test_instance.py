"""The instance of the shipped ``dagster.yaml``: Dagster's own files, with engines that are kept."""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psutil
import pytest
from dagster._core.definitions.freshness import FreshnessState, FreshnessStateChange
from dagster._core.instance import InstanceRef
from dagster._core.scheduler.instigation import InstigatorType, TickData, TickStatus
from dagster._core.storage.event_log import SqliteEventLogStorage, sql_event_log
from dagster._serdes import deserialize_value, serialize_value
from dagster._time import get_current_timestamp

from cdc_assets.dagster import instance as kept
from cdc_assets.dagster import internals
from cdc_assets.dagster.names import WORK_TAG, WORKS

SHIPPED = Path(__file__).parents[3] / "dagster.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(SHIPPED, tmp_path)
    return tmp_path


@pytest.fixture
def instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    # As other processes get it: over the wire.
    ref = deserialize_value(serialize_value(InstanceRef.from_dir(str(folder))), InstanceRef)
    with dg.DagsterInstance.from_ref(ref) as found:
        yield found


def _work(instance: dg.DagsterInstance, number: int) -> None:
    data = TickData("o", "n", InstigatorType.SENSOR, TickStatus.STARTED, float(number), None)
    instance.update_tick(instance.create_tick(data).with_status(TickStatus.SKIPPED))
    instance.report_runless_asset_event(dg.AssetMaterialization("a", metadata={"n": number}))
    instance.get_runs(dg.RunsFilter(tags={"a": "b"}))


def test_the_shipped_yaml_names_it_and_a_storage_of_ones_own_wins(
    instance: dg.DagsterInstance, folder: Path
) -> None:
    assert isinstance(instance, kept.Instance)
    assert isinstance(instance.event_log_storage, kept.Events)
    assert isinstance(instance.run_storage, kept.Runs)
    assert isinstance(instance.schedule_storage, kept.Ticks)
    own = f"\nstorage:\n  sqlite:\n    base_dir: {folder / 'own'}\n"
    (folder / "dagster.yaml").write_text(SHIPPED.read_text() + own)
    with dg.DagsterInstance.from_config(str(folder)) as other:
        assert not isinstance(other.run_storage, kept.Runs)


def test_what_one_writes_dagsters_own_reads_and_the_other_way_round(
    instance: dg.DagsterInstance, folder: Path
) -> None:
    key = dg.AssetKey("a")
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(folder), config_dir="/")) as plain:
        assert not isinstance(plain, kept.Instance)
        for number, (writer, reader) in enumerate([(instance, plain), (plain, instance)] * 2):
            _work(writer, number)
            event = reader.get_latest_materialization_event(key)
            assert event is not None
            assert event.asset_materialization is not None
            assert event.asset_materialization.metadata["n"].value == number
            assert len(reader.get_ticks("o", "")) == number + 1


def test_a_tick_opens_no_new_connections(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    _work(instance, 0)
    opened: list[str] = []
    connect = sqlite3.dbapi2.connect

    def counted(path: str, *more: object, **named: object) -> object:
        opened.append(Path(path).name)
        return connect(path, *more, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(sqlite3.dbapi2, "connect", counted)
    for number in range(3):
        _work(instance, number)
    assert opened == []


def test_one_that_is_disposed_keeps_no_file_open(folder: Path) -> None:
    ref = InstanceRef.from_dir(str(folder))
    held = list[int]()
    gc.collect()  # what earlier tests left open
    for _ in range(12):
        with dg.DagsterInstance.from_ref(ref) as found:
            _work(found, 0)
        held.append(psutil.Process().num_fds())
    # Threads of earlier tests open and close files of their own.
    assert held[-1] - held[0] < (len(held) - 1) // 2, held


def test_threads_share_it(instance: dg.DagsterInstance) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: _work(instance, number), range(40)))
    assert len(instance.get_ticks("o", "")) == 40
    assert len(instance.fetch_materializations(dg.AssetKey("a"), limit=100).records) == 40


def test_runs_have_their_events(instance: dg.DagsterInstance) -> None:
    @dg.job
    def nothing() -> None:
        dg.op(name="rest")(lambda: None)()

    runs = [nothing.execute_in_process(instance=instance).run_id for _ in range(2)]
    assert all(len(instance.all_logs(run)) > 5 for run in runs)
    assert len(instance.get_runs()) == 2
    instance.delete_run(runs[0])
    assert len(instance.get_runs()) == 1


def test_an_asset_s_event_without_a_run_is_stored_once(
    instance: dg.DagsterInstance, folder: Path
) -> None:
    """And is found by all that asks for such events: by asset, by tag, by time."""
    key = dg.AssetKey("a")
    for number in range(3):
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                key, tags={"dagster/data_version": str(number)}, metadata={"n": number}
            )
        )
    instance.report_runless_asset_event(dg.AssetObservation(key))
    runs = folder / "history" / "runs"
    assert not (runs / ".db").exists()
    assert len(instance.fetch_materializations(key, limit=9).records) == 3
    assert len(instance.fetch_observations(key, limit=9).records) == 1
    tags = instance.get_event_tags_for_asset(key, filter_tags={"dagster/data_version": "1"})
    assert tags == [{"dagster/data_version": "1"}]
    [record] = instance.get_asset_records([key])
    assert record.asset_entry.last_materialization is not None
    assert record.asset_entry.last_materialization.asset_materialization is not None
    assert record.asset_entry.last_materialization.asset_materialization.metadata["n"].value == 2


KEYS = [dg.AssetKey(name) for name in "abc"]


def _say(instance: dg.DagsterInstance, key: dg.AssetKey, state: FreshnessState) -> None:
    change = FreshnessStateChange(
        key=key,
        new_state=state,
        previous_state=FreshnessState.UNKNOWN,
        state_change_timestamp=get_current_timestamp(),
    )
    instance._report_runless_asset_event(change)


def _same(instance: dg.DagsterInstance, folder: Path) -> None:
    """What it answers is what Dagster's own storage answers of the same files."""
    own = SqliteEventLogStorage(str(folder / "history" / "runs"))
    mine = instance.event_log_storage
    assert mine.get_freshness_state_records(KEYS) == own.get_freshness_state_records(KEYS)
    assert mine.get_asset_records(KEYS) == own.get_asset_records(KEYS)


def test_what_an_asset_is_like_is_told_as_dagster_tells_it(
    instance: dg.DagsterInstance, folder: Path
) -> None:
    _same(instance, folder)
    for state in (FreshnessState.PASS, FreshnessState.FAIL):
        for key in KEYS[:2]:
            instance.report_runless_asset_event(dg.AssetMaterialization(key))
            _say(instance, key, state)
            _same(instance, folder)
    with closing(sqlite3.connect(folder / "history" / "runs" / "index.db")) as index, index:
        last = index.execute("select last_materialization from asset_keys where id = 1").fetchone()
        instance.wipe_assets(KEYS[:1])
        _same(instance, folder)
        # By somebody who read it before: it is older than the wipe.
        index.execute("update asset_keys set last_materialization = ? where id = 1", last)
    assert KEYS[0] not in instance.event_log_storage.get_freshness_state_records(KEYS)
    instance.report_runless_asset_event(dg.AssetObservation(KEYS[0]))
    _same(instance, folder)
    instance.report_runless_asset_event(dg.AssetMaterialization(KEYS[0], metadata={"n": 1}))
    _say(instance, KEYS[0], FreshnessState.WARN)
    _same(instance, folder)


def test_an_event_that_was_read_is_not_parsed_again(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed() -> int:
        """How many events are parsed to tell what all assets are like."""
        count = 0

        def counted(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            return deserialize_value(*arguments)

        for module in (kept, sql_event_log):
            monkeypatch.setattr(module, "deserialize_value", counted)
        assert len(instance.event_log_storage.get_freshness_state_records(KEYS)) == len(KEYS)
        assert len(instance.event_log_storage.get_asset_records(KEYS)) == len(KEYS)
        return count

    for key in KEYS:
        instance.report_runless_asset_event(dg.AssetMaterialization(key))
        _say(instance, key, FreshnessState.PASS)
    assert parsed() == 2 * len(KEYS)
    assert parsed() == 0
    instance.report_runless_asset_event(dg.AssetMaterialization(KEYS[0]))
    _say(instance, KEYS[1], FreshnessState.FAIL)
    assert parsed() == 2


def test_a_daemon_fetches_code_locations_rarely_and_before_it_gives_up(folder: Path) -> None:
    """In a process of its own: it is the daemon's setting, which this changes."""
    asked = (
        "from dagster._daemon import controller as c; import dagster as dg;"
        " before = c.RELOAD_WORKSPACE_INTERVAL;"
        f" dg.DagsterInstance.from_config({str(folder)!r});"
        " print(before, c.RELOAD_WORKSPACE_INTERVAL, c.DEFAULT_WORKSPACE_FRESHNESS_TOLERANCE)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120
    )
    before, now, tolerance = map(int, done.stdout.split())
    assert before < now == kept.REFRESH_SECONDS < tolerance


class _Server:
    """Answers as Dagster's code server does, of definitions or of why there are none."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.collected = list[bool]()

    def _get_serialized_external_repository_data(self, _request: object) -> str:
        self.collected.append(gc.isenabled())
        return self.answers.pop(0)


def test_a_code_server_lists_its_definitions_once(folder: Path) -> None:
    kept._answers_once(_Server)
    kept._answers_once(_Server)  # each instance that it opens says so
    asked, other = (
        SimpleNamespace(serialized_repository_python_origin=name, defer_snapshots=True)
        for name in ("asked", "other")
    )
    error = '{"__class__": "RepositoryErrorSnap", "error": {}}'
    server, another = _Server(error, "a list", "another list"), _Server("not this one")
    answer = server._get_serialized_external_repository_data
    assert [answer(asked), answer(asked), answer(asked)] == [error, "a list", "a list"]
    assert answer(other) == "another list"
    assert another._get_serialized_external_repository_data(asked) == "not this one"
    assert server.collected == [False] * 3  # what is listed stays
    assert gc.isenabled()
    # Dagster's own, in a process that is one.
    lines = (
        "from dagster._grpc.server import DagsterApiServer as s; import dagster as dg;"
        f" dg.DagsterInstance.from_config({str(folder)!r});"
        " print(s._get_serialized_external_repository_data.__wrapped__.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "_get_serialized_external_repository_data", done.stderr


def test_a_code_server_with_other_definitions_lists_those() -> None:
    class Server:
        _server_id, answers = "a", 0

        def _get_serialized_external_repository_data(self, _request: object) -> str:
            self.answers += 1
            return f"list of {self._server_id}"

    kept._answers_once(Server)
    server = Server()
    asked = SimpleNamespace(serialized_repository_python_origin="asked", defer_snapshots=True)
    answer = server._get_serialized_external_repository_data
    assert [answer(asked), answer(asked)] == ["list of a"] * 2
    server._server_id = "b"
    assert [answer(asked), answer(asked)] == ["list of b"] * 2
    assert server.answers == 2


@pytest.mark.parametrize("told", [None, "7"])
def test_a_daemon_looks_at_freshness_each_minute_or_as_it_is_told(
    folder: Path, told: str | None
) -> None:
    asked = (
        "from dagster._daemon import controller as c; import dagster as dg;"
        f" instance = dg.DagsterInstance.from_config({str(folder)!r});"
        " print(c.create_daemon_of_type('FRESHNESS_DAEMON', instance).interval_seconds)"
    )
    setting = {} if told is None else {"FRESHNESS_DAEMON_INTERVAL_SECONDS": told}
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, **setting},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(done.stdout) == (kept.FRESHNESS_SECONDS if told is None else int(told))


def test_a_dagster_with_another_freshness_daemon_is_left_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Another:
        def __init__(self, interval_seconds: int = 30, jitter: int = 0) -> None:
            self.given = interval_seconds, jitter

    for module in (SimpleNamespace(FreshnessDaemon=Another), SimpleNamespace()):
        monkeypatch.setitem(sys.modules, internals.FRESHNESS_MODULE, module)
        with dg.DagsterInstance.from_config(str(folder)):
            assert Another().given == (30, 0)


def test_nothing_is_written_of_assets_without_a_freshness_policy(
    instance: dg.DagsterInstance,
) -> None:
    """The daemon writes what changed: first of each asset, unless its state is known."""
    states = instance.get_freshness_state_records(KEYS)
    assert {state.freshness_state for state in states.values()} == {FreshnessState.NOT_APPLICABLE}
    assert list(states) == KEYS
    _say(instance, KEYS[1], FreshnessState.PASS)
    states = instance.get_freshness_state_records(KEYS)
    assert states[KEYS[1]].freshness_state == FreshnessState.PASS
    assert states[KEYS[0]].updated_at.timestamp() == 0  # which Dagster's UI takes for never


def test_long_work_leaves_room_for_merges_and_checks(instance: dg.DagsterInstance) -> None:
    """However many sources there are: a place that is taken is taken for as long as a copy."""
    queue = instance.get_concurrency_config().run_queue_config
    assert queue is not None
    limits = {limit["value"]: limit["limit"] for limit in queue.tag_concurrency_limits}
    assert {limit["key"] for limit in queue.tag_concurrency_limits} == {WORK_TAG}
    assert limits.keys() < set(WORKS)
    assert sum(limits.values()) < queue.max_concurrent_runs - 1
