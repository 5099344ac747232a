"""The sensor that tells people: real trouble at a real source, told at a webhook, and its end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pytest
from dagster._core.definitions.freshness import FreshnessState, FreshnessStateChange

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.config.tables import TableConfig
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.checks.ready import check_ready
from cdc_assets.dagster.names import TableAssets, all_tables, run_tags
from cdc_assets.dagster.sensors import sessions
from cdc_assets.dagster.sensors.observe import alerts
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher.flusher import run as flush
from cdc_assets.log.asked.wishes import pause, resume
from cdc_assets.log.locks import flusher_lock
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import facts
from cdc_assets.observe.notices import Memory
from cdc_assets.observe.status import collect
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets.readiness import surroundings as readiness
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.sinks import Inbox, webhook

T = "public.t"


@dataclass
class World:
    """A source whose tables are pinned, with a listener where Spark would be."""

    config: SourceConfig
    client: psycopg.Connection[Any]
    pipeline: Pipeline
    instance: dg.DagsterInstance
    inbox: Inbox
    spark: socket.socket
    defs: dg.Definitions = field(init=False)
    cursor: str | None = None

    def __post_init__(self) -> None:
        self.defs = build_defs(self.config)

    @property
    def names(self) -> TableAssets:
        return all_tables(self.config)[0]

    def tick(self) -> list[str]:
        """Evaluate the sensor as the daemon does; the headings that arrived."""
        repository = self.defs.get_repository_def()
        self.inbox.received.clear()
        with dg.build_sensor_context(
            self.instance, cursor=self.cursor, repository_def=repository
        ) as context:
            found = repository.get_sensor_def(f"cdc_alerts_{self.config.name}").evaluate_tick(
                context
            )
        self.cursor = found.cursor
        return [a["title"] for body in self.inbox.received for a in body["attachments"]]

    def flush(self) -> None:
        flush(self.config, until=current_lsn(self.client))

    def wrong(self) -> set[str]:
        """The keys that the engine finds, whatever their limits."""
        return {condition.key for condition in conditions(facts(self.pipeline), self.config)}


@pytest.fixture
def world(tmp_home: Path, postgres_dsn: NewDatabase) -> Iterator[World]:
    dsn = postgres_dsn()
    with (
        webhook() as inbox,
        socket.create_server(("127.0.0.1", 0)) as spark,
        psycopg.connect(dsn, autocommit=True) as client,
        dg.DagsterInstance.ephemeral() as instance,
    ):
        client.execute("create table t (id int primary key); insert into t values (1)")
        config = parse_config(
            {
                "name": "world",
                "postgres": {"dsn": dsn},
                "tables": [{"name": T, "freshness": {"warn": "1m", "fail": "1h"}}],
                "spark": {"remote": f"sc://127.0.0.1:{spark.getsockname()[1]}"},
                "alerts": {
                    "sinks": [{"type": "webhook", "url": f"http://127.0.0.1:{inbox.port}/"}],
                    "min_interval": 0,
                    "health": {"warn": 0, "fail": "1h"},
                    "slot": {"inactive": {"warn": 0, "fail": "1h"}},
                },
            },
            "test",
        )
        with Pipeline.open(config) as pipeline:
            pins = Pins(pipeline)
            pins.prepare()
            pins.tick()
            try:
                yield World(config, client, pipeline, instance, inbox, spark)
            finally:
                pins.close()
                sessions.close_all()


def test_flusher_slot_and_spark_are_told_and_told_to_be_well(world: World) -> None:
    world.flush()  # it has ended since: no flusher is active
    told = world.tick()
    assert [line.split(" at ")[0] for line in told] == [
        "WARN: no flusher is active",
        "WARN: nobody reads from the replication slot cdc_world",
    ]
    assert world.tick() == []
    world.spark.close()
    assert world.tick() == ["WARN: Spark can't be reached"]
    # Whoever holds the lock of the turn and tells how it is, is a flusher.
    with Pipeline.open(world.config) as flusher:
        assert flusher.store.try_lock(flusher_lock("world"))
        report = (
            "insert into flusher_reports (source, report) values ('world', '{\"state\": \"%s\"}')"
            " on conflict (source) do update"
            " set report = excluded.report, reported_at = clock_timestamp()"
        )
        flusher.store.connection.execute((report % "streaming").encode())
        assert world.tick() == ["OK (was WARN): no longer: no flusher is active"]
        flusher.store.connection.execute((report % "retrying staging").encode())
        [told_staging] = world.tick()
        assert told_staging.startswith("WARN: the staging store can't be written")
        flusher.store.connection.execute((report % "reconnecting").encode())
        assert world.tick()[0] == "WARN: the flusher can't get its stream back"
        flusher.store.connection.execute((report % "stuck").encode())
        assert world.tick()[0] == "WARN: the source can't send its changes"
    assert world.tick() == []  # it waits for its next try, without the lock


def test_a_log_that_catches_up_is_as_old_as_its_flusher_says(world: World) -> None:
    execute = world.pipeline.store.connection.execute
    world.flush()
    execute("update tables set state = 'streaming', complete_lsn = null")
    world.client.execute("insert into t values (2)")  # nobody has staged it yet
    with Pipeline.open(world.config) as flusher:
        assert flusher.store.try_lock(flusher_lock("world"))
        execute(
            "insert into flusher_reports (source, report)"
            """ values ('world', '{"state": "streaming", "lag_seconds": 7200.0}')"""
            " on conflict (source) do update set report = excluded.report, reported_at = now()"
        )
        [table] = collect(world.pipeline).tables
        assert table.pending_rows == 0
        assert table.lag_seconds == 7200.0
        assert "FAIL: world.t is behind public.t" in world.tick()


def test_what_waits_is_asked_without_reading_the_log_of_a_day(world: World) -> None:
    store = world.pipeline.store
    store.connection.execute(
        "insert into log_index (source, table_name, start_offset, end_offset, path, row_count,"
        " byte_size, flushable_lsn, commit_time) select 'world', 'public.t', i, i + 1,"
        " %s || '/world/t/2026-01-01/' || i || '.parquet', 1,"
        " 9, 'FFFFFFFF/0', now() from generate_series(0, 19999) i",
        (world.config.staging_uri,),
    )
    store.connection.execute(
        'insert into mat_cursor (consumer_group, source, table_name, "offset", applied_lsn)'
        " values ('lake', 'world', 'public.t', 19990, '0/1')"
    )
    store.connection.execute("update tables set state = 'streaming'")
    store.connection.execute("analyze log_index")
    with store.connection.transaction():
        [table] = collect(world.pipeline).tables
        [backlog] = store.backlogs()
        entries = store.entries(all_tables(world.config)[0].table, 19990)
        assert (table.pending_rows, backlog.rows, len(entries)) == (10, 10, 10)
        read = store.connection.execute(
            "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables"
            " where relname = 'log_index'"
        ).fetchone()
    assert read is not None
    assert read[0] < 100


def test_tables_are_told_by_name(world: World) -> None:
    execute = world.pipeline.store.connection.execute
    world.flush()
    world.tick()
    execute("update tables set state = 'streaming', complete_lsn = null")
    world.client.execute("insert into t values (2)")
    world.flush()
    assert world.tick() == ["WARN: the log isn't applied to the lake"]
    execute("update log_index set commit_time = commit_time - interval '2 minutes'")
    assert world.tick() == ["WARN: world.t is behind public.t"]
    pause(world.pipeline.store, all_tables(world.config)[0].table)
    assert world.tick() == [
        "OK (was WARN): no longer: world.t is behind public.t",
        "OK (was WARN): no longer: the log isn't applied to the lake",
    ], "a pause is somebody's wish"
    resume(world.pipeline.store, all_tables(world.config)[0].table)
    world.tick()
    execute("update tables set state = 'parked', reason = 'it has no key any more'")
    told = world.tick()
    assert told[0] == "FAIL: public.t is parked: nothing of it is applied"
    [body] = world.inbox.received
    assert "resync public.t" in body["attachments"][0]["text"]
    assert "it has no key any more" in body["attachments"][0]["text"]
    execute("delete from tables")
    assert "WARN: public.t isn't followed yet" in world.tick()
    execute("alter table flusher_reports rename to gone")
    assert world.tick() == ["WARN: how the source is can't be asked"]


def test_a_table_that_is_taken_out_is_one_matter_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "_spark", lambda _: [])
    world.client.execute("create table u (id int primary key)")
    fewer, both = world.config, (*world.config.tables, TableConfig(name="public.u"))
    with Pipeline.open(fewer.model_copy(update={"tables": both})) as pipeline:
        pins = Pins(pipeline)
        pins.prepare()
        pins.close()
    world.flush()
    what = "public.u is out of the configuration, and still staged"
    assert f"WARN: {what}" in world.tick()
    assert world.tick() == []
    # It is told there, and no other table's check fails by it.
    findings = readiness.review(fewer)
    assert [f.table for f in findings if f.code == "table_left"] == ["public.u"]
    ready = check_ready(findings, world.names)
    assert "table_left" not in str(ready.metadata)
    with Pipeline.open(fewer) as pipeline:
        drop_table(pipeline, TableId("public", "u"))
    assert world.tick() == [f"OK (was WARN): no longer: {what}"]


def test_what_dagster_knows_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "EVALUATIONS_SECONDS", 0.0)
    world.flush()
    world.tick()

    def freshness(state: FreshnessState) -> list[str]:
        world.instance._report_runless_asset_event(
            FreshnessStateChange(
                key=world.names.lake,
                previous_state=FreshnessState.PASS,
                new_state=state,
                state_change_timestamp=datetime.now(UTC).timestamp(),
            )
        )
        return world.tick()

    assert freshness(FreshnessState.WARN) == ["WARN: world.t isn't fresh"]
    assert freshness(FreshnessState.FAIL) == ["FAIL (was WARN): world.t isn't fresh"]
    assert freshness(FreshnessState.PASS) == ["OK (was FAIL): no longer: world.t isn't fresh"]

    def checked(passed: bool) -> list[str]:
        world.instance.report_runless_asset_event(
            dg.AssetCheckEvaluation(
                check_name="primary_key_unique", asset_key=world.names.lake, passed=passed
            )
        )
        return world.tick()

    assert checked(passed=False) == ["FAIL: the check primary_key_unique of world/t failed"]
    assert checked(passed=True)[0].startswith("OK (was FAIL)")

    fails: list[str] = []

    @dg.op
    def work() -> None:
        if fails:
            raise RuntimeError("it failed")

    @dg.job
    def merges() -> None:
        work()

    def ran(*, well: bool, by_hand: bool = False) -> list[str]:
        tags = {} if by_hand else run_tags(world.config, "materialize")
        fails[:] = [] if well else ["yes"]
        merges.execute_in_process(instance=world.instance, tags=tags, raise_on_error=False)
        return world.tick()

    assert ran(well=False, by_hand=True) == []
    assert ran(well=False) == ["WARN: the run of materialize failed"]
    assert ran(well=False) == []
    assert ran(well=False) == ["FAIL (was WARN): the run of materialize failed"]
    assert ran(well=True) == ["OK (was FAIL): no longer: the run of materialize failed"]


def test_a_slot_that_is_a_danger_or_gone_is_told(world: World) -> None:
    world.flush()
    limits = world.config.alerts.slot
    assert limits.retained_warn > 0
    world.tick()
    small = {**world.config.alerts.slot.model_dump(), "retained_warn": 0, "xmin_age_warn": 1}
    config = world.config.model_copy(
        update={"alerts": world.config.alerts.model_copy(update={"slot": type(limits)(**small)})}
    )
    world.client.execute("create table burnt (v text); insert into burnt values ('a transaction')")
    found = facts(world.pipeline)
    assert found.status is not None and found.status.slot is not None
    assert found.status.slot.inactive_seconds is not None
    assert {c.key for c in conditions(found, config)} >= {"slot:retained", "slot:xmin"}
    world.client.execute("select pg_drop_replication_slot('cdc_world')")
    assert "FAIL: the replication slot cdc_world is gone" in world.tick()


def test_a_source_that_cannot_be_reached_is_told(
    world: World, public_directory: Path, postgres: EmbeddedPostgres
) -> None:
    with EmbeddedPostgres(public_directory / "alerts", 18) as other:
        dsn = other.dsn()
        assert dsn is not None
        with psycopg.connect(dsn, autocommit=True) as client:
            client.execute("alter system set max_slot_wal_keep_size = '64MB'")
            client.execute("select pg_reload_conf()")
            client.execute("create table t (id int primary key)")
        world.config = parse_config(
            {
                **world.config.model_dump(by_alias=True, exclude={"postgres", "alerts", "spark"}),
                "name": "other",
                "slot": "cdc_other",
                "publication": "cdc_other",
                "postgres": {"dsn": dsn},
                "spark": {"remote": world.config.spark.remote},
                "alerts": {
                    **world.config.alerts.model_dump(by_alias=True, exclude={"sinks"}),
                    "sinks": [{"type": "webhook", "url": f"http://127.0.0.1:{world.inbox.port}/"}],
                },
            },
            "test",
        )
        world.defs, world.cursor = build_defs(world.config), None
        with Pipeline.open(world.config) as pipeline, psycopg.connect(dsn, autocommit=True) as c:
            pins = Pins(pipeline)
            pins.prepare()
            pins.tick()
            pins.close()
            flush(world.config, until=current_lsn(c))
            world.tick()
            # Segments have 16 MB; the slot's own doesn't count.
            for _ in range(4):
                c.execute("select pg_logical_emit_message(false, 'x', 'y'), pg_switch_wal()")
            told = world.tick()
            assert any(line.endswith("slot cdc_other will lose its WAL") for line in told), told
            for _ in range(5):
                c.execute("select pg_logical_emit_message(false, 'x', 'y'), pg_switch_wal()")
            told = world.tick()
            assert "FAIL: the replication slot cdc_other is about to lose its WAL" in told
            c.execute("checkpoint")
            c.execute("checkpoint")
            assert "FAIL: the replication slot cdc_other lost the WAL that it needs" in [
                *world.tick(),
                *_titles(world),
            ]
        sessions.close_all()
    before = {title for title in _titles(world) if not title.startswith("OK")}
    assert world.tick() == ["WARN: the source database can't be reached"]
    assert set(_titles(world)) == before | {"WARN: the source database can't be reached"}, (
        "what can't be asked isn't well"
    )


def _titles(world: World) -> list[str]:
    known = Memory.load(world.cursor).known.values()
    return [f"{(k.grade or 'ok').upper()}: {k.what}" for k in known]
