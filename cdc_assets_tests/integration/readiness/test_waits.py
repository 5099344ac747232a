"""Somebody's lock at the source delays that one table, and whoever asks is told who has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cdc_assets.errors import SlotBusy
from cdc_assets.observe.conditions import conditions
from cdc_assets.observe.facts import facts
from cdc_assets.observe.status import collect
from cdc_assets.pins.holders import hold
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.session import waits
from cdc_assets.postgres.session.connect import connect
from cdc_assets.postgres.slots import create_slot, export_snapshot
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.support.flusher import Bench

ROLE = "w_reader"


@pytest.fixture(params=[16, 18], ids="pg{}".format)
def postgres_version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def source(source: Bench) -> Bench:
    source.execute("create table t (id int primary key); create table u (id int primary key)")
    return source


def test_a_locked_table_is_a_finding_of_its_own(source: Bench) -> None:
    config = source.config("public.t", "public.u")
    with (
        source.locking("t", "access exclusive"),
        connect(source.dsn, lock_seconds=0.1) as asking,
    ):
        found = {f.code: f.table for f in preflight(asking, config)}
        assert found["table_locked"] == "public.t"


def test_a_publication_altered_and_put_back_is_noticed(source: Bench) -> None:
    config = source.config("public.t", "public.u")
    source.flush(config)
    entries = "select published_as from _pg2iceberg.tables order by 1"
    source.execute("update _pg2iceberg.tables set published_as = split_part(published_as, '/', 1)")
    source.flush(config)  # as an earlier version wrote it: completed, and nothing is wrong
    assert all(entry.count("/") == 2 for (entry,) in source.execute(entries))
    name = config.publication
    source.execute(f"create role w_owner; grant create on database {source.name} to w_owner")
    try:
        source.execute(f"alter publication {name} owner to w_owner")  # that left nothing out
        source.flush(config)
        assert source.parked() == {}
        source.execute(f"alter publication {name} set (publish = 'insert, update')")
        source.execute("insert into t values (1); delete from t")
        source.execute(f"alter publication {name} set (publish = 'insert,update,delete,truncate')")
        source.execute("insert into u values (1)")
        source.flush(config)
        assert {why.split(":")[0] for why in source.parked().values()} == {"publication_altered"}
        source.resync(config)
        source.execute("insert into t values (2)")
        source.flush(config)
        assert source.ids()[-1] == "2"
        assert source.parked() == {}
    finally:
        source.execute(f"drop publication {name}; drop owned by w_owner; drop role w_owner")


@pytest.fixture
def reader(source: Bench) -> Iterator[str]:
    """A role with no more than the README gives it, less what the test is about."""
    source.execute(f"create role {ROLE} login replication password 'p'")
    try:
        yield make_conninfo(source.dsn, user=ROLE, password="p")
    finally:
        source.execute(f"drop owned by {ROLE}; drop role {ROLE}")


def test_who_holds_up_a_slot_is_named_to_the_readmes_role(source: Bench, reader: str) -> None:
    config = source.config("public.t")
    with psycopg.connect(source.dsn, application_name="nightly report") as writer:
        writer.execute("insert into t values (1)")
        pid = writer.info.backend_pid

        def refused() -> str:
            with pytest.raises(SlotBusy) as busy:
                create_slot(reader, "w_slot", temporary=True, patience_seconds=1)
            return str(busy.value)

        with connect(reader) as asking:
            found = {f.code: f for f in preflight(asking, config)}
            assert 'grant pg_read_all_stats to "w_reader"' in found["stats_privilege"].remedy
        said = refused()
        assert f"process {pid} (nightly report, role postgres) {waits.UNSEEN}" in said
        source.execute(f"grant pg_read_all_stats to {ROLE}")
        assert f"process {pid} (nightly report, role postgres) since 20" in refused()
        with connect(reader) as asking:
            assert "stats_privilege" not in {f.code for f in preflight(asking, config)}


def test_how_long_a_pin_holds_back_vacuum_is_told(source: Bench) -> None:
    config = source.config("public.t")
    source.flush(config)
    source.ask_log(
        "insert into _pg2iceberg.pins values (gen_random_uuid(), %s, '0/1') returning pin",
        source.name,
    )
    source.ask_log(
        "update _pg2iceberg.tables set state = 'copying', pin = (select pin from _pg2iceberg.pins"
        " where consistent_point = '0/1') returning 1"
    )
    snapshot = export_snapshot(source.dsn)
    with Pipeline.open(config) as pipeline:
        row = pipeline.store.tables()[0]
        assert row.pin is not None
        with closing(hold(pipeline.store, source.dsn, row.pin, snapshot.snapshot_name)):
            snapshot.connection.close()
            for number in range(5):
                source.execute("insert into u values (%s)", number)
            (pin,) = collect(pipeline).pins
            assert pin.tables == ("public.t",)
            assert pin.xmin_age >= 5
            assert pin.seconds >= 0
            found = {c.key: c for c in conditions(facts(pipeline), config)}
            held = found["pin:public.t"]
            assert held.since is not None
            assert held.limits.grade(6 * 3600.0) == "warn"
            assert "copy:public.t" in found
