"""What is published: nothing of the source's own statements may fail because of it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg
import pytest

from cdc_assets.config.addresses import source_dsn
from cdc_assets.config.source import parse_config
from cdc_assets.flusher import guard as guarding
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.states import TableState
from cdc_assets.materializer.reread import rereader
from cdc_assets.observe.status import collect
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.enrol import described
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.integration.pins.published import configured, published, states, write
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for

HARMFUL = """
create table keyed (id int primary key, v int);
create table keyless (id int, v int);
create table nothing (id int primary key, v int); alter table nothing replica identity nothing;
create table root (id int, v int) partition by range (id);
alter table root replica identity full;
create table leaf partition of root for values from (0) to (10);
create table parent (id int primary key, v int); create table child () inherits (parent);
create table events (id int, v int);
create table own (id int primary key, v int); create table heir () inherits (own);
create table other (id int primary key, v int not null) partition by range (id);
create table other_leaf partition of other for values from (0) to (10);
create unique index by_v on other_leaf (v);
alter table other_leaf replica identity using index by_v;
create table made (id int primary key, v int, g int generated always as (id * 2) stored);
create table whole (id int primary key, v int) partition by range (id);
create table part partition of whole for values from (0) to (10);
create table lost (id int primary key, v int) partition by range (id);
create unlogged table lost_leaf partition of lost for values from (0) to (10);
create table hidden (id int primary key, v int);
"""

NAMES = (
    *("keyed", "keyless", "nothing", "root", "parent", "events", "own", "other", "made"),
    *("part", "whole", "lost", "hidden"),
)

NOT_PUBLISHED = ("keyless", "nothing", "root", "parent", "other", "part", "lost", "hidden")

REFUSED = {f"public.{name}" for name in NOT_PUBLISHED}


def test_a_table_that_postgres_would_refuse_to_update_is_not_published(any_source: Bench) -> None:
    source = any_source
    source.execute(HARMFUL)
    config = configured(source, *NAMES)
    source.flush(config)
    write(source, *NAMES, "child", "heir")
    source.flush(config)

    assert published(source) == {"keyed", "own", "made", "whole"}
    assert published(source, "_inserts") == {"events"}
    parked = source.parked()
    assert parked.keys() == REFUSED
    assert "alter table public.leaf replica identity full;" in parked["public.root"]
    assert "public.child" in parked["public.parent"]
    assert "a partition of public.whole" in parked["public.part"]
    assert "alter table public.lost_leaf set logged;" in parked["public.lost"]
    # Both writers' changes, as the root's.
    assert [row.op for row in source.log("public.whole")] == ["I", "U", "D"] * 2
    assert [row.op for row in source.log("public.events")] == ["I"]
    assert [row.op for row in source.log("public.keyed")] == ["I", "U", "D"]
    assert [row.op for row in source.log("public.own")] == ["I", "U", "D"]
    # check says the same, with what mends it.
    found = {(f.table, f.code): f for f in preflight(source.connection, config) if f.table}
    errors = {table for (table, _), f in found.items() if f.severity == "error"}
    assert errors == REFUSED
    assert found["public.events", "inserts_only"].severity == "warning"
    sends = source.connection.info.server_version >= 180000
    assert (("public.made", "generated_columns") in found) is not sends
    with Pipeline.open(config) as pipeline:
        info = {table.name: " ".join(table.info) for table in collect(pipeline).tables}
    assert "inserts and truncates alone" in info["public.events"]
    assert info["public.keyed"] == ""
    left_out = "Postgres doesn't send its generated columns: g"
    assert info["public.made"] == ("" if sends else left_out)

    assert ("public.root", "partitions_to_come") not in found

    for name in ("keyless", "nothing", "root", "other"):
        source.execute(found[f"public.{name}", "replica_identity"].remedy)
    source.execute(found["public.lost", "table_unlogged"].remedy)
    followed = [name for name in NAMES if name not in ("part", "hidden")]
    config = configured(source, *followed)
    source.execute("drop table child; create table heir_too () inherits (own)")
    codes = {(f.table, f.code) for f in preflight(source.connection, config)}
    assert ("public.root", "partitions_to_come") in codes
    source.execute("alter table root add primary key (id)")
    codes = {(f.table, f.code) for f in preflight(source.connection, config)}
    assert ("public.root", "partitions_to_come") not in codes
    assert not [
        f for f in preflight(source.connection, config) if f.severity == "error" and f.table
    ]
    with flushing(config):  # as a re-sync does, it describes what it doesn't know
        wait_for(lambda: {states(source)[f"public.{name}"] for name in followed} == {"streaming"})
        write(source, *NAMES)
    source.flush(config)
    assert [row.op for row in source.log("public.root")] == ["I", "U", "D"]
    assert published(source) == {*followed} - {"events"}


def test_a_publication_of_all_tables_stops_nobody(source: Bench) -> None:
    """Nothing can be added to it or taken out: who isn't published as configured is named."""
    source.execute(f"""
        create table t (id int primary key, v int); create table events (id int, v int);
        create table whole (id int primary key, v int) partition by range (id);
        create table part partition of whole for values from (0) to (10);
        create publication cdc_{source.name} for all tables with (publish_via_partition_root = true)
    """)
    config = configured(source, "t", "events", "part")
    found = preflight(source.connection, config)
    errors = {(f.table, f.code) for f in found if f.severity == "error"}
    assert errors == {("public.events", "replica_identity"), ("public.part", "table_under_root")}
    source.flush(config)
    assert source.parked().keys() == {"public.events", "public.part"}
    write(source, "t")
    source.flush(config)
    assert [row.op for row in source.log("public.t")] == ["I", "U", "D"]


def test_only_a_tables_own_rows_are_read_again(source: Bench) -> None:
    source.execute("""
        create table own (id int primary key, v text); create table heir () inherits (own);
        insert into own values (1, 'own'); insert into heir values (1, 'inherited')
    """)
    config = configured(source, "own")
    source.flush(config)
    with Pipeline.open(config) as pipeline:
        (row,) = pipeline.store.tables()
        reread = rereader(pipeline, LakeTable(config, config.tables[0], row), frozenset)
        (piece,) = reread([("1",)])
    ((_, found),) = piece.found
    assert '"own"' in found


def test_a_publication_of_somebody_else_is_named_with_the_sql(source: Bench) -> None:
    """Neither completed nor withdrawn from by a role that owns nothing: said, each time anew."""
    role = f"reader_{source.name}"[:63]
    source.execute(f"""
        create table t (id int primary key, v int); create table missing (id int primary key);
        create table events (id int, v int);
        create publication cdc_{source.name} for table t with (publish_via_partition_root = true);
        create role {role} login replication password 'p';
        grant create on database {source.name} to {role};
        grant select on all tables in schema public to {role}
    """)
    try:
        config = configured(source, "t", "missing", "events")
        config = config.model_copy(update={"postgres": _as(source, role)})
        with psycopg.connect(source_dsn(config), autocommit=True) as asking:
            found = {f.table: f for f in preflight(asking, config) if f.code == "table_owner"}
            assert found.keys() == {"public.missing", "public.events"}
            source.execute(found["public.events"].remedy)  # makes the other publication, too
        source.flush(config)
        assert source.parked().keys() == {"public.missing"}
        assert "alter publication" in source.parked()["public.missing"]
        source.execute("alter table t drop constraint t_pkey")
        said: dict[TableId, str] = {}
        with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
            guarding.guard(own, config, pipeline.store, said)
        (told,) = said.values()
        assert f'alter publication "cdc_{source.name}" drop table only "public"."t";' in told
        assert "public.t" in source.parked()
    finally:
        source.execute(f"drop owned by {role}; drop role {role}")


def _as(source: Bench, role: str) -> object:
    from psycopg.conninfo import make_conninfo

    dsn = make_conninfo(source.dsn, user=role, password="p")
    settings = {**source.settings("t"), "postgres": {"dsn": dsn}}
    return parse_config(settings, "test").postgres


def test_a_table_that_nobody_asks_for_any_more_costs_a_tick_nothing(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for ever for its copy: taken out of the configuration, and nothing removes it."""
    source.execute("create table t (id int primary key); create table u (id int primary key)")
    both = configured(source, "t", "u")
    source.flush(both)
    with Pipeline.open(both) as pipeline:
        mark_for_copy(pipeline, [both.tables[1].id])
    monkeypatch.setattr(Pins, "_pin_waiting", lambda *_: pytest.fail("the source was asked"))
    with Pipeline.open(configured(source, "t")) as pipeline:
        pins = Pins(pipeline)
        pins.tick()
        pins.close()
    assert states(source)["public.u"] == "waiting"


def test_a_partition_that_comes_while_tables_are_pinned_stops_no_other(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.execute("""
        create table a (id int primary key);
        create table p (id int not null) partition by range (id);
        alter table p replica identity full;
        create foreign data wrapper w; create server s foreign data wrapper w;
        create foreign table f (id int not null) server s;
    """)
    settings = {**source.settings("public.a", "public.p"), "snapshot": {"mode": "initial"}}
    look = described

    def then_attached(*given: Any, **how: Any) -> Any:
        found = look(*given, **how)
        source.execute("alter table p attach partition f for values from (0) to (9)")
        return found

    monkeypatch.setattr("cdc_assets.pins.taking.described", then_attached)
    with Pipeline.open(parse_config(settings, "test")) as pipeline, closing(Pins(pipeline)) as pins:
        pins.prepare()
        states = {row.table.name: row.state for row in pipeline.store.tables()}
        assert states == {"a": TableState.COPYING, "p": TableState.WAITING}
