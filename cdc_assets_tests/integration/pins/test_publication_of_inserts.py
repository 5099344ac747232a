"""The publication of inserts: who is in it, who comes and goes, and what it sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher import guard as guarding
from cdc_assets.flusher import pin_keeper, registrar
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.enrol import register_tables
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.integration.pins.published import configured, published, states, write
from cdc_assets_tests.support.flusher import Bench, bench, flushing
from cdc_assets_tests.support.waiting import wait_for


def test_a_table_that_moves_to_the_other_publication_keeps_its_column_list(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is in one of them at a time: the server ends a stream that is told of two lists."""
    monkeypatch.setattr(guarding, "guard", lambda *_: 0.0)
    name = f"cdc_{source.name}"
    source.execute(f"""
        create table events (id int, v int, secret int default 7);
        create publication {name} with (publish_via_partition_root = true);
        create publication {name}_inserts for table events (id, v)
          with (publish = 'insert, truncate', publish_via_partition_root = true)
    """)
    events = {"name": "events", "mode": "append", "columns": {"exclude": ["secret"]}}
    config = parse_config({**source.settings(), "tables": [events]}, "test")
    source.flush(config)
    here, there = name, f"{name}_inserts"
    for change in ("add primary key (id)", "drop constraint events_pkey"):
        with flushing(config) as progress:
            wait_for(lambda: progress.state == "streaming")
            source.execute(f"alter table events {change}")
            with Pipeline.open(config) as pipeline:
                mark_for_copy(pipeline, [config.tables[0].id])
            wait_for(lambda: states(source)["public.events"] == "streaming")
            source.execute("insert into events values (1, 1)")
        source.flush(config)
        assert progress.sessions == 1
        assert source.execute(
            "select pubname, attnames::text[] from pg_publication_tables where tablename = 'events'"
        ) == [(here, ["id", "v"])]
        source.execute("update events set v = 2; delete from events")
        here, there = there, here
    assert {tuple(row.data) for row in source.log("public.events")} <= {("id", "v"), ("id",)}


def test_a_publication_of_inserts_that_came_late(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older servers can't decode what was changed before a publication that is asked for."""
    monkeypatch.setattr(registrar, "IDLE_STEP_SECONDS", 0.2)
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    source.execute(
        "create table t (id int primary key, v int); create table events (id int, v int)"
    )
    config = configured(source, "t")
    source.flush(config)
    source.execute(f"drop publication cdc_{source.name}_inserts")  # as before there were two
    write(source, "t")  # not streamed yet
    config = configured(source, "t", "events")
    _pin(config)
    assert states(source)["public.events"] == "waiting"
    with flushing(config):
        wait_for(lambda: states(source)["public.events"] == "streaming")
        write(source, "t", "events")
        wait_for(lambda: len(source.log("public.events")) == 1)
    source.flush(config)
    assert [row.op for row in source.log("public.t")] == ["I", "U", "D"] * 2


def _pin(config: SourceConfig) -> None:
    with Pipeline.open(config) as pipeline:
        pins = Pins(pipeline)
        pins.prepare()
        pins.tick()
        pins.close()


def test_a_table_that_gains_an_identity_moves_to_the_other_publication(source: Bench) -> None:
    source.execute("create table events (id int, v int)")
    config = configured(source, "events")
    source.flush(config)
    assert (published(source), published(source, "_inserts")) == (set(), {"events"})
    source.execute("alter table events replica identity full")
    with Pipeline.open(config) as pipeline:
        mark_for_copy(pipeline, [table.id for table in config.tables])
    _pin(config)
    assert (published(source), published(source, "_inserts")) == ({"events"}, set())
    write(source, "events")
    source.flush(config)
    assert "D" in [row.op for row in source.log("public.events")]


def test_a_dropped_publication_of_inserts_stops_only_who_is_in_it(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once its tables are parked, the source isn't asked for it any more."""
    source.execute("create table t (id int primary key, v int); create table events (id int)")
    config = configured(source, "t", "events")
    source.flush(config)
    asked = list[object]()
    connect = Pipeline.connect_source

    def counting(pipeline: Pipeline, purpose: str, **how: bool) -> psycopg.Connection[Any]:
        asked.extend([purpose] * (purpose == "publications"))
        return connect(pipeline, purpose, **how)

    monkeypatch.setattr(Pipeline, "connect_source", counting)
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        source.execute(f"drop publication cdc_{source.name}_inserts")
        write(source, "t")
        wait_for(lambda: [row.op for row in source.log("public.t")] == ["I", "U", "D"])
        wait_for(lambda: source.parked().keys() == {"public.events"})
        wait_for(lambda: progress.state == "streaming" and progress.sessions > 1)
        time.sleep(registrar.REFRESH_SECONDS + 0.5)  # it has heard of what is parked
        asked.clear()
        time.sleep(2 * registrar.REFRESH_SECONDS)
    assert not asked
    assert "table_unpublished" in source.parked()["public.events"]


def test_a_publication_of_inserts_sends_the_columns_that_the_other_one_does(
    postgres_servers: Callable[[int], EmbeddedPostgres],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Since 18 one sends generated columns or doesn't: one made as the README says doesn't."""
    with bench(postgres_servers(18).start(), "pb_generated", tmp_path) as source:
        source.execute("""
            create table events (id int, g int generated always as (id * 2) stored);
            create publication cdc_pb_generated with (publish_via_partition_root = true);
        """)
        config = configured(source, "events")
        source.flush(config)
        source.execute("insert into events values (1)")
        source.flush(config)
        assert [row.data for row in source.log("public.events")] == [{"id": "1"}]
        with Pipeline.open(config) as pipeline:
            mark_for_copy(pipeline, [config.tables[0].id])
            for _ in range(2):
                register_tables(source.connection, config, pipeline.store)
        said = [text for text in caplog.messages if "doesn't send its generated columns" in text]
        assert len(said) == 1, "once, though it may wait for its copy for days"
