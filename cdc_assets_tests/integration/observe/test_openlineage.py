"""Copies and merges as a real OpenLineage client tells a server of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import dagster as dg
import pytest
from openlineage.client.event_v2 import InputDataset

from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.sensors import sessions
from cdc_assets.errors import ConfigurationError, EnvironmentProblem, TablesFailed
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.states import TableState
from cdc_assets.observe.openlineage.datasets import source_dataset
from cdc_assets.observe.openlineage.steps import told
from cdc_assets_tests.support.lake import Lake, NewLake
from cdc_assets_tests.support.sinks import Inbox, webhook

pytestmark = pytest.mark.spark

SETUP = """
create table t (id int primary key, email text);
insert into t select i, 'v' || i from generate_series(1, 7) i;
create table "Odd % name" (id int primary key);
"""
ODD = 'public."Odd % name"'


@pytest.fixture
def backend() -> Iterator[Inbox]:
    with webhook() as inbox:
        yield inbox


@pytest.fixture
def source(new_lake: NewLake, backend: Inbox) -> Iterator[Lake]:
    lineage = {"url": f"http://127.0.0.1:{backend.port}/open", "api_key": "sesame", "every": "30s"}
    masked = {"name": "public.t", "columns": {"mask": {"email": "redact"}}}
    with new_lake(SETUP, masked, ODD, openlineage=lineage) as opened:
        yield opened
    sessions.close_all()


def tick(source: Lake) -> str:
    """Evaluate the sensor as the daemon does; what it said."""
    repository = build_defs(source.config).get_repository_def()
    definition = repository.get_sensor_def(f"openlineage_{source.config.name}")
    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_sensor_context(instance, repository_def=repository) as context,
    ):
        return definition.evaluate_tick(context).skip_message or ""


def shown(backend: Inbox) -> list[str]:
    """The events that arrived since the last look."""
    found = [f"{event['job']['name']} {event['eventType']}" for event in backend.received]
    backend.received.clear()
    return found


def test_a_copy_and_the_merges_after_it_are_told_with_their_lineage(
    source: Lake, backend: Inbox
) -> None:
    name = source.config.name
    source.pin()
    tick(source)
    assert shown(backend) == [f"{name}.copy.{table} START" for table in ("public.t", ODD)]
    source.copy()
    tick(source)
    [complete] = [e for e in backend.received if "public.t" in e["job"]["name"]]
    assert complete["eventType"] == "COMPLETE"
    assert backend.requests[-1] == ("/open/api/v1/lineage", "Bearer sesame")
    [given], [made] = complete["inputs"], complete["outputs"]
    assert given["name"] == f"{source.source.info.dbname}.public.t"
    assert given["namespace"].startswith("postgres://")
    assert made["namespace"] == "file"
    assert Path(made["name"]).is_dir()
    assert made["facets"]["symlinks"]["identifiers"][0]["name"] == "src.t"
    assert [f["name"] for f in made["facets"]["schema"]["fields"]] == ["id", "email"]
    origins = made["facets"]["columnLineage"]["fields"]
    [masked] = origins["email"]["inputFields"]
    assert (masked["name"], masked["transformations"][0]["masking"]) == (given["name"], True)
    assert origins["id"]["inputFields"][0]["transformations"][0]["subtype"] == "IDENTITY"
    assert made["outputFacets"]["outputStatistics"]["rowCount"] == 7

    shown(backend)
    before = source.pipeline.store.server_now()
    tick(source)
    assert shown(backend) == []
    for statement in ("insert into t values (8, 'x')", "delete from t where id < 3"):
        source.execute(statement)
        source.catch_up()
    # As care does, some time later.
    source.pipeline.store.connection.execute(
        "delete from log_index where table_name = 'public.t' and row_count = 1"
    )
    tick(source)
    started, merged = backend.received
    assert started["run"]["runId"] == merged["run"]["runId"]
    assert before < datetime.fromisoformat(started["eventTime"]), "since the last look"
    assert started["eventTime"] < merged["eventTime"]
    assert merged["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    assert merged["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 3


@pytest.mark.parametrize(
    ("status", "said"),
    [(403, "HTTPError 403"), (503, "HTTPError 503"), (301, "TooManyRedirects 301")],
)
def test_a_backend_that_is_away_holds_nothing_up_and_is_told_later(
    source: Lake, backend: Inbox, status: int, said: str
) -> None:
    source.pin()
    source.copy()
    backend.refusals, backend.status = 1, status
    backend.retry_after, backend.location = 3600, f"http://127.0.0.1:{backend.port}/there"
    with pytest.raises(EnvironmentProblem, match=rf"didn't take an event: {said}\.") as problem:
        tick(source)
    assert "127.0.0.1" not in str(problem.value), "an address may have a secret in it"
    assert told(source.pipeline.store) == {}
    tick(source)
    name = source.config.name
    assert shown(backend) == [
        f"{name}.copy.{table} {event}"
        for table in ("public.t", ODD)
        for event in ("START", "COMPLETE")
    ]


def test_a_table_that_cannot_be_told_of_keeps_no_other_one_from_it(
    source: Lake, backend: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(lake: LakeTable) -> InputDataset:
        if lake.row.table.name == "t":
            raise OSError("its catalog hung up")
        return source_dataset(lake)

    source.pin()
    with monkeypatch.context() as patched:
        patched.setattr("cdc_assets.observe.openlineage.teller.source_dataset", broken)
        with pytest.raises(TablesFailed, match=r"public\.t: .*its catalog hung up"):
            tick(source)
    assert shown(backend) == [f"{source.config.name}.copy.{ODD} START"]
    tick(source)
    assert shown(backend) == [f"{source.config.name}.copy.public.t START"]


def test_the_same_run_is_told_again_under_its_own_id(source: Lake, backend: Inbox) -> None:
    source.pin()
    tick(source)
    first = {event["run"]["runId"] for event in backend.received}
    for table in told(source.pipeline.store):
        source.pipeline.store.forget_meta(f"openlineage.told:{table}")
    tick(source)
    assert {event["run"]["runId"] for event in backend.received} == first


def test_a_parked_table_fails_with_its_reason(source: Lake, backend: Inbox) -> None:
    source.pin()
    tick(source)
    shown(backend)
    store = source.pipeline.store
    store.connection.execute(
        "update tables set state = %s, reason = 'it has no key' where table_name = 'public.t'",
        (TableState.PARKED,),
    )
    tick(source)
    [failed] = backend.received
    assert failed["eventType"] == "FAIL"
    assert failed["run"]["facets"]["errorMessage"]["message"] == "it has no key"


def test_what_was_told_of_a_table_that_is_gone_is_forgotten(source: Lake, backend: Inbox) -> None:
    source.pin()
    tick(source)
    store = source.pipeline.store
    assert {*told(store)} == {"public.t", ODD}
    store.set_meta("openlineage.told:public.gone", str(told(store)["public.t"]))
    assert {*told(store)} == {"public.t", ODD}
    assert store.meta("openlineage.told:public.gone") is None


def test_no_backend_is_a_clear_error(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        monkeypatch.delenv(name)
    with new_lake(SETUP, "public.t", openlineage={}) as source:
        with pytest.raises(ConfigurationError, match=r"no backend is named.*openlineage\.url"):
            tick(source)
        with webhook() as inbox:
            monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{inbox.port}")
            source.pin()
            tick(source)
            assert len(shown(inbox)) == 1
    sessions.close_all()


def test_without_a_section_there_is_no_sensor(new_lake: NewLake) -> None:
    with new_lake(SETUP, "public.t") as source:
        names = [sensor.name for sensor in build_defs(source.config).sensors or ()]
    assert not [name for name in names if "openlineage" in name]
