"""Somebody's lock at the source delays that one table: start, stream and reconnect go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.config.source import SourceConfig
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher import pin_keeper, reviewer
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import facts
from cdc_assets.observe.status import SourceStatus, collect
from cdc_assets.pipeline import Pipeline
from cdc_assets_tests.flusher_support import Bench, bench, flushing, reconnect, wait_for


@pytest.fixture(params=[16, 18], ids="pg{}".format)
def source(
    request: pytest.FixtureRequest,
    postgres_servers: Callable[[int], EmbeddedPostgres],
    tmp_path: Path,
) -> Iterator[Bench]:
    with bench(postgres_servers(request.param).start(), "locked", tmp_path) as made:
        made.execute("create table t (id int primary key); create table u (id int primary key)")
        yield made


@contextmanager
def locking(source: Bench, table: str, mode: str) -> Iterator[psycopg.Connection[Any]]:
    """Somebody has the lock for the length of the block, as a migration that is stuck does."""
    with psycopg.connect(source.dsn, application_name="stuck migration") as session:
        session.execute(f"lock table {table} in {mode} mode".encode())
        yield session


def status(config: SourceConfig) -> SourceStatus:
    with Pipeline.open(config) as pipeline:
        return collect(pipeline)


def ids(source: Bench, table: str) -> list[str | None]:
    return [row.data["id"] for row in source.log(table)]


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
        locking(source, "t, pt_1, x", "access exclusive") as session,
        flushing(config) as progress,
    ):
        wait_for(lambda: progress.state == "streaming", 20)
        reconnect(source, progress)
        assert json.dumps(status(config).to_json())
        # The pin of u and z waits for every transaction that writes; x can't be published.
        wait_for(lambda: any("pin cdc_locked" in w.session for w in status(config).waits), 20)
        told = next(w for w in status(config).waits if "pin cdc_locked" in w.session)
        assert f"process {session.info.backend_pid} (stuck migration" in told.sentence
        tables = {table.name: table for table in status(config).tables}
        assert "stuck migration" in (tables["public.x"].reason or "")
        assert tables["public.t"].state == tables["public.pt"].state == "streaming"
        session.rollback()
        wait_for(lambda: {t.state for t in status(config).tables} == {"streaming"}, 20)
        source.execute("insert into x values (1); insert into t values (1)")
        wait_for(lambda: ids(source, "public.x") == ids(source, "public.t") == ["1"])
        assert all(table.reason is None for table in status(config).tables)


def test_a_free_table_is_pinned_beside_a_locked_one(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a lock of somebody who hasn't written anything: a vacuum's, a schema change's."""
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    source.flush(source.config("public.t"))
    source.execute("create table x (id int primary key)")
    config = source.config("public.t", "public.u", "public.x")
    with locking(source, "x", "share update exclusive") as session, flushing(config):

        def states() -> dict[str, str]:
            return {table.name: table.state for table in status(config).tables}

        wait_for(lambda: states()["public.u"] == "streaming", 20)
        assert states()["public.x"] == "waiting"
        with Pipeline.open(config) as pipeline:
            found = {c.key: c for c in conditions(facts(pipeline), config)}
        assert "stuck migration" in found["waiting:public.x"].detail
        session.rollback()
        wait_for(lambda: states()["public.x"] == "streaming", 20)
