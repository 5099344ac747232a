"""What is published: nothing of the source's own statements may fail because of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cdc_assets.config.addresses import source_dsn
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.embedded.postgres import EmbeddedPostgres
from cdc_assets.flusher import guard as guarding
from cdc_assets.flusher import pin_keeper
from cdc_assets.flusher import session as receiver
from cdc_assets.lake.tables import LakeTable
from cdc_assets.materializer.reread import rereader
from cdc_assets.observe.status import collect
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.publications import published_tables
from cdc_assets.postgres.publishing import Publishing
from cdc_assets.readiness.source.server import preflight
from cdc_assets_tests.flusher_support import Bench, bench, flushing, named_after, wait_for

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


@pytest.fixture
def any_source(
    any_postgres: EmbeddedPostgres, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Bench]:
    with bench(any_postgres.start(), named_after(request, "pb"), tmp_path) as opened:
        yield opened


@pytest.fixture
def source(
    postgres_servers: Callable[[int], EmbeddedPostgres],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> Iterator[Bench]:
    """On Postgres 16: before 18 the server minds what was changed before a publication was made."""
    with bench(postgres_servers(16).start(), named_after(request, "pb"), tmp_path) as opened:
        yield opened


def _config(source: Bench, *names: str) -> SourceConfig:
    extra: dict[str, dict[str, object]] = {
        "events": {"mode": "append"},
        "own": {"only": True},
        "hidden": {"columns": {"exclude": ["id"]}},
    }
    tables = [{"name": name, **extra.get(name, {})} for name in names]
    return parse_config({**source.settings(), "tables": tables}, "test")


def _published(source: Bench, suffix: str = "") -> set[str]:
    found = published_tables(source.connection, f"cdc_{source.name}{suffix}")
    assert found is not None
    return {table.name for table in found}


def _write(source: Bench, *names: str) -> None:
    """What an application does: none of it may fail."""
    for name in names:
        source.execute(f"insert into {name} values (1, 1)")
        source.execute(f"update {name} set v = 2")
        source.execute(f"delete from {name}")


def _states(source: Bench) -> dict[str, str]:
    return dict(source.ask_log("select table_name, state from _pg2iceberg.tables"))


def test_a_table_that_postgres_would_refuse_to_update_is_not_published(any_source: Bench) -> None:
    source = any_source
    source.execute(HARMFUL)
    config = _config(source, *NAMES)
    source.flush(config)
    _write(source, *NAMES, "child", "heir")
    source.flush(config)

    assert _published(source) == {"keyed", "own", "made", "whole"}
    assert _published(source, "_inserts") == {"events"}
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
    config = _config(source, *followed)
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
        wait_for(lambda: {_states(source)[f"public.{name}"] for name in followed} == {"streaming"})
        _write(source, *NAMES)
    source.flush(config)
    assert [row.op for row in source.log("public.root")] == ["I", "U", "D"]
    assert _published(source) == {*followed} - {"events"}


def test_a_table_that_loses_its_identity_is_withdrawn_and_parked(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarding, "GUARD_SECONDS", 0.1)
    source.execute("""
        create table key_dropped (id int primary key, v int);
        create table made_nothing (id int primary key, v int);
        create table attached (id int, v int) partition by range (id);
        create table full_leaf partition of attached for values from (10) to (20);
        alter table full_leaf replica identity full;
        create table inherited_from (id int primary key, v int);
        create table well (id int primary key, v int);
    """)
    names = ("key_dropped", "made_nothing", "attached", "inherited_from", "well")
    config = _config(source, *names)
    source.flush(config)
    assert _published(source) == {*names}
    lost = {f"public.{name}" for name in names} - {"public.well"}
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        source.execute("alter table key_dropped drop constraint key_dropped_pkey")
        source.execute("alter table made_nothing replica identity nothing")
        source.execute("create table new_leaf partition of attached for values from (0) to (10)")
        source.execute("create table heir () inherits (inherited_from)")
        wait_for(lambda: source.parked().keys() == lost)
        wait_for(lambda: _published(source) == {"well", "inherited_from"})
        _write(source, *names)
        reason = source.parked()["public.attached"]
        assert "alter table public.new_leaf replica identity full;" in reason
        assert "resync" in reason
    source.flush(config)
    assert [row.op for row in source.log("public.well")] == ["I", "U", "D"]


LISTED = """
create table made_full (id int primary key, v int, secret int not null default 0);
create table new_key (id int primary key, v int, secret int not null default 0);
create table full_leaf (id int primary key, v int, secret int) partition by range (id);
create table leaf partition of full_leaf for values from (0) to (10);
create table other_leaf (id int primary key, v int, secret int default 0) partition by range (id);
create table well (id int primary key, v int, secret int);
"""


def test_a_table_whose_identity_a_column_list_lacks_is_withdrawn_and_parked(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarding, "GUARD_SECONDS", 0.1)
    names = ("made_full", "new_key", "full_leaf", "other_leaf", "well")
    listed = ", ".join(f"{name} (id, v)" for name in names)
    source.execute(LISTED)
    source.execute(
        f"create publication cdc_{source.name} for table {listed}"
        " with (publish_via_partition_root = true)"
    )
    excludes = {"columns": {"exclude": ["secret"]}}
    settings = {**source.settings(), "tables": [{"name": name, **excludes} for name in names]}
    config = parse_config(settings, "test")
    source.flush(config)
    assert not source.parked()
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        source.execute("alter table made_full replica identity full")
        source.execute("alter table new_key drop constraint new_key_pkey, add primary key (secret)")
        source.execute("alter table leaf replica identity full")
        source.execute("""
            create table new_leaf (id int primary key, v int, secret int not null default 0);
            create unique index by_secret on new_leaf (secret);
            alter table new_leaf replica identity using index by_secret;
            alter table other_leaf attach partition new_leaf for values from (0) to (10)
        """)
        wait_for(lambda: _published(source) == {"well"})
        _write(source, *names)
        wait_for(lambda: source.parked().keys() == {f"public.{name}" for name in names[:-1]})
    reason = source.parked()["public.full_leaf"]
    assert "alter table public.leaf replica identity default;" in reason
    again = (
        f'alter publication "cdc_{source.name}" add table only "public"."full_leaf" ("id", "v");'
    )
    assert again in reason
    # As it says.
    source.execute("alter table leaf replica identity default")
    source.execute(again)
    with Pipeline.open(config) as pipeline:
        mark_for_copy(pipeline, [config.table("full_leaf").id])
    source.flush(config)
    _write(source, "full_leaf")
    source.flush(config)
    assert [row.data for row in source.log("public.full_leaf")][:1] == [{"id": "1", "v": "1"}]


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
            wait_for(lambda: _states(source)["public.events"] == "streaming")
            source.execute("insert into events values (1, 1)")
        source.flush(config)
        assert progress.sessions == 1
        assert source.execute(
            "select pubname, attnames::text[] from pg_publication_tables where tablename = 'events'"
        ) == [(here, ["id", "v"])]
        source.execute("update events set v = 2; delete from events")
        here, there = there, here
    assert {tuple(row.data) for row in source.log("public.events")} <= {("id", "v"), ("id",)}


def test_a_publication_of_all_tables_stops_nobody(source: Bench) -> None:
    """Nothing can be added to it or taken out: who isn't published as configured is named."""
    source.execute(f"""
        create table t (id int primary key, v int); create table events (id int, v int);
        create table whole (id int primary key, v int) partition by range (id);
        create table part partition of whole for values from (0) to (10);
        create publication cdc_{source.name} for all tables with (publish_via_partition_root = true)
    """)
    config = _config(source, "t", "events", "part")
    found = preflight(source.connection, config)
    errors = {(f.table, f.code) for f in found if f.severity == "error"}
    assert errors == {("public.events", "replica_identity"), ("public.part", "table_under_root")}
    source.flush(config)
    assert source.parked().keys() == {"public.events", "public.part"}
    _write(source, "t")
    source.flush(config)
    assert [row.op for row in source.log("public.t")] == ["I", "U", "D"]


def test_what_others_have_in_a_publication_is_theirs(source: Bench) -> None:
    """Only what was registered is withdrawn, and what inherits from it and was added with it."""
    source.execute(f"""
        create table parent (id int primary key, v int); create table heir () inherits (parent);
        create table theirs (id int, v int);
        create publication cdc_{source.name} for table parent, theirs
          with (publish_via_partition_root = true)
    """)
    config = _config(source, "parent")
    with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
        pipeline.store.park_unknown(config.tables[0].id, "as an earlier version left it")
        guarding.guard(pipeline, own)
    assert _published(source) == {"parent", "theirs"}
    _write(source, "parent", "heir")


def test_only_a_tables_own_rows_are_read_again(source: Bench) -> None:
    source.execute("""
        create table own (id int primary key, v text); create table heir () inherits (own);
        insert into own values (1, 'own'); insert into heir values (1, 'inherited')
    """)
    config = _config(source, "own")
    source.flush(config)
    with Pipeline.open(config) as pipeline:
        (row,) = pipeline.store.tables()
        (found,) = rereader(pipeline, LakeTable(config, config.tables[0], row))([("1",)])
    assert '"own"' in found


def test_a_withdrawal_never_waits_for_a_lock(source: Bench) -> None:
    source.execute("create table t (id int primary key, v int); insert into t values (1, 1)")
    config = _config(source, "t")
    source.flush(config)
    source.execute("alter table t drop constraint t_pkey")
    with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
        with psycopg.connect(source.dsn) as vacuuming:
            vacuuming.execute("lock table t in share update exclusive mode")
            guarding.guard(pipeline, own)
            assert _published(source) == {"t"}
            assert source.parked().keys() == {"public.t"}
        guarding.guard(pipeline, own)
    assert _published(source) == set()
    _write(source, "t")


def test_a_lock_that_a_withdrawal_waits_for_delays_no_look(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs the source nothing while it waits: another table's changes fail for seconds."""
    waits = "select 1 from pg_locks where relation = 't'::regclass and not granted"
    source.execute("create table t (id int primary key, v int); create table u (like t)")
    source.execute("alter table u add primary key (id)")
    config = _config(source, "t", "u")
    source.flush(config)
    with psycopg.connect(source.dsn) as vacuuming, flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        with monkeypatch.context() as paused:
            paused.setattr(guarding, "withdraw", lambda *_: Publishing({}))
            source.execute("alter table t replica identity nothing")
            wait_for(lambda: source.parked().keys() == {"public.t"})
            vacuuming.execute("lock table t in share update exclusive mode")
        wait_for(lambda: source.execute(waits))
        wait_for(lambda: not source.execute(waits))
        source.execute("alter table u replica identity nothing")
        wait_for(lambda: _published(source) == {"t"}, 3 * guarding.GUARD_SECONDS + 2)
        _write(source, "u")


def test_a_renamed_table_is_withdrawn_too(source: Bench) -> None:
    """It was published by its former name; Postgres refuses its changes all the same."""
    source.execute("create table t (id int primary key, v int); create table u (like t)")
    source.execute("alter table u add primary key (id); create schema s")
    config = _config(source, "t", "u")
    source.flush(config)
    source.execute("alter table t rename to former_t; alter table u set schema s")
    source.execute("alter table former_t replica identity nothing")
    source.execute("alter table s.u drop constraint u_pkey")
    with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
        guarding.guard(pipeline, own)
    assert _published(source) == set()
    _write(source, "former_t", "s.u")


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
        config = _config(source, "t", "missing", "events")
        config = config.model_copy(update={"postgres": _as(source, role)})
        with psycopg.connect(source_dsn(config), autocommit=True) as asking:
            found = {f.table: f for f in preflight(asking, config) if f.code == "table_owner"}
            assert found.keys() == {"public.missing", "public.events"}
            source.execute(found["public.events"].remedy)  # makes the other publication, too
        source.flush(config)
        assert source.parked().keys() == {"public.missing"}
        assert "alter publication" in source.parked()["public.missing"]
        source.execute("alter table t drop constraint t_pkey")
        said: dict[object, str] = {}
        with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
            guarding.guard(pipeline, own, said)  # type: ignore[arg-type]
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


def test_a_publication_of_inserts_that_came_late(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older servers can't decode what was changed before a publication that is asked for."""
    monkeypatch.setattr(receiver, "IDLE_STEP_SECONDS", 0.2)
    monkeypatch.setattr(pin_keeper, "PIN_SECONDS", 0.2)
    source.execute(
        "create table t (id int primary key, v int); create table events (id int, v int)"
    )
    config = _config(source, "t")
    source.flush(config)
    source.execute(f"drop publication cdc_{source.name}_inserts")  # as before there were two
    _write(source, "t")  # not streamed yet
    config = _config(source, "t", "events")
    _pin(config)
    assert _states(source)["public.events"] == "waiting"
    with flushing(config):
        wait_for(lambda: _states(source)["public.events"] == "streaming")
        _write(source, "t", "events")
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
    config = _config(source, "events")
    source.flush(config)
    assert (_published(source), _published(source, "_inserts")) == (set(), {"events"})
    source.execute("alter table events replica identity full")
    with Pipeline.open(config) as pipeline:
        mark_for_copy(pipeline, [table.id for table in config.tables])
    _pin(config)
    assert (_published(source), _published(source, "_inserts")) == ({"events"}, set())
    _write(source, "events")
    source.flush(config)
    assert "D" in [row.op for row in source.log("public.events")]


def test_a_dropped_publication_of_inserts_stops_only_who_is_in_it(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once its tables are parked, the source isn't asked for it any more."""
    source.execute("create table t (id int primary key, v int); create table events (id int)")
    config = _config(source, "t", "events")
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
        _write(source, "t")
        wait_for(lambda: [row.op for row in source.log("public.t")] == ["I", "U", "D"])
        wait_for(lambda: source.parked().keys() == {"public.events"})
        wait_for(lambda: progress.state == "streaming" and progress.sessions > 1)
        time.sleep(receiver.HEARTBEAT_SECONDS + 0.5)  # it has heard of what is parked
        asked.clear()
        time.sleep(2 * receiver.HEARTBEAT_SECONDS)
    assert not asked
    assert "table_unpublished" in source.parked()["public.events"]


def test_a_table_that_nobody_asks_for_any_more_costs_a_tick_nothing(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for ever for its copy: taken out of the configuration, and nothing removes it."""
    source.execute("create table t (id int primary key); create table u (id int primary key)")
    both = _config(source, "t", "u")
    source.flush(both)
    with Pipeline.open(both) as pipeline:
        mark_for_copy(pipeline, [both.tables[1].id])
    monkeypatch.setattr(Pins, "_pin_waiting", lambda *_: pytest.fail("the source was asked"))
    with Pipeline.open(_config(source, "t")) as pipeline:
        pins = Pins(pipeline)
        pins.tick()
        pins.close()
    assert _states(source)["public.u"] == "waiting"


def test_a_publication_of_inserts_sends_the_columns_that_the_other_one_does(
    postgres_servers: Callable[[int], EmbeddedPostgres], tmp_path: Path
) -> None:
    """Since 18 one sends generated columns or doesn't: one made as the README says doesn't."""
    with bench(postgres_servers(18).start(), "pb_generated", tmp_path) as source:
        source.execute("""
            create table events (id int, g int generated always as (id * 2) stored);
            create publication cdc_pb_generated with (publish_via_partition_root = true);
        """)
        config = _config(source, "events")
        source.flush(config)
        source.execute("insert into events values (1)")
        source.flush(config)
        assert [row.data for row in source.log("public.events")] == [{"id": "1"}]
