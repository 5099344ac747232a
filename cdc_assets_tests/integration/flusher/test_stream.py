"""The flusher on a real server: what it stages, the invariants it keeps, and its slot."""

from __future__ import annotations

import struct
import threading
import time
from collections import Counter

import psycopg
import pytest

from cdc_assets.flusher.flusher import run
from cdc_assets.flusher.stream import Stream
from cdc_assets.postgres.lsn import Lsn
from cdc_assets.postgres.slots import current_lsn
from cdc_assets_tests.support import pgoutput_reference as reference
from cdc_assets_tests.support.flusher import Bench, flushing
from cdc_assets_tests.support.threads import beside
from cdc_assets_tests.support.waiting import wait_for


def test_real_frames_equal_the_plain_decoder(source: Bench) -> None:
    source.execute("""
        create table keyed (id int primary key, v text, doc text);
        alter table keyed alter doc set storage external;
        create table full_ (a int, b text, doc text, primary key (a, b));
        alter table full_ replica identity full;
        alter table full_ alter doc set storage external;
        create table keyless (a text, doc text);
        alter table keyless replica identity full;
        create table "My ""T"".x" ("Id\\" int primary key, "naïve, 'q'" jsonb);
        create table nothing (); alter table nothing replica identity full;
    """)
    tables = ("keyed", "full_", "keyless", '"My ""T"".x"', "nothing")
    config = source.config(*(f"public.{t}" for t in tables))
    source.flush(config)
    source.execute("select pg_create_logical_replication_slot('beside', 'pgoutput')")
    doc = "repeat(md5('x'), 200)"
    source.execute(f"""
        insert into keyed select g, 'v' || g, {doc} from generate_series(1, 50) g;
        insert into full_ select g, 'k', {doc} from generate_series(1, 50) g;
        insert into keyless values ('a', {doc}), (null, null), ('', {doc});
        insert into nothing default values;
    """)
    source.execute("update keyed set v = null where id < 10")
    source.execute("update keyed set id = id + 1000 where id < 20")
    source.execute("update full_ set b = 'moved' where a < 5; update full_ set a = a where a < 9")
    source.execute("update keyless set a = 'b' where a = 'a'; delete from keyless where a is null")
    source.execute("delete from keyed where id = 30; delete from full_ where a = 30")
    source.execute(r"""insert into "My ""T"".x" values (1, '{"a\\": "\u0001 \n é 🎉"}')""")
    source.execute(
        "begin; insert into keyed values (1, 'first'); savepoint s;"
        " insert into keyed values (2, 'gone'); rollback to s;"
        " insert into keyed values (3, 'third'); commit"
    )
    source.execute("truncate keyed, full_; insert into keyed values (1, 'x', 'y')")
    source.execute("alter table keyed add more int default 7; update keyed set v = 'z'")
    source.execute("alter table keyed drop doc; insert into keyed values (9, e'\\b\\t\\\\', 1)")
    source.flush(config)

    messages = source.execute(
        "select lsn::text, data from pg_logical_slot_get_binary_changes('beside', null, null,"
        " 'proto_version', '1', 'publication_names', %s)",
        f"cdc_{source.name}",
    )
    oids = {t: source.execute("select %s::regclass::oid::int", t)[0][0] for t in tables}
    keys = {"keyed": ("id",), "full_": ("a", "b"), '"My ""T"".x"': ("Id\\",)}
    plain = reference.Reference(
        {oid: reference.Spec(keys.get(table, ())) for table, oid in oids.items()}
    )
    for lsn, data in messages:
        plain.feed(b"w" + struct.pack(">QQq", int(Lsn.parse(lsn)), 0, 0) + data)
    for table, oid in oids.items():
        expected = [
            (r.op, r.lsn, r.commit_lsn, r.at, r.xid, r.unchanged, r.data)
            for r in plain.rows
            if r.oid == oid
        ]
        found = [
            (r.op, r.lsn, r.commit_lsn, r.at, r.xid, r.unchanged, r.data)
            for r in source.log(f"public.{table}")
        ]
        assert found == expected
    keyed = source.log("public.keyed")
    assert {"first", "third"} < {r.data.get("v") for r in keyed}
    assert "gone" not in {r.data.get("v") for r in keyed}
    assert any("" in r.data for r in keyed)
    assert any(r.op == "T" for r in keyed)


def test_invariant_1_ack_after_register(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t", flush_interval="100ms")
    source.flush(config)
    with flushing(config), psycopg.connect(source.dsn) as blocker:
        blocker.execute("lock table _pg2iceberg.log_index in exclusive mode")
        source.execute("insert into t select g, 'x' from generate_series(1, 1000) g")
        written = current_lsn(source.connection)
        # Staged, and the registration hangs: this is when an early acknowledgement would show.
        wait_for(
            lambda: source.execute(
                "select 1 from pg_locks where not granted"
                " and relation = '_pg2iceberg.log_index'::regclass"
            )
        )
        for _ in range(15):
            assert source.confirmed() <= source.flushed() < written
            time.sleep(0.1)
        blocker.rollback()
        wait_for(lambda: source.flushed() >= written)
        wait_for(lambda: source.confirmed() >= written)
        assert source.confirmed() <= source.flushed()
    assert len(source.log("public.t")) == 1000


def test_invariant_2_all_or_nothing(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    source.flush(config)
    before = source.flushed()
    source.execute("alter table _pg2iceberg.log_index add constraint no check (false)")
    source.execute("insert into t select g, 'x' from generate_series(1, 10) g")
    with pytest.raises(psycopg.errors.CheckViolation):
        source.flush(config)
    assert source.flushed() == before
    assert source.execute("select * from _pg2iceberg.log_seq") == []
    assert len(list(source.folder.rglob("*.parquet"))) == 1  # an orphan
    source.execute("alter table _pg2iceberg.log_index drop constraint no")
    source.flush(config)
    assert [r.data["id"] for r in source.log("public.t")] == [str(i) for i in range(1, 11)]


def test_invariant_3_commit_order_in_whole_transactions(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t", flush_bytes="1MB", flush_interval="50ms")
    source.flush(config)
    with flushing(config), psycopg.connect(source.dsn) as large:
        source.execute("insert into t values (-1, 'early')")
        large.execute(
            "insert into t select g, repeat('large', 20) from generate_series(1, 60000) g"
        )
        source.execute("insert into t values (-2, 'meanwhile')")
        large.execute(
            "insert into t select g, repeat('large', 20) from generate_series(60001, 120000) g"
        )
        time.sleep(0.5)
        assert len(source.log("public.t")) <= 2
        large.commit()
        source.execute("insert into t values (-3, 'late')")
        written = current_lsn(source.connection)
        seen = set[int]()
        while source.flushed() < written:
            seen.add(sum(b - a for a, b, _ in source.entries("public.t")))
            time.sleep(0.01)
    # Never a part of the large one: 0, 1 or 2 rows before it, then all of it.
    assert not [count for count in seen if 2 < count < 120_002], seen
    rows = source.log("public.t")
    assert [r.data["v"] for r in rows[:2]] == ["early", "meanwhile"]
    assert [r.data["id"] for r in rows[2:-1]] == [str(i) for i in range(1, 120_001)]
    assert rows[-1].data["v"] == "late"
    assert [r.commit_lsn for r in rows] == sorted(r.commit_lsn for r in rows)
    assert len(source.entries("public.t")) > 4  # it was staged in parts


def test_until_ends_under_constant_writes(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    source.flush(config)
    count = Counter[str]()

    def write(stop: threading.Event) -> None:
        with psycopg.connect(source.dsn, autocommit=True) as writer:
            while not stop.is_set():
                count["rows"] += 1
                writer.execute("insert into t values (%s, 'x')", (count["rows"],))

    with beside(write):
        time.sleep(0.5)
        written, until = count["rows"], current_lsn(source.connection)
        began = time.monotonic()
        result = run(config, until=until)
        assert time.monotonic() - began < 20
    assert result.flushed is not None
    assert result.flushed >= until
    assert source.confirmed() >= until
    assert len(source.log("public.t")) >= written


def test_the_last_acknowledgement_arrives_though_more_is_being_sent(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    config = source.config("public.t")
    flushed = source.flush(config).flushed
    assert flushed is not None
    ends = []
    for first in range(0, 20_000, 1000):
        source.execute(
            "insert into t select %s + g, repeat('x', 1000) from generate_series(1, 1000) g", first
        )
        ends.append(current_lsn(source.connection))
    stream = Stream.start(source.dsn, config.name, config.slot, [config.publication], flushed)
    wait_for(lambda: stream.receive(1).frames)  # the server is sending, and goes on to
    stream.close(ends[0])
    assert source.confirmed() >= ends[0]


def test_a_waiting_table_is_pinned_while_the_others_flow(source: Bench) -> None:
    source.execute("create table t (id int primary key, v text)")
    source.execute("create table u (id int primary key)")
    config = source.config("public.t", "public.u", flush_interval="50ms")
    source.flush(config)
    source.execute(
        "update _pg2iceberg.tables set state = 'waiting', snapshot_lsn = null"
        " where table_name = 'public.u'"
    )
    with flushing(config), psycopg.connect(source.dsn) as old:
        old.execute("select pg_current_xact_id()")  # the pin has to wait for this one
        time.sleep(4)
        source.execute("insert into t values (1, 'x'); insert into u values (1)")
        wait_for(lambda: len(source.log("public.t")) == 1)
        waiting = "select 1 from _pg2iceberg.tables where state = 'waiting'"
        assert source.execute(waiting)
        old.rollback()
        wait_for(lambda: not source.execute(waiting))
        source.execute("insert into u values (2)")
        wait_for(lambda: len(source.log("public.u")) == 2)
