"""Changes that don't say which row they are of, as a server sends them."""

from __future__ import annotations

import pytest

from cdc_assets.config.source import parse_config
from cdc_assets.flusher.guard import Guard
from cdc_assets.log.copies.chunks import chunks
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.pins.pins import Pins
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.names import TableId
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.waiting import wait_for


def test_a_partition_with_an_identity_of_its_own_sets_its_table_alone_aside(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The guard sees the same in the catalog, and may be quicker than the decoder.
    monkeypatch.setattr(Guard, "start", lambda _: None)
    source.execute("""
        create table t (id int, part int, code text not null, primary key (id, part))
            partition by list (part);
        create table t_1 partition of t for values in (1);
        create table t_2 partition of t for values in (2);
        create table other (id int primary key);
        insert into t values (1, 1, 'a'), (2, 1, 'b'), (3, 2, 'c');
    """)
    config = source.config("public.t", "public.other", flush_interval="20ms")
    source.flush(config)
    with flushing(config) as progress:
        wait_for(lambda: progress.state == "streaming")
        source.execute("""
            create unique index by_code on t_1 (code);
            alter table t_1 replica identity using index by_code;
            delete from t where id = 3;
            delete from t where id = 1;
            insert into other values (1)
        """)
        written = current_lsn(source.connection)
        wait_for(lambda: source.flushed() >= written)
        reason = source.parked()["public.t"]
        assert progress.sessions == 1
    assert "doesn't say the value of its key (id, part)" in reason
    assert "cdc-assets resync public.t" in reason
    assert not any(None in row.data.values() for row in source.log("public.t"))
    assert [row.op for row in source.log("public.other")] == ["I"]
    # A copy that is as of later has no gap there; one that waits for its pin doesn't know yet.
    with Pipeline.open(config) as pipeline:
        for state, snapshot, commit, wanted in (
            ("waiting", None, 0x20, False),
            ("streaming", "0/30", 0x20, False),
            ("waiting", "0/10", 0x20, True),
            ("streaming", "0/20", 0x20, True),
            ("copied", "0/10", 0x20, False),
            ("parked", "0/10", 0x20, False),
        ):
            source.execute(
                "update _pg2iceberg.tables set state = %s, snapshot_lsn = %s", state, snapshot
            )
            found = pipeline.store.park_log(TableId("public", "t"), "why", Lsn(commit))
            assert found is wanted, (state, snapshot)


def test_what_is_left_out_with_an_odd_change_counts_too(source: Bench) -> None:
    """An odd change is in the copy; what waits to be staged together with it came after that."""
    source.execute("""
        create table t (id int, part int, code text not null, primary key (id, part))
            partition by list (part);
        create table t_1 partition of t for values in (1);
        create unique index by_code on t_1 (code);
        insert into t values (1, 1, 'a');
    """)
    config = source.config("public.t", flush_interval="10m")
    source.flush(config)
    with flushing(config) as progress, Pipeline.open(config) as pipeline:
        wait_for(lambda: progress.state == "streaming")
        source.execute("alter table t_1 replica identity using index by_code")
        source.execute("delete from t")
        source.execute("alter table t_1 replica identity default")
        mark_for_copy(pipeline, [TableId("public", "t")])
        streams = "select 1 from _pg2iceberg.tables where state = 'streaming'"
        wait_for(lambda: source.ask_log(streams))
        source.execute("insert into t values (2, 1, 'b')")
        written = current_lsn(source.connection)
        wait_for(lambda: progress.received >= written)
    assert "doesn't say the value of its key (id, part)" in source.parked()["public.t"]


def test_a_pin_that_was_begun_before_isn_t_a_new_epoch_s(
    source: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A re-sync, or a change that can't be staged, while a slot waits for a transaction."""
    source.execute("create table t (id int primary key); insert into t values (1)")
    settings = source.settings("public.t") | {"snapshot": {"mode": "initial"}}
    config, table = parse_config(settings, "test"), TableId("public", "t")
    with Pipeline.open(config) as pipeline:
        store, pins = pipeline.store, Pins(pipeline)
        pins.prepare()
        mark_for_copy(pipeline, [table])
        make = pins._temporary_slot
        for epoch, meanwhile in (
            (3, lambda: mark_for_copy(pipeline, [table])),
            (4, lambda: store.park_log(table, "why", Lsn(0x20))),
        ):
            monkeypatch.setattr(pins, "_temporary_slot", lambda do=meanwhile: (do(), make())[1])
            pins.tick()
            row = store.table(table)
            assert row is not None
            assert (row.epoch, row.state, row.snapshot_lsn) == (epoch, "waiting", None)
        monkeypatch.setattr(pins, "_temporary_slot", make)
        pins.tick()
        assert [chunk.state for chunk in chunks(store, table, 4)] == ["planned"]
        pins.close()


def test_the_key_under_full_is_known_by_its_column_and_not_by_its_name(source: Bench) -> None:
    source.execute("""
        create table t (id int primary key, new_id int, v text);
        alter table t replica identity full;
        insert into t values (1, 10, 'a'), (2, 20, 'b'), (3, 30, 'c');
    """)
    config = source.config("public.t")
    source.flush(config)
    source.execute("""
        alter table t rename id to id_old;
        alter table t rename new_id to id;
        delete from t where id = 10;
        update t set id = 21 where id = 20;
        update t set id_old = 4 where id = 30
    """)
    source.flush(config)
    assert source.parked() == {}
    assert [(row.op, row.data) for row in source.log("public.t")] == [
        ("D", {"id_old": "1"}),
        ("U", {"id_old": "2", "id": "21", "v": "b"}),
        ("D", {"id_old": "3"}),
        ("U", {"id_old": "4", "id": "30", "v": "c"}),
    ]
