"""Tables that lose their identity are withdrawn, and nobody waits for it."""

from __future__ import annotations

import psycopg
import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.flusher import guard as guarding
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.publication.changing import Publishing
from cdc_assets_tests.integration.pins.published import configured, published, write
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for


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
    config = configured(source, *names)
    source.flush(config)
    assert published(source) == {*names}
    lost = {f"public.{name}" for name in names} - {"public.well"}
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        source.execute("alter table key_dropped drop constraint key_dropped_pkey")
        source.execute("alter table made_nothing replica identity nothing")
        source.execute("create table new_leaf partition of attached for values from (0) to (10)")
        source.execute("create table heir () inherits (inherited_from)")
        wait_for(lambda: source.parked().keys() == lost)
        wait_for(lambda: published(source) == {"well", "inherited_from"})
        write(source, *names)
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
        wait_for(lambda: published(source) == {"well"})
        write(source, *names)
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
    write(source, "full_leaf")
    source.flush(config)
    assert [row.data for row in source.log("public.full_leaf")][:1] == [{"id": "1", "v": "1"}]


def test_what_others_have_in_a_publication_is_theirs(source: Bench) -> None:
    """Only what was registered is withdrawn, and what inherits from it and was added with it."""
    source.execute(f"""
        create table parent (id int primary key, v int); create table heir () inherits (parent);
        create table theirs (id int, v int);
        create publication cdc_{source.name} for table parent, theirs
          with (publish_via_partition_root = true)
    """)
    config = configured(source, "parent")
    with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
        pipeline.store.park_unknown(config.tables[0].id, "as an earlier version left it")
        guarding.guard(own, pipeline.config, pipeline.store)
    assert published(source) == {"parent", "theirs"}
    write(source, "parent", "heir")


def test_a_withdrawal_never_waits_for_a_lock(source: Bench) -> None:
    source.execute("create table t (id int primary key, v int); insert into t values (1, 1)")
    config = configured(source, "t")
    source.flush(config)
    source.execute("alter table t drop constraint t_pkey")
    with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
        with psycopg.connect(source.dsn) as vacuuming:
            vacuuming.execute("lock table t in share update exclusive mode")
            guarding.guard(own, pipeline.config, pipeline.store)
            assert published(source) == {"t"}
            assert source.parked().keys() == {"public.t"}
        guarding.guard(own, pipeline.config, pipeline.store)
    assert published(source) == set()
    write(source, "t")


def test_a_lock_that_a_withdrawal_waits_for_delays_no_look(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs the source nothing while it waits: another table's changes fail for seconds."""
    waits = "select 1 from pg_locks where relation = 't'::regclass and not granted"
    source.execute("create table t (id int primary key, v int); create table u (like t)")
    source.execute("alter table u add primary key (id)")
    config = configured(source, "t", "u")
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
        wait_for(lambda: published(source) == {"t"}, 3 * guarding.GUARD_SECONDS + 2)
        write(source, "u")


def test_a_renamed_table_is_withdrawn_too(source: Bench) -> None:
    """It was published by its former name; Postgres refuses its changes all the same."""
    source.execute("create table t (id int primary key, v int); create table u (like t)")
    source.execute("alter table u add primary key (id); create schema s")
    config = configured(source, "t", "u")
    source.flush(config)
    source.execute("alter table t rename to former_t; alter table u set schema s")
    source.execute("alter table former_t replica identity nothing")
    source.execute("alter table s.u drop constraint u_pkey")
    with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
        guarding.guard(own, pipeline.config, pipeline.store)
    assert published(source) == set()
    write(source, "former_t", "s.u")


def test_the_table_of_markers_is_withdrawn_once_postgres_refuses_its_changes(
    source: Bench,
) -> None:
    source.execute("create table t (id int primary key, v int); insert into t values (1, 1)")
    source.execute("create table cdc_markers (marker uuid primary key, name text)")
    settings = {**source.settings(), "tables": ["t"], "markers": {"table": "cdc_markers"}}
    config = parse_config(settings, "test")
    source.flush(config)
    assert published(source) == {"t", "cdc_markers"}
    source.execute("alter table cdc_markers drop constraint cdc_markers_pkey")
    with Pipeline.open(config) as pipeline, pipeline.connect_source("guard") as own:
        guarding.guard(own, pipeline.config, pipeline.store)
    assert published(source) == {"t"}
    source.execute("delete from cdc_markers")
