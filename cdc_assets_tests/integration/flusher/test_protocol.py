"""Everything pgoutput sends, on each version: the log equals what the plain decoder makes of it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from psycopg import sql

from cdc_assets.flusher.decode.decoder import Decoder
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decode.waiting import decoded
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support import pgoutput as beside
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.staged_rows import parse_staged
from cdc_assets_tests.support.waiting import wait_for


@pytest.fixture
def source(any_source: Bench) -> Bench:
    return any_source


def test_every_message(source: Bench) -> None:
    source.execute("""
        create type mood as enum ('glad', 'sad');
        create type pair as (a int, b text);
        create domain positive as int check (value > 0);
        create table parent (id int primary key, m mood, p pair, d positive, l mood[]);
        create table child (id serial primary key, parent int references parent);
        create table whole (id int primary key, v text);
        alter table whole replica identity full;
        create table loose (a int, b text);
        alter table loose replica identity full;
        create table other (id int);
    """)
    keys: dict[str, tuple[str, ...]] = {
        "public.parent": ("id",),
        "public.child": ("id",),
        "public.whole": ("id",),
        "public.loose": (),
    }
    config = source.config(*keys)
    source.flush(config)
    beside.open_beside(source)

    # insert; update without an old tuple, with K, with O; delete with K, with O
    source.execute("insert into parent values (1, 'glad', '(1,x)', 3, '{glad,sad}')")
    source.execute("insert into parent values (2, 'sad')")
    source.execute("update parent set m = 'sad' where id = 1; update parent set id = 3 where id=2")
    source.execute("insert into whole values (1, null), (2, 'b'); update whole set v = 'c'")
    source.execute("update whole set id = id + 10; delete from whole where id = 11")
    source.execute("insert into loose values (1, 'x'), (null, null); update loose set b = 'y'")
    source.execute("delete from loose where a is null; delete from parent where id = 3")
    # of several tables, cascading, restarting the sequence
    source.execute("insert into child (parent) values (1), (1)")
    source.execute("truncate whole, loose, other")
    source.execute("begin; truncate parent restart identity cascade; truncate whole; commit")
    source.execute("insert into parent values (1); insert into child (parent) values (1)")
    # another node's changes
    source.execute("select pg_replication_origin_create(%s)", source.name)
    source.execute("select pg_replication_origin_session_setup(%s)", source.name)
    source.execute("begin")
    source.execute("select pg_replication_origin_xact_setup('0/ABCDEF', now())")
    source.execute("insert into parent values (50, 'glad')")
    source.execute("commit")
    source.execute("select pg_replication_origin_session_reset()")
    source.execute("select pg_replication_origin_drop(%s)", source.name)
    # words to other consumers, empty transactions, one of tables that aren't ours
    source.execute("select pg_logical_emit_message(false, 'p', 'at once')")
    source.execute(
        "begin; insert into parent values (60); select pg_logical_emit_message(true, 'p', 'then');"
        " select pg_logical_emit_message(false, 'p', 'now'); insert into parent values (61); commit"
    )
    source.execute("begin; create temp table nobodys (a int); commit; insert into other values (1)")
    source.execute("begin; insert into parent values (70); delete from child; rollback")
    # what is rolled back to a savepoint was never there, however deep
    source.execute(
        "begin; insert into parent values (80); savepoint a; insert into parent values (81);"
        " savepoint b; insert into parent values (82); release b; rollback to a;"
        " insert into parent values (83); savepoint c; insert into parent values (84); release c;"
        " commit"
    )
    # a transaction in two phases is an ordinary one at its commit
    source.execute("begin; insert into parent values (90); prepare transaction 'kept'")
    source.execute("begin; insert into whole values (90, 'no'); prepare transaction 'lost'")
    source.execute("insert into parent values (91)")
    source.execute("rollback prepared 'lost'")
    source.execute("commit prepared 'kept'")
    source.flush(config)

    sent = beside.frames(source)
    assert beside.kinds(sent) == set("BCORYIUDT")
    assert beside.assert_log_is_what_was_sent(source, keys, sent) > 30
    parents = [row.data["id"] for row in source.log("public.parent") if row.op == "I"]
    assert parents == [str(i) for i in (1, 2, 1, 50, 60, 61, 80, 83, 84, 91, 90)]
    assert [r.op for r in source.log("public.child")] == ["I", "I", "T", "I"]
    assert source.log("public.child")[-1].data["parent"] == "1"

    # Nobody asks for messages; whoever does gets the same rows.
    talkative = beside.frames(source, messages="true")
    assert "M" in beside.kinds(talkative)
    assert _decoded(source, keys, talkative) == [
        beside.comparable(row) for table in keys for row in source.log(table)
    ]


def _decoded(
    source: Bench, keys: dict[str, tuple[str, ...]], sent: list[bytes]
) -> list[tuple[object, ...]]:
    specs = {beside.oid(source, t): DecodeSpec(TableId.parse(t), key) for t, key in keys.items()}
    decoder = Decoder(specs.get)
    for low in range(0, len(sent), 7):
        batch = sent[low : low + 7]
        decoder.feed(b"".join(batch), np.array([len(f) for f in batch], np.int32))
    found: dict[int, list[tuple[object, ...]]] = {number: [] for number in specs}
    taken = decoder.take_committed()
    for number, table in decoded(taken):
        rows = parse_staged(0, table.to_pylist())
        found[taken[number].relation.oid] += map(beside.comparable, rows)
    return [row for number in specs for row in found[number]]


def test_a_relation_that_changes_within_a_transaction(source: Bench) -> None:
    source.execute("create table t (id int primary key, a text, b int); create table u (id int)")
    source.execute("alter table u replica identity full")
    keys: dict[str, tuple[str, ...]] = {"public.t": ("id",), "public.u": ()}
    config = source.config(*keys)
    source.flush(config)
    beside.open_beside(source)
    source.execute("""
        begin;
        insert into t values (1, 'x', 2);
        insert into u values (1);
        alter table t add column c text default 'later';
        insert into t values (2, 'x', 2, 'own');
        update t set b = 3 where id = 1;
        alter table t rename column a to "A b";
        insert into t values (3, 'renamed', 1, null);
        savepoint s;
        alter table t add column gone int;
        insert into t values (4, 'undone', 1, null, 5);
        rollback to s;
        insert into t values (5, 'kept', 1, null);
        alter table t alter column b type text using 'n' || b;
        insert into t values (6, 'retyped', 'n1', null);
        alter table t drop column c;
        update t set b = 'last' where id = 2;
        delete from t where id = 1;
        insert into u values (2);
        commit
    """)
    source.execute("alter table t add column d int; insert into t values (7, 'x', 'y', 1)")
    source.flush(config)
    sent = beside.frames(source)
    assert sum(frame[25:26] == b"R" for frame in sent) >= 6
    assert beside.assert_log_is_what_was_sent(source, keys, sent) > 10
    rows = {(r.op, r.data["id"]): r.data for r in source.log("public.t")}
    assert rows["I", "1"] == {"id": "1", "a": "x", "b": "2"}
    assert rows["I", "2"] == {"id": "2", "a": "x", "b": "2", "c": "own"}
    assert rows["I", "3"] == {"id": "3", "A b": "renamed", "b": "1", "c": None}
    assert ("I", "4") not in rows
    assert rows["I", "6"] == {"id": "6", "A b": "retyped", "b": "n1", "c": None}
    assert rows["U", "2"] == {"id": "2", "A b": "x", "b": "last"}
    assert rows["I", "7"] == {"id": "7", "A b": "x", "b": "y", "d": "1"}


def test_generated_columns(source: Bench) -> None:
    """Stored ones are sent since Postgres 18; before, nothing is told of them."""
    source.execute(
        "create table t (id int primary key, a int, twice int generated always as (a * 2) stored)"
    )
    config = source.config("public.t")
    source.flush(config)
    beside.open_beside(source)
    source.execute("insert into t values (1, 4); update t set a = 5; delete from t")
    source.flush(config)
    beside.assert_log_is_what_was_sent(source, {"public.t": ("id",)}, beside.frames(source))
    data = [(r.op, dict(r.data)) for r in source.log("public.t")]
    if source.connection.info.server_version >= 180000:
        assert data == [
            ("I", {"id": "1", "a": "4", "twice": "8"}),
            ("U", {"id": "1", "a": "5", "twice": "10"}),
            ("D", {"id": "1"}),
        ]
    else:
        assert data == [
            ("I", {"id": "1", "a": "4"}),
            ("U", {"id": "1", "a": "5"}),
            ("D", {"id": "1"}),
        ]


def test_a_reply_is_given_when_the_server_wants_one(source: Bench) -> None:
    """We speak by ourselves every 10 s; a server that hangs up after 2 s asks, and is answered."""
    source.execute("create table t (id int primary key)")
    config = source.config("public.t")
    source.flush(config)
    source.execute(
        sql.SQL("alter database {} set wal_sender_timeout = '2s'")
        .format(sql.Identifier(source.name))
        .as_string(source.connection)
    )
    walsender = (
        "select pid from pg_stat_replication where application_name like 'cdc_assets %% flusher'"
        " and pid in (select active_pid from pg_replication_slots where slot_name = %s)"
    )
    with flushing(config):
        wait_for(lambda: source.execute(walsender, config.slot))
        first = source.execute(walsender, config.slot)
        time.sleep(6)  # three times what it waits
        assert source.execute(walsender, config.slot) == first
