"""Somebody's lock at the source delays that one table: start, stream and reconnect go on."""

from __future__ import annotations

import json

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.flusher import pin_keeper, reviewer
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import facts
from cdc_assets.observe.status import SourceStatus, collect
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.support.flusher import Bench, flushing, reconnect
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture(params=[16, 18], ids="pg{}".format)
def postgres_version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def source(source: Bench) -> Bench:
    source.execute("create table t (id int primary key); create table u (id int primary key)")
    return source


def status(config: SourceConfig) -> SourceStatus:
    with Pipeline.open(config) as pipeline:
        return collect(pipeline)


def test_a_locked_table_stops_neither_start_nor_stream_nor_reconnect(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    monkeypatch.setattr(reviewer, "REVIEW_SECONDS", 0.5)
    source.execute("create table pt (id int primary key) partition by range (id)")
    source.execute("create table pt_1 partition of pt for values from (0) to (9)")
    source.flush(source.config("public.t", "public.pt"))
    # x is new: it is to be published; z is, too, and nobody has locked it.
    source.execute("create table x (id int primary key); create table z (id int primary key)")
    config = source.config("public.t", "public.u", "public.pt", "public.x", "public.z")
    with (
        source.locking("t, pt_1, x", "access exclusive") as session,
        flushing(config) as progress,
    ):
        wait_for(lambda: progress.state == "streaming", 20)
        reconnect(source, progress)
        assert json.dumps(status(config).to_json())
        # The pin of u and z waits for every transaction that writes; x can't be published.
        wait_for(
            lambda: any(f"pin cdc_{source.name}" in w.session for w in status(config).waits), 20
        )
        told = next(w for w in status(config).waits if f"pin cdc_{source.name}" in w.session)
        assert f"process {session.info.backend_pid} (stuck migration" in told.sentence
        tables = {table.name: table for table in status(config).tables}
        assert "stuck migration" in (tables["public.x"].reason or "")
        assert tables["public.t"].state == tables["public.pt"].state == "streaming"
        session.rollback()
        wait_for(lambda: {t.state for t in status(config).tables} == {"streaming"}, 20)
        source.execute("insert into x values (1); insert into t values (1)")
        wait_for(lambda: source.ids("public.x") == source.ids() == ["1"])
        assert all(table.reason is None for table in status(config).tables)


def test_a_free_table_is_pinned_beside_a_locked_one(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a lock of somebody who hasn't written anything: a vacuum's, a schema change's."""
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    source.flush(source.config("public.t"))
    source.execute("create table x (id int primary key)")
    config = source.config("public.t", "public.u", "public.x")
    with source.locking("x", "share update exclusive") as session, flushing(config):

        def states() -> dict[str, str]:
            return {table.name: table.state for table in status(config).tables}

        wait_for(lambda: states()["public.u"] == "streaming", 20)
        assert states()["public.x"] == "waiting"
        with Pipeline.open(config) as pipeline:
            found = {c.key: c for c in conditions(facts(pipeline), config)}
        assert "stuck migration" in found["waiting:public.x"].detail
        session.rollback()
        wait_for(lambda: states()["public.x"] == "streaming", 20)


def test_a_stream_begins_while_a_filtered_table_is_locked(source: Bench) -> None:
    """The server takes a lock of a table to write its filter."""
    tables = [{"name": "public.t", "where": "id > 0"}, {"name": "public.u"}]
    config = parse_config(source.settings() | {"tables": tables}, "test")
    source.flush(config)
    source.execute("insert into u values (1)")
    with source.locking("t", "access exclusive"):
        source.flush(config)
    assert source.ids("public.u") == ["1"]
    filters = "select row_filter from _pg2iceberg.tables where table_name = 'public.t'"
    assert source.ask_log(filters) == [("(id > 0)",)]


def test_a_prepared_transaction_that_locked_tables_stops_no_stream(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no session, and may be forgotten for days."""
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    tables = [{"name": "public.t", "where": "id > 0"}, {"name": "public.u"}]
    config = parse_config(source.settings() | {"tables": tables}, "test")
    source.flush(config)
    source.execute("insert into u values (1); create table x (id int primary key)")
    with source.locking("t", "access exclusive") as session:
        session.execute("lock table x in access exclusive mode")
        session.execute("prepare transaction 'forgotten'")
    more = parse_config(source.settings() | {"tables": [*tables, {"name": "public.x"}]}, "test")
    try:
        with flushing(more) as progress:
            wait_for(lambda: progress.state == "streaming", 20)
            wait_for(lambda: source.ids("public.u") == ["1"], 20)

            def reasons() -> dict[str, str]:
                return {table.name: table.reason or "" for table in status(more).tables}

            wait_for(lambda: "a prepared transaction" in reasons()["public.x"], 20)
    finally:
        source.execute("rollback prepared 'forgotten'")
