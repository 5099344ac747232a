"""Dagster's history is bounded, and what it shows of the present stays."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as db
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import (
    InstigatorState,
    InstigatorStatus,
    InstigatorType,
    TickData,
    TickStatus,
)
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.runs.schema import RunsTable
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage

from cdc_assets.config.source import parse_config
from cdc_assets.dagster import history
from cdc_assets.dagster.history import Pruned, prune
from cdc_assets.dagster.instance import Instance
from cdc_assets.dagster.names import TableAssets, run_tags, sensor_name
from cdc_assets.postgres.names import TableId

CONFIG = parse_config(
    {
        "name": "src",
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": "public.t"}],
    },
    "test",
)
KEPT_FOR_EVER = parse_config(
    {
        "name": "src",
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": "public.t"}],
        "maintenance": {"keep_history": None},
    },
    "test",
)
NAMES = TableAssets(CONFIG, TableId("public", "t"))
ASSETS = [NAMES.lake, NAMES.snapshot, NAMES.source]
OURS = "instance_class: {module: cdc_assets.dagster.instance, class: Instance}\n"
EVENTS, CHECKS = SqlEventLogStorageTable, AssetCheckExecutionsTable


@pytest.fixture(params=["", OURS], ids=["Dagster's own", "ours"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster.yaml").write_text(request.param + "telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as made:
        yield made


def _events(instance: dg.DagsterInstance) -> SqlEventLogStorage:
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    return storage


def _age(instance: dg.DagsterInstance, by: timedelta) -> None:
    """Make all that there is older."""
    storage, runs = _events(instance), instance.run_storage
    assert isinstance(runs, SqlRunStorage)
    at = (datetime.now(UTC) - by).replace(tzinfo=None)
    with storage.index_connection() as connection:
        connection.execute(EVENTS.update().values(timestamp=at))
        connection.execute(CHECKS.update().values(create_timestamp=at))
    with storage.run_connection("") as connection:
        connection.execute(EVENTS.update().values(timestamp=at))
    with runs.connect() as connection:
        connection.execute(RunsTable.update().values(update_timestamp=at))


def _count(instance: dg.DagsterInstance, *, apart: bool = False) -> int:
    """Events of assets, in the index or in the file of those without a run."""
    storage = _events(instance)
    with storage.run_connection("") if apart else storage.index_connection() as connection:
        of_assets = EVENTS.c.asset_key.is_not(None)
        found = connection.execute(db.select(db.func.count()).where(of_assets)).scalar_one()
    return int(found)


def _prune(instance: dg.DagsterInstance) -> Pruned:
    return prune(instance, CONFIG, ASSETS, [NAMES.lake], datetime.now(UTC))


def _beat(instance: dg.DagsterInstance, key: dg.AssetKey, partition: str | None = None) -> None:
    event = dg.AssetMaterialization(key, partition=partition, tags={"a": "tag"})
    instance.report_runless_asset_event(event)


def test_reports_are_kept_for_an_hour_and_the_last_one_for_ever(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_ROWS", 2)  # several transactions
    theirs = dg.AssetKey("theirs")
    for key in (NAMES.lake, theirs) * 5:
        _beat(instance, key)
    for chunk in ("a", "b"):
        _beat(instance, NAMES.snapshot, chunk)
    instance.report_runless_asset_event(dg.AssetObservation(NAMES.lake))
    assert _prune(instance) == Pruned()  # all are young
    _age(instance, timedelta(minutes=61))
    assert _prune(instance) == Pruned(events=4)
    assert _count(instance) == 5 + 1 + 2 + 1
    # Dagster's own storage has them twice.
    assert _count(instance, apart=True) == (0 if isinstance(instance, Instance) else 9)
    assert _prune(instance) == Pruned()
    assert instance.get_latest_materialization_event(NAMES.lake) is not None
    assert instance.get_materialized_partitions(NAMES.snapshot) == {"a", "b"}
    assert len(instance.fetch_materializations(NAMES.lake, limit=9).records) == 1
    assert len(instance.fetch_materializations(theirs, limit=9).records) == 5
    _beat(instance, NAMES.lake)
    _prune(instance)
    assert len(instance.fetch_materializations(NAMES.lake, limit=9).records) == 1


def test_a_heartbeat_takes_the_place_of_the_one_before_it(instance: dg.DagsterInstance) -> None:
    other = NAMES.source
    for key in (NAMES.lake, other):
        _beat(instance, key)  # a report
        for _ in range(3):
            beat = dg.AssetMaterialization(key, metadata={"changes": 0, history.HEARTBEAT: True})
            instance.report_runless_asset_event(beat)
    history.forget_heartbeats(instance, CONFIG, [NAMES.lake])
    left = instance.fetch_materializations(NAMES.lake, limit=9).records
    told = [record.asset_materialization for record in left]
    assert [bool(of and history.HEARTBEAT in of.metadata) for of in told] == [True, False]
    assert len(instance.fetch_materializations(other, limit=9).records) == 4
    # Dagster's own storage has them twice.
    assert _count(instance, apart=True) == (0 if isinstance(instance, Instance) else 2 + 4)
    _beat(instance, NAMES.lake)
    history.forget_heartbeats(instance, CONFIG, [NAMES.lake])
    assert len(instance.fetch_materializations(NAMES.lake, limit=9).records) == 2
    history.forget_heartbeats(instance, KEPT_FOR_EVER, [other])
    assert len(instance.fetch_materializations(other, limit=9).records) == 4


def _repository(location: str) -> RemoteRepositoryOrigin:
    return RemoteRepositoryOrigin(GrpcServerCodeLocationOrigin("host", 1, None, location), "r")


def _tick(
    instance: dg.DagsterInstance, where: str, sensor: str, status: TickStatus, age: timedelta
) -> None:
    origin = RemoteInstigatorOrigin(_repository(where), sensor)
    if instance.get_instigator_state(origin.get_id(), origin.get_selector().get_id()) is None:
        instance.add_instigator_state(
            InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.DECLARED_IN_CODE)
        )
    at = (datetime.now(UTC) - age).timestamp()
    instance.create_tick(
        TickData(
            instigator_origin_id=origin.get_id(),
            instigator_name=sensor,
            instigator_type=InstigatorType.SENSOR,
            status=status,
            timestamp=at,
            selector_id=origin.get_selector().get_id(),
        )
    )


def test_skipped_ticks_are_kept_for_six_hours(instance: dg.DagsterInstance) -> None:
    flusher, another = sensor_name(CONFIG.name, "flusher"), "flusher_of_somebody"
    skipped, other = TickStatus.SKIPPED, TickStatus.STARTED
    sensors = [("here", flusher), ("here", another), ("elsewhere", flusher)]
    for hours in (5, 7):
        for where, sensor in sensors:
            for status in (skipped, other):
                _tick(instance, where, sensor, status, timedelta(hours=hours))

    def left(where: str, sensor: str) -> list[TickStatus]:
        origin = RemoteInstigatorOrigin(_repository(where), sensor)
        ticks = instance.get_ticks(origin.get_id(), origin.get_selector().get_id())
        return [tick.status for tick in ticks]

    _prune(instance)  # of a run that no code location started
    assert len(left(*sensors[0])) == 4
    prune(instance, CONFIG, ASSETS, [NAMES.lake], datetime.now(UTC), _repository("here"))
    assert sorted(left(*sensors[0]), key=str) == sorted([other, other, skipped], key=str)
    assert [len(left(*sensor)) for sensor in sensors] == [3, 4, 4]


def _run(instance: dg.DagsterInstance, *, ours: bool = True) -> str:
    """A run that materializes the lake table and checks it."""

    @dg.asset(key=NAMES.lake, check_specs=[dg.AssetCheckSpec("whole", asset=NAMES.lake)])
    def lake():  # type: ignore[no-untyped-def] # Dagster looks at the annotation
        return dg.MaterializeResult(check_results=[dg.AssetCheckResult(passed=True)])

    tags = run_tags(CONFIG, "materialize") if ours else {}
    return dg.materialize([lake], instance=instance, tags=tags).run_id


def test_old_runs_go_and_the_one_that_shows_the_present_stays(
    instance: dg.DagsterInstance,
) -> None:
    by_hand = _run(instance, ours=False)
    old, newest = _run(instance), _run(instance)
    _age(instance, timedelta(days=6))
    assert _prune(instance) == Pruned()
    _age(instance, timedelta(days=8))
    assert _prune(instance) == Pruned(runs=1, evaluations=2)
    assert {run.run_id for run in instance.get_runs()} == {by_hand, newest}
    assert instance.all_logs(old) == []
    latest = instance.get_latest_materialization_event(NAMES.lake)
    assert latest is not None
    assert latest.run_id == newest
    key = dg.AssetCheckKey(NAMES.lake, "whole")
    assert _events(instance).get_latest_asset_check_execution_by_key([key])[key].run_id == newest
    _beat(instance, NAMES.lake)
    assert _prune(instance) == Pruned()  # the run has the newest evaluation
    _run(instance, ours=False)
    assert _prune(instance).runs == 1


def test_runs_that_stay_hide_none_that_go(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_KEYS", 1)  # pages
    runs = [_run(instance) for _ in range(3)]
    _age(instance, timedelta(days=8))
    with _events(instance).index_connection() as connection:  # the oldest has the newest events
        for table in (EVENTS, CHECKS):
            newest = db.select(db.func.max(table.c.id)).scalar_subquery()
            connection.execute(
                table.update().where(table.c.run_id == runs[0]).values(id=table.c.id + 1 + newest)
            )
    assert _prune(instance).runs == 2
    assert {run.run_id for run in instance.get_runs()} == {runs[0]}


def test_an_evaluation_stays_until_another_one_and_not_a_planned_one_followed(
    instance: dg.DagsterInstance,
) -> None:
    _run(instance)
    planned = _run(instance)
    with _events(instance).index_connection() as connection:
        of_it = CHECKS.update().where(CHECKS.c.run_id == planned)
        connection.execute(of_it.values(execution_status="PLANNED"))
    _age(instance, timedelta(days=8))
    assert _prune(instance) == Pruned()


def test_the_file_of_a_run_that_goes_goes_too(instance: dg.DagsterInstance) -> None:
    old, newest = _run(instance), _run(instance)
    _age(instance, timedelta(days=8))
    _prune(instance)
    files = {path.name for path in Path(instance.root_directory).rglob("*.db")}
    assert f"{newest}.db" in files
    if type(instance) is not dg.DagsterInstance:
        assert f"{old}.db" not in files
    assert not list(Path(instance.root_directory).rglob(old))  # what it printed


def test_history_is_kept_where_the_configuration_says_so(instance: dg.DagsterInstance) -> None:
    _beat(instance, NAMES.lake)
    _beat(instance, NAMES.lake)
    _age(instance, timedelta(days=800))
    assert prune(instance, KEPT_FOR_EVER, ASSETS, [NAMES.lake], datetime.now(UTC)) == Pruned()
    assert _count(instance) == 2
